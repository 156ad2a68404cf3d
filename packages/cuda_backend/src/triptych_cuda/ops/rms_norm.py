"""rms_norm in C++ and CUDA. The mathematics is in triptych.ops.rms_norm, the kernels in csrc/cpu and csrc/cuda.

Shapes: x, y, dy, dx [..., N]; weight, dw [N]; rstd [...].
"""

from __future__ import annotations

import torch

from triptych.call import Call
from triptych_cuda import parts

Tensor = torch.Tensor


def reasons_against(call: Call) -> list[str]:
    """Why the call cannot run: device, dtype, or a part that can be neither loaded nor built."""
    return parts.reasons_against(call)


def forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> tuple[Tensor, Tensor]:
    """(y, rstd)."""
    out: tuple[Tensor, Tensor] = parts.module_for(x).rms_norm_forward(
        x, weight, eps, offset, rounding == "before_weight"
    )
    return out


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    rounding: str,
    need_dx: bool,
    need_dw: bool,
) -> tuple[Tensor, Tensor]:
    """(dx, dw); eps is inside rstd already."""
    out: tuple[Tensor, Tensor] = parts.module_for(x).rms_norm_backward(
        dy, x, weight, rstd, offset, rounding == "before_weight", need_dx, need_dw
    )
    return out
