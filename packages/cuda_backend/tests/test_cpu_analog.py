"""What the conformance suite cannot know about the CPU kernels of the analog ops: noise, ties, compilations, areas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from triptych import noise, registry
from triptych_cuda import parts
from triptych_cuda.ops import analog_linear, analog_weight, input_range_update, tile_abs_max, tile_std

Tensor = torch.Tensor
WIDE = (torch.float32, torch.float64)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if reasons := parts.CPU.reasons_unavailable():
        pytest.skip(" ".join(reasons))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def variants() -> list[str]:
    return [] if parts.CPU.reasons_unavailable() else list(parts.CPU.module().variants())


def equal(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# --- noise -----------------------------------------------------------------------------------------------------------

ONES = 0xFFFFFFFF
KNOWN = [  # counter (group, row, row >> 32, stream), key (low, high), words; from Random123's kat_vectors
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
@pytest.mark.parametrize("name", variants())
def test_philox_gives_the_published_words(
    name: str, counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    group, low, high, stream = counter
    with parts.cpu_variant(name):
        found = parts.CPU.module().philox(key[0] | key[1] << 32, stream, low | high << 32, group)
    assert tuple(found) == words


@pytest.mark.parametrize("name", variants())
def test_philox_gives_the_words_of_the_specification(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    counters = torch.randint(0, 2**32, (200, 4), generator=generator)
    keys = torch.randint(0, 2**32, (200, 2), generator=generator)
    expected = torch.stack(noise.philox(tuple(counters.T), (keys[:, 0], keys[:, 1])), -1)  # type: ignore[arg-type]
    with parts.cpu_variant(name):
        philox = parts.CPU.module().philox
        for (group, low, high, stream), (k0, k1), words in zip(
            counters.tolist(), keys.tolist(), expected.tolist(), strict=True
        ):
            assert philox(k0 | k1 << 32, stream, low | high << 32, group) == words


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", variants())
def test_normals_lie_near_those_of_the_specification(name: str, dtype: torch.dtype) -> None:
    """Half of the bound that the suite allows: 4 units of the radius would be 2 in the last place of each factor."""
    columns = 200_000
    for seed, stream, row in ((7, 0, 0), (-3, 5, 2**33 + 1), (2**63 - 1, 2**32 - 1, 2**32 - 1)):
        key = torch.tensor([seed])
        expected = noise.normal(key, stream, 1, columns, torch.float64, row)[0]
        bound = noise.normal_bound(key, stream, 1, columns, dtype, row)[0]
        found = torch.empty(columns, dtype=dtype)
        with parts.cpu_variant(name):
            parts.CPU.module().normal_(found, seed % 2**64, stream, row, 0)
        assert bool(((found.double() - expected).abs() <= bound / 2).all())


@pytest.mark.parametrize("begin", [0, 1, 2, 3, 4, 7, 63, 65])
@pytest.mark.parametrize("name", variants())
def test_a_number_does_not_depend_on_where_its_row_was_begun(name: str, begin: int) -> None:
    with parts.cpu_variant(name):
        whole, part = torch.empty(1200), torch.empty(1200 - begin)
        parts.CPU.module().normal_(whole, 11, 0, 3, 0)
        parts.CPU.module().normal_(part, 11, 0, 3, begin)
    assert torch.equal(whole[begin:], part)


@pytest.mark.parametrize("dtype", WIDE)
def test_noise_has_the_moments_of_a_normal_distribution(dtype: torch.dtype) -> None:
    weight = torch.ones(512, 1024, dtype=dtype)
    modified, _ = analog_weight.forward(weight, None, torch.tensor([1]), 1, "none", 0.0, "per_tensor", 1.0)
    drawn = (modified - weight).double().flatten()
    count = drawn.numel()
    assert abs(drawn.mean()) < 5 / math.sqrt(count)
    assert abs(drawn.var() - 1) < 5 * math.sqrt(2 / count)
    assert abs(drawn.pow(4).mean() - 3) < 5 * math.sqrt(96 / count)


# --- ties and edges --------------------------------------------------------------------------------------------------

HALVES = [-2.5, -1.5, -0.5, -0.0, 0.5, 1.5, 2.5, 3.5]


@pytest.mark.parametrize("dtype", parts.DTYPES)
@pytest.mark.parametrize("name", variants())
def test_inputs_halfway_between_two_levels_go_to_the_even_one(name: str, dtype: torch.dtype) -> None:
    """A range of 4 with 8 steps: levels at the integers, all exact in every dtype."""
    x = torch.tensor([HALVES * 5], dtype=dtype)
    weight = torch.eye(40, dtype=dtype)
    scalars = (1, "learned", 8.0, 0.0, False, 0.0, -1.0, False, 0.0, 0.0)
    with parts.cpu_variant(name):
        y, _ = analog_linear.forward(x, weight, None, torch.tensor([4.0], dtype=dtype), None, None, *scalars)
    assert torch.equal(y, torch.round(x))


@pytest.mark.parametrize("dtype", parts.DTYPES)
@pytest.mark.parametrize("name", variants())
def test_weights_halfway_between_two_levels_go_to_the_even_one(name: str, dtype: torch.dtype) -> None:
    weight = torch.tensor([[*HALVES, 4.0] * 5], dtype=dtype)
    with parts.cpu_variant(name):
        modified, wmax = analog_weight.forward(weight, None, None, 1, "per_channel", 8.0, "none", 0.0)
    assert torch.equal(modified, torch.round(weight))
    assert wmax.item() == 4


@pytest.mark.parametrize("dtype", parts.DTYPES)
@pytest.mark.parametrize("name", variants())
def test_the_last_level_of_an_adc_is_not_beyond_it(name: str, dtype: torch.dtype) -> None:
    """A bound of 4 with 8 steps: 4.5 rounds to level 4, which stays; 4.6 to level 5, which is clipped."""
    values = torch.tensor([4.0, 4.5, 4.625, -4.5, -5.0, 3.5, float("nan"), 100.0, 0.5], dtype=dtype)
    weight = torch.diag(values.nan_to_num(0.0))
    x = torch.ones(1, 9, dtype=dtype)
    x[0, 6] = float("nan")
    weight[:, 6] = 0
    weight[6, 6] = 1
    x_clean = x.nan_to_num(0.0)
    wmax = torch.full((1, 9), 4.0, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    scalars = (1, "learned", -1.0, 0.0, False, 1.0, 8.0, True, 0.0, 0.0)
    one = torch.ones(1, dtype=dtype)
    with parts.cpu_variant(name):
        y, clipped = analog_linear.forward(x_clean, weight, None, one, wmax, None, *scalars)
        all_nan, none_clipped = analog_linear.forward(x, weight, None, one, wmax, None, *scalars)
    assert y[0].tolist() == [4, 4, 4, -4, -4, 4, 0, 4, 0]
    assert clipped.tolist() == [[[0b10010100, 0]]]
    assert all_nan.isnan().all()
    assert not none_clipped.any()


@pytest.mark.parametrize("name", variants())
def test_equal_elements_have_a_standard_deviation_of_zero(name: str) -> None:
    x = torch.full((70, 1001), 0.1) * torch.tensor([1.0, 1e8, 1e-30]).repeat_interleave(334)[:1001]
    with parts.cpu_variant(name):
        assert tile_std.forward(x, 3)[0].tolist() == [0, 0, 0]


# --- compilations and threads ----------------------------------------------------------------------------------------


def linear_arguments(
    dtype: torch.dtype, rows: int, columns: int, outputs: int, tiles: int, mode: str
) -> tuple[tuple[Any, ...], Tensor]:
    """Forward's arguments with everything switched on, and a gradient."""
    generator = torch.Generator().manual_seed(rows + columns + outputs)
    x, dy = (torch.randn(rows, size, generator=generator).to(dtype) for size in (columns, outputs))
    weight = (torch.randn(outputs, columns, generator=generator) / columns**0.5).to(dtype)
    (wmax,) = tile_abs_max.forward(weight, tiles)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    bound = torch.full((tiles,), 1.5, dtype=dtype) if mode in ("learned", "fast") else None
    scalars = (tiles, mode, 254.0, 0.05, True, 2.0, 254.0, True, 0.01, 0.5)
    return (x, weight, bias, bound, wmax, torch.tensor([9]), *scalars), dy


