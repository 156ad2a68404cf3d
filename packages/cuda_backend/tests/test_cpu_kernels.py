"""What the conformance suite cannot know about the CPU kernels: their compilations, their threads, their rounding."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from triptych import registry
from triptych_cuda import parts
from triptych_cuda.ops import add_rms_norm, rms_norm

Tensor = torch.Tensor
SCALARS = (1e-6, 0.0, "before_weight")
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


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


def inputs(dtype: torch.dtype, rows: int, columns: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(x, residual, weight) and (dy, dh)."""
    generator = torch.Generator().manual_seed(rows * columns)
    x, residual, dy, dh = torch.randn(4, rows, columns, generator=generator).to(dtype)
    return (x, residual, torch.randn(columns, generator=generator).to(dtype)), (dy, dh)


def step(dtype: torch.dtype, rows: int, columns: int) -> tuple[Tensor, ...]:
    tensors, grads = inputs(dtype, rows, columns)
    y, h, rstd = add_rms_norm.forward(*tensors, *SCALARS)
    return (y, h, rstd, *add_rms_norm.backward(*grads, h, tensors[2], rstd, *SCALARS, True, True))


def equal(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", parts.DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 40000), (3, 33), (257, 1000), (5000, 16)])
def test_bits_do_not_depend_on_the_number_of_threads(
    dtype: torch.dtype, rows: int, columns: int, threads: None
) -> None:
    results = []
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        results.append(step(dtype, rows, columns))
    assert all(equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", parts.DTYPES)
def test_variants_with_fused_multiply_add_agree_bit_for_bit(dtype: torch.dtype) -> None:
    fused = [name for name in variants() if name != "baseline"]
    if len(fused) < 2:
        pytest.skip(f"this processor runs {variants()}; two variants with fused multiply-add are needed")
    results = []
    for name in fused:
        with parts.cpu_variant(name):
            results.append(step(dtype, 37, 1001))
    assert all(equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", parts.DTYPES)
@pytest.mark.parametrize("name", variants())
def test_variants_agree_within_rounding(dtype: torch.dtype, name: str) -> None:
    """Each phase on the same inputs: backward gets what the baseline's forward saved."""
    spec = registry.ops.get("add_rms_norm")
    assert spec.backward is not None
    tensors, grads = inputs(dtype, 37, 1001)
    with parts.cpu_variant("baseline"):
        _, h, rstd = add_rms_norm.forward(*tensors, *SCALARS)
    forward, backward = (*tensors, *SCALARS), (*grads, h, tensors[2], rstd, *SCALARS, True, True)
    for run, phase, args in (
        (add_rms_norm.forward, spec.forward, forward),
        (add_rms_norm.backward, spec.backward, backward),
    ):
        with parts.cpu_variant("baseline"):
            expected = run(*args)
        with parts.cpu_variant(name):
            assert parts.CPU.module().variant() == name
            found = run(*args)
        for output, one, other, bound in zip(phase.outputs, found, expected, phase.bound(*args), strict=True):
            # Each lies within the bound of the reference.
            assert bool(((one.double() - other.double()).abs() <= 2 * bound).all()), output


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("name", variants())
def test_rounding_is_that_of_torch_for_every_bit_pattern(dtype: torch.dtype, name: str) -> None:
    """Every 16-bit pattern (subnormals, infinities, NaNs) plus sums that fall between two numbers or overflow."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(-1, 64)
    others = [torch.zeros_like(every), every.flip(0), every.flip(1) * 0.37, torch.full_like(every, 3e-6)]
    with parts.cpu_variant(name):
        for other in others:
            h = add_rms_norm.forward(every, other, None, *SCALARS)[1]
            expected = (every.float() + other.float()).to(dtype)
            nan = expected.isnan()
            assert torch.equal(h.isnan(), nan)
            assert torch.equal(h.view(torch.int16)[~nan], expected.view(torch.int16)[~nan])


def test_an_unknown_variant_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no kernels named mmx; it has .*baseline"), parts.cpu_variant("mmx"):
        pass


def test_a_variant_ends_with_its_block() -> None:
    module = parts.CPU.module()
    before = module.variant()
    for name in variants():
        with parts.cpu_variant(name):
            assert module.variant() == name
        assert module.variant() == before


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.zeros(2, 3), torch.ones(4)), ValueError, r"weight is \[4\] on cpu; it must be a plain tensor \[3\]"),
        ((torch.zeros(()), None), ValueError, "the data has no dimensions"),
        ((torch.zeros(2, 3, dtype=torch.int32), None), TypeError, "float32, bfloat16, float16 and float64"),
        ((torch.zeros(2, 3), torch.ones(3, dtype=torch.float64)), TypeError, "float64 goes with float64 only"),
        ((torch.zeros(2, 3, device="meta"), None), ValueError, "needs a strided tensor on cpu"),
    ],
)
def test_the_border_refuses_what_the_kernels_cannot_take(
    arguments: tuple[Tensor, Tensor | None], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        rms_norm.forward(arguments[0], arguments[1], *SCALARS)


def test_a_gradient_of_another_shape_is_refused() -> None:
    x = torch.randn(4, 8)
    rstd = rms_norm.forward(x, None, *SCALARS)[1]
    with pytest.raises(ValueError, match=r"dy is .* it must match the data"):
        rms_norm.backward(x[:2], x, None, rstd, *SCALARS, True, False)
    with pytest.raises(ValueError, match="one number for each row"):
        rms_norm.backward(x, x, None, rstd[:2], *SCALARS, True, False)


def negative(tensor: Tensor) -> Tensor:
    """The same values with the negative bit."""
    turned = torch._neg_view(-tensor)
    assert turned.is_neg()
    return turned


def test_a_negative_bit_is_resolved_in_every_tensor() -> None:
    (x, residual, weight), (dy, dh) = inputs(torch.float32, 5, 8)
    y, h, rstd = add_rms_norm.forward(x, residual, weight, *SCALARS)
    found = add_rms_norm.forward(negative(x), negative(residual), negative(weight), *SCALARS)
    assert equal(found, (y, h, rstd))
    expected = add_rms_norm.backward(dy, dh, h, weight, rstd, *SCALARS, True, True)
    turned = (negative(each) for each in (dy, dh, h, weight, rstd))
    assert equal(add_rms_norm.backward(*turned, *SCALARS, True, True), expected)
    assert equal(rms_norm.forward(negative(x), negative(weight), *SCALARS), rms_norm.forward(x, weight, *SCALARS))
    turned = (negative(each) for each in (dy, x, weight, rstd))
    assert equal(
        rms_norm.backward(*turned, *SCALARS, True, True),
        rms_norm.backward(dy, x, weight, rstd, *SCALARS, True, True),
    )


ZERO = """
import torch
from triptych_cuda.ops import add_rms_norm, rms_norm

rows, row, column = torch.ones(4, 8), torch.ones(8), torch.ones(4)
for name, phase, tensors, flags in (
    ("rms_norm", rms_norm.forward, (rows, row), ()),
    ("add_rms_norm", add_rms_norm.forward, (rows, rows, row), ()),
    ("rms_norm backward", rms_norm.backward, (rows, rows, row, column), (True, True)),
    ("add_rms_norm backward", add_rms_norm.backward, (rows, rows, rows, row, column), (True, True)),
):
    for place, tensor in enumerate(tensors):
        print(name, place, flush=True)
        results = []
        for zero in (torch.zeros_like(tensor), torch._efficientzerotensor(tuple(tensor.shape))):
            given = (*tensors[:place], zero, *tensors[place + 1 :])
            results.append(phase(*given, 1e-6, 0.0, "after_weight", *flags))
        assert zero._is_zerotensor()
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), results
"""


def test_a_zero_tensor_has_no_memory_and_is_zero_all_the_same() -> None:
    """In a process of its own: reading through a null pointer would end this one."""
    done = subprocess.run([sys.executable, "-c", ZERO], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert len(done.stdout.splitlines()) == 2 + 3 + 4 + 5


def test_no_rows_cost_nothing_however_long_they_are() -> None:
    x, columns = torch.empty(0, 2**40), 2**40
    weight = torch.ones(1).expand(columns)
    for gain in (None, weight):
        y, rstd = rms_norm.forward(x, gain, *SCALARS)
        assert (y.shape, rstd.shape) == ((0, columns), (0,))
        dx, dw = rms_norm.backward(x, x, gain, rstd, *SCALARS, True, False)
        assert (dx.shape, dw.shape) == ((0, columns), (0,))
    y, h, rstd = add_rms_norm.forward(x, x, weight, *SCALARS)
    assert (y.shape, h.shape, rstd.shape) == ((0, columns), (0, columns), (0,))


def test_the_gradient_of_a_weight_over_no_rows_is_zero() -> None:
    x, weight = torch.empty(0, 8), torch.ones(8)
    dx, dw = rms_norm.backward(x, x, weight, torch.empty(0), *SCALARS, True, True)
    assert dx.shape == (0, 8)
    assert torch.equal(dw, torch.zeros(8))
