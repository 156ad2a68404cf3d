"""add_rms_norm in PyTorch operations.

Shapes: N = columns; x, residual, h, y, dy, dh, dx [..., N]; weight, dw [N]; rstd [...].
"""

from __future__ import annotations

import torch

from triptych_torch.ops import _tracing
from triptych_torch.ops import rms_norm as norm

Tensor = torch.Tensor


def forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """y, h = x + residual, both in x's dtype, and rstd of h; all contiguous."""
    h = torch.add(
        _tracing.operand(x), _tracing.operand(residual), out=torch.empty(x.shape, dtype=x.dtype, device=x.device)
    )
    y, rstd = norm.forward(h, weight, eps, offset, rounding)
    return y, h, rstd


def backward(
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
) -> tuple[Tensor, Tensor]:
    """dx, which is also the gradient of residual, and dw, as rms_norm's; dh is added before the one rounding of dx."""
    if dh is None or not need_dx:
        return norm.backward(dy, h, weight, rstd, eps, offset, rounding, need_dx, need_dw)
    dx, dw = norm.wide_backward(dy, h, weight, rstd, offset, rounding, need_dx, need_dw)
    return dx.add_(dh).to(h.dtype), dw.to(h.dtype if weight is None else weight.dtype)
