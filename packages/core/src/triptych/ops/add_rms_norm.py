"""add_rms_norm: a residual addition and the rms_norm of the sum, in one pass.

    h = x + residual, in float32 and rounded to the input dtype
    y = rms_norm(h, weight)
    backward, with dy and dh the gradients of y and h:
    dx = dresidual = rms_norm_backward(dy) + dh

Shapes: x, residual, y, h, dy, dh, dx [..., N]; weight, dw [N]; rstd [...].
"""

from __future__ import annotations

from typing import Any

import torch

from triptych.dispatch import define
from triptych.errors import ArgumentError
from triptych.ops import rms_norm as norm
from triptych.ops._norm_bounds import statistics_dtype, unit
from triptych.ops.rms_norm import NORM_SCALARS, Rounding
from triptych.opspec import OpSpec, Phase, Tensors
from triptych.sharding.rule import Sharding

Tensor = torch.Tensor


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float | None = None,
    offset: float = 0.0,
    rounding: Rounding = "after_weight",
    layer: str = "",
) -> tuple[Tensor, Tensor]:
    """Add `residual` to `x` and normalise the sum: `h = x + residual; y = rms_norm(h, weight)`.

    Args:
        x, residual: [..., N], of one shape, dtype and device; any strides.
        weight, eps, offset, rounding, layer: as in `rms_norm`.

    Returns:
        (y, h), both [..., N], contiguous and in x's dtype. The norm sees h after its rounding, as the two separate
        operations would.

    Raises:
        ArgumentError: the arguments do not fit together.
        Refused: the policy allows no backend that can run it.
    """
    if eps is None:
        eps = norm._default_eps(x)
    y, h = _add_rms_norm(layer, x, residual, weight, eps, offset, rounding)
    return y, h


def check(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> None:
    """Raise ArgumentError unless the arguments of `add_rms_norm` fit together."""
    norm.check_norm("add_rms_norm", x, weight, eps, offset, rounding)
    if not isinstance(residual, Tensor):
        raise ArgumentError(f"add_rms_norm: residual is a {type(residual).__name__}. It must be a torch.Tensor.")
    norm.check_plain("add_rms_norm", "residual", residual)
    for what, of_x, of_residual in (
        ("shape", list(x.shape), list(residual.shape)),
        ("dtype", x.dtype, residual.dtype),
        ("device", x.device, residual.device),
    ):
        if of_x != of_residual:
            raise ArgumentError(
                f"add_rms_norm: x has {what} {of_x} and residual has {what} {of_residual}. They must be the same; "
                f"convert one of them (expand, to)."
            )


def check_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    rounding: str,
    need_dx: bool,
    need_dw: bool,
) -> None:
    """Raise ArgumentError unless the arguments of `add_rms_norm_backward` fit together."""
    grads = (("dy", dy), ("dh", dh))
    norm.check_norm_backward("add_rms_norm_backward", grads, h, weight, rstd, eps, offset, rounding)


def fake_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str
) -> Tensors:
    """Empty y and h in x's dtype, rstd in that of the statistics; all contiguous."""
    y, rstd = norm.fake_forward(x, weight, eps, offset, rounding)
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # empty_like of a meta tensor would import sympy
    return y, h, rstd


def fake_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    rounding: str,
    need_dx: bool,
    need_dw: bool,
) -> Tensors:
    """Empty dx and dw, as in rms_norm; dx is the gradient of x and of residual."""
    return norm.fake_backward(dy, h, weight, rstd, eps, offset, rounding, need_dx, need_dw)


def _sum(x: Tensor, residual: Tensor) -> Tensor:
    """h: added in float32 (float64 for float64) and rounded, which leaves one right answer, bit for bit."""
    wide = statistics_dtype(x.dtype)
    return (x.to(wide) + residual.to(wide)).to(x.dtype)


