"""add_rms_norm in C++ and CUDA. The mathematics is in triptych.ops.add_rms_norm, the kernels are those of rms_norm.

Shapes: x, residual, y, h, dy, dh, dx [..., N]; weight, dw [N]; rstd [...].
"""

from __future__ import annotations

import torch

from triptych.call import Call
from triptych_cuda import parts

Tensor = torch.Tensor


def reasons_against(call: Call) -> list[str]:
    """Why the call cannot run: device, dtype, or a part that can be neither loaded nor built."""
    return parts.reasons_against(call)


def forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, h, rstd)."""
    out: tuple[Tensor, Tensor, Tensor] = parts.module_for(x).add_rms_norm_forward(
        x, residual, weight, eps, offset, rounding == "before_weight"
    )
    return out


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
    """(dx, dw); dx is the gradient of x and of residual both."""
    out: tuple[Tensor, Tensor] = parts.module_for(h).add_rms_norm_backward(
        dy, dh, h, weight, rstd, offset, rounding == "before_weight", need_dx, need_dw
    )
    return out
