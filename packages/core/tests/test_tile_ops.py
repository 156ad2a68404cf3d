"""Tiles, and the ops over them: what the conformance suite cannot know, by hand-worked numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from spies import ran

import triptych
from triptych import ArgumentError, registry
from triptych.ops import tile_std as std_op
from triptych.ops.input_range_update import input_range_update
from triptych.ops.tile_abs_max import tile_abs_max
from triptych.ops.tile_std import tile_std
from triptych.tiling import check_tiles, tile_sizes, tile_slices, tile_starts, tiles_for

NAN, INF = float("nan"), float("inf")


def on_composite(function: Any, *args: Any, **options: Any) -> Any:
    """The result of an op on `composite`, where nothing else ran."""
    with triptych.use("composite"), ran() as calls:
        result = function(*args, **options)
    assert calls == {(function.__name__, "forward", "composite"): 1}
    return result


# --- tiling -----------------------------------------------------------------------------------------------------------


def test_tiles_of_257_columns_and_at_most_128() -> None:
    assert tiles_for(257, 128) == 3
    assert tile_sizes(257, 3) == (86, 86, 85)
    assert tile_starts(257, 3) == (0, 86, 172)
    assert tile_slices(257, 3) == (slice(0, 86), slice(86, 172), slice(172, 257))


@pytest.mark.parametrize(
    ("n", "largest", "tiles"), [(5, -1, 1), (0, -1, 1), (0, 4, 1), (4, 4, 1), (5, 4, 2), (9, 1, 9), (7, 100, 1)]
)
def test_tiles_for(n: int, largest: int, tiles: int) -> None:
    assert tiles_for(n, largest) == tiles


@pytest.mark.parametrize("largest", [0, -2])
def test_tiles_of_no_size_are_refused(largest: int) -> None:
    with pytest.raises(ArgumentError, match=rf"max_input_size is {largest}\. It must be 1 or greater, or -1"):
        tiles_for(8, largest)


@given(n=st.integers(0, 10**6), largest=st.integers(1, 10**6))
def test_no_tile_is_larger_than_the_largest_and_none_is_in_vain(n: int, largest: int) -> None:
    tiles = tiles_for(n, largest)
    if tiles <= 10_000:
        assert max(tile_sizes(n, tiles)) <= largest
    assert (tiles - 1) * largest < max(n, 1) <= tiles * largest or n == 0
    check_tiles("op", tiles, n)


@given(n=st.integers(0, 5000), tiles=st.integers(1, 5000))
def test_tiles_cover_every_column_once_and_differ_by_one_at_most(n: int, tiles: int) -> None:
    tiles = min(tiles, max(n, 1))
    sizes, starts, slices = tile_sizes(n, tiles), tile_starts(n, tiles), tile_slices(n, tiles)
    assert len(sizes) == len(starts) == len(slices) == tiles
    assert sum(sizes) == n
    assert list(sizes) == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert [column for each in slices for column in range(n)[each]] == list(range(n))
    assert [each.start for each in slices] == list(starts)


@pytest.mark.parametrize(("tiles", "n", "most"), [(0, 8, 8), (-1, 8, 8), (9, 8, 8), (2, 0, 1)])
def test_tiles_that_do_not_fit_are_refused(tiles: int, n: int, most: int) -> None:
    with pytest.raises(ArgumentError) as raised:
        check_tiles("tile_std", tiles, n)
    assert str(raised.value) == (
        f"tile_std: tiles is {tiles} and there are {n} columns. It must be at least 1 and at most {most}, so that no "
        f"tile is empty."
    )


# --- tile_abs_max and tile_std ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_abs_max_by_hand(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -4.0, 2.0, 0.5, -0.25], [0.0, -0.0, NAN, -INF, 3.0]], dtype=dtype)
    found = on_composite(tile_abs_max, x, tiles=3)
    assert found.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    expected = torch.tensor([[4.0, 0.0], [2.0, NAN], [0.25, 3.0]], dtype=found.dtype)
    assert torch.equal(found.nan_to_num(-1.0), expected.nan_to_num(-1.0))


def test_abs_max_of_nothing_is_zero() -> None:
    assert torch.equal(on_composite(tile_abs_max, torch.empty(3, 0)), torch.zeros(1, 3))
    assert on_composite(tile_abs_max, torch.empty(0, 4), tiles=2).shape == (2, 0)
    assert on_composite(tile_abs_max, torch.tensor([-2.0, 1.0])).tolist() == [2.0]


def test_std_by_hand() -> None:
    x = torch.tensor([[1.0, 3.0, 5.0, 7.0, 0.1], [1.0, 3.0, 5.0, 9.0, 0.1]])
    found = on_composite(tile_std, x, tiles=3)
    # 1, 3, 1, 3 of mean 2; 5, 7, 5, 9 of mean 6.5; two equal numbers
    assert found.tolist() == pytest.approx([(4 / 3) ** 0.5, (11 / 3) ** 0.5, 0.0], rel=1e-6)
    assert found[2].item() == 0.0


@pytest.mark.parametrize("x", [torch.ones(1, 1), torch.ones(0, 3), torch.ones(3, 0), torch.tensor([1.0, NAN, 2.0])])
def test_std_that_is_not_defined_is_nan(x: torch.Tensor) -> None:
    assert on_composite(tile_std, x).isnan().all()


@pytest.mark.parametrize("value", [0.1, 1e4 / 3, -7e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_std_of_equal_elements_is_exactly_zero(value: float, dtype: torch.dtype) -> None:
    x = torch.full((301, 77), value, dtype=dtype)
    assert on_composite(tile_std, x, tiles=5).tolist() == [0.0] * 5
    assert std_op.SPEC.forward.bound(x, 5)[0].tolist() == [0.0] * 5


def _outside(found: torch.Tensor, x: torch.Tensor) -> bool:
    (wanted,), (bound,) = std_op.SPEC.forward.reference(x, 1), std_op.SPEC.forward.bound(x, 1)
    return bool(((found.double() - wanted).abs() > bound).all())


def test_the_bound_of_std_rejects_a_difference_of_two_sums_and_a_biased_one() -> None:
    far = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) + 1000
    n = far.numel()
    assert _outside(((far.square().sum() - far.sum().square() / n) / (n - 1)).clamp_min(0).sqrt(), far)
    near = far - 1000
    assert _outside(near.double().std(correction=0), near)
    assert not _outside(near.double().std(), near)


def test_the_reference_is_that_of_torch() -> None:
    x = torch.randn(33, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (wanted,) = std_op.SPEC.forward.reference(x, 3)
    assert wanted.tolist() == pytest.approx([x[:, :4].std().item(), x[:, 4:7].std().item(), x[:, 7:].std().item()])


# --- input_range_update -----------------------------------------------------------------------------------------------


def counts_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_a_learned_range_is_a_running_mean_of_standard_deviations() -> None:
    x = torch.tensor([[1.0, 0.0, 2.0, 2.0, 9.0, 0.0], [3.0, 4.0, 2.0, 2.0, 9.0, 0.0]])
    before = torch.tensor([-5.0, -3.0, -6.0])
    found, count, x_min, x_max = on_composite(
        input_range_update, x, before, counts_of(2, 7, 100), tiles=3, init_from_data=100, init_std_alpha=3.0
    )
    # tile 0: 1, 0, 3, 4 of variance 10/3; (-5 * 2 + 3 * 1.826) / 3 = -1.508. Tile 1 is constant, tile 2 done.
    assert found.tolist() == pytest.approx([(10 - 3 * (10 / 3) ** 0.5) / 3, 3.0, -6.0], rel=1e-6)
    assert count.tolist() == [3, 7, 100]
    assert x_min.shape == x_max.shape == (0,)
    assert before.tolist() == [-5.0, -3.0, -6.0]


@pytest.mark.parametrize(
    ("momentum", "low", "high"), [(0.75, 0.75 * -4 + 0.25 * -1, 0.75 * 5 + 0.25 * 8), (-1.0, -4.0, 8.0)]
)
def test_running_extremes(momentum: float, low: float, high: float) -> None:
    x = torch.tensor([[-1.0, 8.0, -1.0, 8.0, NAN, 0.0, 1.0, 1.0]])
    found, count, x_min, x_max = on_composite(
        input_range_update,
        x,
        torch.tensor([1.0, 1.5, 2.0, 2.5]),
        counts_of(0, 1, 1, 9),
        torch.tensor([NAN, -4.0, -4.0, -4.0]),
        torch.tensor([INF, 5.0, 5.0, 5.0]),
        tiles=4,
        mode="extremes",
        init_from_data=9,
        act_range_momentum=momentum,
    )
    # A fresh tile takes the extremes of the batch, whatever it held; one with NaN and one that is done stay.
    assert x_min.tolist() == [-1.0, low, -4.0, -4.0]
    assert x_max.tolist() == [8.0, high, 5.0, 5.0]
    assert found.tolist() == [8.0, max(-low, high), 2.0, 2.5]
    assert count.tolist() == [1, 2, 1, 9]


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 3e19), (torch.bfloat16, 3e19), (torch.float64, 1e160)])
def test_a_finite_batch_whose_squares_overflow_does_not_count(dtype: torch.dtype, value: float) -> None:
    x = torch.tensor([[value, 0.0, 1.0, 3.0], [0.0, 1.0, 3.0, 1.0]], dtype=dtype)
    before = torch.tensor([-2.0, -2.0], dtype=dtype)
    found, count, _, _ = on_composite(input_range_update, x, before, counts_of(1, 1), tiles=2, init_std_alpha=3.0)
    # 1, 3, 3, 1 of variance 4/3; (-2 + 3 * 1.155) / 2
    assert found.tolist() == pytest.approx([2.0, (-2 + 3 * (4 / 3) ** 0.5) / 2], rel=1e-2)
    assert count.tolist() == [1, 2]


@pytest.mark.parametrize("range_dtype", [torch.float16, torch.float32])
def test_a_range_is_at_most_the_largest_number_of_its_dtype(range_dtype: torch.dtype) -> None:
    x = torch.tensor([[40000.0, -40000.0], [-40000.0, 40000.0]], dtype=torch.float16)
    before = torch.tensor([1.0], dtype=range_dtype)
    found, count, _, _ = on_composite(input_range_update, x, before, counts_of(0), init_std_alpha=3.0)
    assert found.dtype is range_dtype
    assert found.item() == pytest.approx(65504.0 if range_dtype is torch.float16 else 120000 * (4 / 3) ** 0.5, rel=1e-6)
    assert count.tolist() == [1]


def test_running_extremes_that_are_infinite_leave_a_finite_range() -> None:
    extremes = torch.tensor([0.0]), torch.tensor([INF])
    found, _, _, x_max = on_composite(
        input_range_update, torch.tensor([[2.0, 0.0]]), torch.tensor([1.0]), counts_of(3), *extremes, mode="extremes"
    )
    assert (found.item(), x_max.item()) == (torch.finfo(torch.float32).max, INF)


@pytest.mark.parametrize("mode", ["std", "extremes"])
@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6)])
def test_an_empty_batch_does_not_count(mode: Any, shape: tuple[int, ...]) -> None:
    extremes = (None, None) if mode == "std" else (torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 2.0]))
    found, count, x_min, x_max = on_composite(
        input_range_update, torch.empty(shape), torch.tensor([3.0, 4.0]), counts_of(0, 5), *extremes, tiles=2, mode=mode
    )
    assert (found.tolist(), count.tolist()) == ([3.0, 4.0], [0, 5])
    assert x_min.tolist() == ([] if mode == "std" else [-1.0, -2.0])
    assert x_max.tolist() == ([] if mode == "std" else [1.0, 2.0])


def test_calibration_ends_in_bfloat16() -> None:
    """A counter in the dtype of x would get stuck at 256, and the range would drift for ever."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    input_range, count = torch.tensor([3.0], dtype=torch.bfloat16), counts_of(0)
    with triptych.use("composite"), ran() as calls:
        for _ in range(505):
            input_range, count, _, _ = input_range_update(x, input_range, count, init_from_data=500)
    assert calls == {("input_range_update", "forward", "composite"): 505}
    assert count.tolist() == [500]
    assert input_range.item() == pytest.approx(3 * x.float().std().item(), rel=0.05)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": "text"}, "x is a str. It must be a torch.Tensor."),
        ({"x": torch.ones(2, 6, dtype=torch.int32)}, "x has dtype torch.int32. It must be float32, bfloat16, float16 "),
        ({"x": torch.tensor(1.0)}, "x is a scalar tensor. It needs at least one dimension, the one to split into "),
        ({"tiles": 7}, "tiles is 7 and there are 6 columns. It must be at least 1 and at most 6"),
        ({"mode": "both"}, "mode is 'both'. It must be 'std' or 'extremes'."),
        ({"input_range": torch.ones(3)}, "input_range has shape [3] and tiles is 2. It must have shape [2], a number "),
        ({"input_range": torch.ones(2).half()}, "input_range has dtype torch.float16 and x has dtype torch.float32. "),
        ({"count": torch.ones(2)}, "count has dtype torch.float32 and x has dtype torch.float32. count must be "),
        ({"x_min": torch.ones(2)}, "mode is 'std' and x_min is given. Leave it out, or use mode 'extremes'."),
        ({"mode": "extremes"}, "x_min is a NoneType. It must be a torch.Tensor."),
        ({"init_from_data": -1}, "init_from_data is -1. It must be 0 or greater."),
        ({"init_std_alpha": NAN}, "init_std_alpha is nan. It must be a finite number, 0 or greater."),
        ({"act_range_momentum": 1.5}, "act_range_momentum is 1.5. It must be between 0 and 1, or -1 for the extremes "),
        ({"act_range_momentum": NAN}, "act_range_momentum is nan. It must be between 0 and 1, or -1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], text: str) -> None:
    good: dict[str, Any] = {"x": torch.ones(2, 6), "input_range": torch.ones(2), "count": counts_of(0, 0), "tiles": 2}
    on_composite(input_range_update, **good)
    with ran() as calls, pytest.raises(ArgumentError) as raised:
        input_range_update(**{**good, **change})
    assert str(raised.value).startswith(f"input_range_update: {text}")
    assert calls == {}


# --- no gradient ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["tile_abs_max", "tile_std", "input_range_update"])
def test_there_is_no_backward_and_none_can_be_asked_for(op: str) -> None:
    spec = registry.ops.get(op)
    assert spec.phases == ("forward",)
    args = spec.typical((4, 8), torch.float32, torch.device("cpu"))
    with triptych.use("composite"):
        assert triptych.explain(op, *args).chosen == "composite"
        with pytest.raises(triptych.UsageError, match=f"{op} has no backward"):
            triptych.explain(op, *args, phase="backward")


def test_results_do_not_hang_on_the_graph_of_their_inputs() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    layer = torch.nn.Linear(6, 6)
    y = layer(x)
    assert not on_composite(tile_std, y, tiles=2).requires_grad
    with triptych.use("composite"):
        assert not torch.ops.triptych.tile_std(y, 2, "").requires_grad
    y.sum().backward()
    assert x.grad is not None