def reference_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str
) -> Tensors:
    """h rounded to x's dtype, which leaves one right answer; the norm of that in float64 throughout."""
    h = _sum(x, residual)
    y, rstd = norm.reference_forward(h, weight, eps, offset, rounding)
    return y, h.double(), rstd


def reference_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    rounding: str,
    need_dx: bool,
    need_dw: bool,
) -> Tensors:
    """In float64 throughout: rms_norm's, and dh added to dx."""
    dx, dw = norm.reference_backward(dy, h, weight, rstd, eps, offset, rounding, need_dx, need_dw)
    if need_dx and dh is not None:
        dx = dx + dh.double()
    return dx, dw


def bound_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str
) -> Tensors:
    """h is exact; y and rstd as in rms_norm."""
    h = _sum(x, residual)
    y_bound, rstd_bound = norm.bound_forward(h, weight, eps, offset, rounding)
    return y_bound, torch.zeros_like(h, dtype=torch.float64), rstd_bound


def bound_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    rounding: str,
    need_dx: bool,
    need_dw: bool,
) -> Tensors:
    """rms_norm's, and dh added before the one rounding."""
    dx_bound, dw_bound = norm.bound_backward(dy, h, weight, rstd, eps, offset, rounding, need_dx, need_dw)
    if need_dx and dh is not None:
        wide = unit(statistics_dtype(h.dtype))
        dx_bound = dx_bound + dh.double().abs() * (unit(h.dtype) + 2 * wide)
    return dx_bound, dw_bound


def composite_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str
) -> Tensors:
    """h by one addition, which rounds once; y and rstd as in rms_norm."""
    h = (x + residual).contiguous()
    y, rstd = norm.composite_forward(h, weight, eps, offset, rounding)
    return y, h, rstd


def composite_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    rounding: str,
    need_dx: bool,
    need_dw: bool,
) -> Tensors:
    """rms_norm's gradients, with dh added to dx before its one rounding."""
    if dh is None or not need_dx:
        return norm.composite_backward(dy, h, weight, rstd, eps, offset, rounding, need_dx, need_dw)
    # The norm's gradient is kept in float32 until dh is added, so that dx is rounded once.
    wide = rstd.dtype
    dx = norm.composite_backward(dy.to(wide), h.to(wide), weight, rstd, eps, offset, rounding, True, False)[0]
    dw = norm.composite_backward(dy, h, weight, rstd, eps, offset, rounding, False, need_dw)[1]
    return (dx + dh).to(h.dtype), dw


def typical(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """The arguments of an ordinary call: as for rms_norm, with a residual like x."""
    x, *rest = norm.typical(shape, dtype, device)
    return (x, x, *rest)


SPEC = OpSpec(
    name="add_rms_norm",
    summary="residual addition and the rms_norm of the sum; returns both",
    forward=Phase(
        tensors=("x", "residual", "weight?"),
        scalars=NORM_SCALARS,
        outputs=("y", "h", "rstd"),
        reference=reference_forward,
        composite=composite_forward,
        fake=fake_forward,
        bound=bound_forward,
    ),
    backward=Phase(
        tensors=("dy", "dh?", "h", "weight?", "rstd"),
        scalars=(*NORM_SCALARS, ("need_dx", bool), ("need_dw", bool)),
        outputs=("dx", "dw"),
        reference=reference_backward,
        composite=composite_backward,
        fake=fake_backward,
        bound=bound_backward,
    ),
    check=check,
    check_backward=check_backward,
    typical=typical,
    samples=lambda: norm.norm_samples(2),
    differentiable=("y", "h"),
    saved=("h", "weight", "rstd"),
    gradients=(("x", "residual"), ("weight",)),
    sharding=Sharding(
        "... n, ... n, n -> ... n, ... n, ...",
        "... n, ... n, ... n, n, ... -> ... n, n +...",
        decides=("x", "residual", "h"),
    ),
)

_add_rms_norm = define(SPEC).call
