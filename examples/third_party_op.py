"""A whole op of one's own: y = scale * x^2, with one output and one gradient, in one file.

    python examples/third_party_op.py

A package makes it known to every process through the entry-point group `triptych.ops` (`scaled_square =
"my_package.scaled_square:SPEC"`); a script can do so for a block, as `main` does. The conformance suite tests it on any
backend: tests/test_third_party_op.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import triptych
from triptych import registry, samples
from triptych.call import TensorMeta
from triptych.dispatch import define
from triptych.errors import ArgumentError
from triptych.opspec import OpSpec, Phase, Sample, Tensors
from triptych.sharding.rule import Sharding

Tensor = torch.Tensor


def scaled_square(x: Tensor, scale: float = 1.0, *, layer: str = "") -> Tensor:
    """scale * x^2 of a floating-point tensor of any shape and strides; contiguous, in x's dtype."""
    y: Tensor = _scaled_square(layer, x, scale)
    return y


def check(x: Tensor, scale: float) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ArgumentError("scaled_square: x must be a floating-point tensor.")


def fake_forward(x: Tensor, scale: float) -> Tensors:
    return (torch.empty(x.shape, dtype=x.dtype, device=x.device),)


def fake_backward(dy: Tensor, x: Tensor, scale: float, need_dx: bool) -> Tensors:
    return (torch.empty(x.shape if need_dx else (0,), dtype=x.dtype, device=x.device),)


def reference_forward(x: Tensor, scale: float) -> Tensors:
    return (scale * x.double() ** 2,)


def reference_backward(dy: Tensor, x: Tensor, scale: float, need_dx: bool) -> Tensors:
    return (2 * scale * x.double() * dy.double() if need_dx else torch.empty(0, dtype=torch.float64, device=x.device),)


def bound_forward(x: Tensor, scale: float) -> Tensors:
    return (_roundings(2, reference_forward(x, scale)[0], x.dtype),)


def bound_backward(dy: Tensor, x: Tensor, scale: float, need_dx: bool) -> Tensors:
    return (_roundings(3, reference_backward(dy, x, scale, need_dx)[0], x.dtype),)


def _roundings(count: int, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Each product rounds by half an ulp, there and in the reference; near zero by half a subnormal step, scaled on."""
    info = torch.finfo(dtype)
    units = (info.eps + torch.finfo(torch.float64).eps) / 2
    return value.abs() * 1.01 * count * units + 64 * info.smallest_normal * info.eps


def composite_forward(x: Tensor, scale: float) -> Tensors:
    return ((x * x).mul_(scale).contiguous(),)


def composite_backward(dy: Tensor, x: Tensor, scale: float, need_dx: bool) -> Tensors:
    return ((x * dy).mul_(2 * scale).contiguous() if need_dx else torch.empty(0, dtype=x.dtype, device=x.device),)


def cases() -> Iterator[Sample]:
    makers = {"matrix": samples.normal(3, 40), "transposed": samples.transposed(3, 4), "empty": samples.normal(0, 4)}
    for name, maker in makers.items():
        yield Sample(name, _inputs(maker), (1.5,))


def _inputs(maker: samples.Maker) -> Callable[..., tuple[Tensor, ...]]:
    return lambda generator, dtype, device: (maker(generator, dtype, device),)


def typical(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return (TensorMeta.contiguous(shape, dtype, device), 1.5)


SPEC = OpSpec(
    name="scaled_square",
    summary="scale times the square of each element",
    forward=Phase(
        tensors=("x",),
        scalars=(("scale", float),),
        outputs=("y",),
        reference=reference_forward,
        composite=composite_forward,
        fake=fake_forward,
        bound=bound_forward,
    ),
    backward=Phase(
        tensors=("dy", "x"),
        scalars=(("scale", float), ("need_dx", bool)),
        outputs=("dx",),
        reference=reference_backward,
        composite=composite_backward,
        fake=fake_backward,
        bound=bound_backward,
    ),
    check=check,
    typical=typical,
    samples=cases,
    differentiable=("y",),
    saved=("x",),
    gradients=(("x",),),
    sharding=Sharding("... -> ...", "..., ... -> ..."),  # any dimension may be spread over processes
)

_scaled_square = define(SPEC).call


def main() -> None:
    x = torch.linspace(-1, 1, 5, requires_grad=True)
    with registry.ops.added("scaled_square", SPEC), triptych.use("composite"):
        torch.autograd.backward(scaled_square(x, 3.0).sum())
    print("gradient:", x.grad)
    print(triptych.report())


if __name__ == "__main__":
    main()
