"""add_rms_norm in Triton: a residual is added, then the sum is normalised.

    x, residual, h, dh, dy, y, dx [..., N]; weight, dw [N]; rstd [...]
    h = x + residual, in x's dtype;  y = h * rstd * (weight + offset), with rstd = 1 / sqrt(mean(h^2) + eps)

Rows of any length, any strides, empty tensors; float32, bfloat16, float16 and float64. Kernels: norm_forward and
norm_backward, which rms_norm shares.
"""

import torch

from triptych.call import Call
from triptych_triton.norm_backward import norm_backward
from triptych_triton.norm_forward import norm_forward
from triptych_triton.requirements import reasons_against_norm


def forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y and h in x's dtype and rstd in float32 (float64 for float64), row-major."""
    y, h, rstd = norm_forward(x, residual, weight, eps, offset, rounding)
    assert h is not None
    return y, h, rstd


def backward(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
    offset: float,
    rounding: str,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx, which is the gradient of x and of residual, in h's dtype and dw in weight's, row-major.

    dh is the gradient that reaches h by other ways; None counts as zero. One that is not needed has shape [0].
    Deterministic.
    """
    return norm_backward(dy, dh, h, weight, rstd, offset, rounding, need_dx, need_dw)


def reasons_against(call: Call) -> list[str]:
    return reasons_against_norm(call)