def linear_step(arguments: tuple[Any, ...], dy: Tensor) -> tuple[Tensor, ...]:
    x, weight, bias, bound, _, _, *scalars = arguments
    y, clipped = analog_linear.forward(*arguments)
    needs = (True, True, True, bound is not None)
    return y, clipped, *analog_linear.backward(dy, x, weight, bias, bound, clipped, *scalars, *needs)


def weight_step(dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    weight, grad = torch.randn(2, 130, 523, generator=generator).to(dtype)
    clip = torch.rand(3, 130, generator=generator).to(dtype)
    scalars = (3, "per_channel", 30.0, "per_tensor", 0.1)
    modified, wmax = analog_weight.forward(weight, clip, torch.tensor([5]), *scalars)
    return modified, wmax, *analog_weight.backward(grad, weight, clip, *scalars, True, True)


def reductions(dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    x = (torch.randn(3000, 70, generator=generator) + 20).to(dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    bound, count = torch.ones(3, dtype=dtype), torch.tensor([0, 3, 100])
    extremes = torch.ones(3, dtype=wide)
    return (
        *tile_abs_max.forward(x, 3),
        *tile_std.forward(x, 3),
        *input_range_update.forward(x, bound, count, None, None, 3, "std", 100, 3.0, 0.95),
        *input_range_update.forward(x, bound, count, extremes, extremes, 3, "extremes", 100, 3.0, 0.95),
    )


SHAPES = [(1, 300, 70, 3), (257, 300, 100, 2), (600, 40, 9, 3), (50, 700, 530, 1)]


@pytest.mark.parametrize("dtype", parts.DTYPES)
@pytest.mark.parametrize(("rows", "columns", "outputs", "tiles"), SHAPES)
@pytest.mark.parametrize("mode", ["learned", "dynamic"])
def test_bits_do_not_depend_on_the_number_of_threads(
    dtype: torch.dtype, rows: int, columns: int, outputs: int, tiles: int, mode: str, threads: None
) -> None:
    arguments, dy = linear_arguments(dtype, rows, columns, outputs, tiles, mode)
    results = []
    for count in (1, 2, 3, 16):
        torch.set_num_threads(count)
        results.append((*linear_step(arguments, dy), *weight_step(dtype), *reductions(dtype)))
    assert all(equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", parts.DTYPES)
@pytest.mark.parametrize(("rows", "columns", "outputs", "tiles"), SHAPES)
def test_variants_with_fused_multiply_add_agree_bit_for_bit(
    dtype: torch.dtype, rows: int, columns: int, outputs: int, tiles: int
) -> None:
    fused = [name for name in variants() if name != "baseline"]
    if len(fused) < 2:
        pytest.skip(f"this processor runs {variants()}; two variants with fused multiply-add are needed")
    arguments, dy = linear_arguments(dtype, rows, columns, outputs, tiles, "fast")
    results = []
    for name in fused:
        with parts.cpu_variant(name):
            results.append((*linear_step(arguments, dy), *weight_step(dtype), *reductions(dtype)))
    assert all(equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", parts.DTYPES)
@pytest.mark.parametrize("name", variants())
@pytest.mark.parametrize(("rows", "columns", "outputs"), [(1, 1, 1), (50, 300, 37), (49, 257, 259), (290, 33, 65)])
def test_every_variant_is_right_where_areas_and_panels_end(
    name: str, dtype: torch.dtype, rows: int, columns: int, outputs: int
) -> None:
    """Without noise and ADC, whose ties are the suite's business."""
    arguments, dy = linear_arguments(dtype, rows, columns, outputs, 1, "learned")
    x, weight, bias, bound, *_ = arguments
    scalars = (1, "learned", -1.0, 0.0, False, 0.0, -1.0, False, 0.0078125, 0.5)
    forward = (x, weight, bias, bound, None, None, *scalars)
    spec = registry.ops.get("analog_linear")
    assert spec.backward is not None
    with parts.cpu_variant(name):
        y, clipped = analog_linear.forward(*forward)
        backward = (dy, x, weight, bias, bound, clipped, *scalars, True, True, True, True)
        results = (y, *analog_linear.backward(*backward))
    expected = (spec.forward.reference(*forward)[0], *spec.backward.reference(*backward))
    bounds = (spec.forward.bound(*forward)[0], *spec.backward.bound(*backward))
    for output, one, other, limit in zip(("y", *spec.backward.outputs), results, expected, bounds, strict=True):
        assert bool(((one.double() - other).abs() <= limit).all()), output


@pytest.mark.parametrize("name", variants())
def test_a_clipped_output_has_no_gradient(name: str) -> None:
    """dx and dweight of outputs that a hand-made record says are clipped, for channels on both sides of a byte."""
    arguments, dy = linear_arguments(torch.float64, 70, 90, 21, 2, "none")
    x, weight, *_ = arguments
    scalars = (2, "dynamic", -1.0, 0.0, False, 1.0, -1.0, False, 0.0, 0.0)
    generator = torch.Generator().manual_seed(1)
    beyond = torch.rand(2, 70, 24, generator=generator) < 0.3
    beyond[..., 21:] = False
    clipped = (beyond.view(2, 70, 3, 8) << torch.arange(8)).sum(-1).to(torch.uint8)
    with parts.cpu_variant(name):
        found = analog_linear.backward(dy, x, weight, None, None, clipped, *scalars, True, True, False, False)
    grads = [dy.masked_fill(tile[:, :21], 0) for tile in beyond]
    dx = torch.cat([grads[0] @ weight[:, :45], grads[1] @ weight[:, 45:]], 1)
    dweight = torch.cat([grads[0].T @ x[:, :45], grads[1].T @ x[:, 45:]], 1)
    torch.testing.assert_close(found[0], dx)
    torch.testing.assert_close(found[1], dweight)


@pytest.mark.parametrize(
    ("run", "error", "text"),
    [
        (lambda x: tile_abs_max.forward(x, 9), ValueError, "there are 9 tiles for 8 columns"),
        (lambda x: tile_std.forward(x, 0), ValueError, "there are 0 tiles for 8 columns"),
        (
            lambda x: analog_weight.forward(x, None, None, 1, "per_row", 8.0, "none", 0.0),
            ValueError,
            'quantization is "per_row"; it must be none, per_tensor or per_channel',
        ),
        (
            lambda x: analog_weight.forward(x, None, None, 1, "none", 0.0, "per_tensor", 0.1),
            ValueError,
            "there is noise and no seed",
        ),
        (
            lambda x: analog_weight.forward(x, torch.ones(1, 3), None, 1, "none", 0.0, "none", 0.0),
            ValueError,
            r"clip is \[1, 3\] on cpu; it must be a plain tensor \[1, 4\]",
        ),
        (
            lambda x: analog_linear.forward(
                x, x, None, None, None, None, 1, "none", 8.0, 0.0, False, 0.0, -1.0, False, 0.0, 0.0
            ),
            ValueError,
            "converters and output noise are relative to the input range, and input_range_mode is none",
        ),
        (
            lambda x: input_range_update.forward(
                x, torch.ones(1), torch.zeros(1), None, None, 1, "std", 100, 3.0, 0.95
            ),
            TypeError,
            "count is Float; it must be Long",
        ),
    ],
)
def test_the_border_refuses_what_the_kernels_cannot_take(
    run: Callable[[Tensor], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        run(torch.randn(4, 8))
