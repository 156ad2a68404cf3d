"""rms_norm in Triton.

    x, dy, y, dx [..., N]; weight, dw [N]; rstd [...]
    y = x * rstd * (weight + offset), with rstd = 1 / sqrt(mean(x^2) + eps)

Rows of any length, any strides, empty tensors; float32, bfloat16, float16 and float64. Kernels: norm_forward and
norm_backward, which add_rms_norm shares.
"""

import torch

from triptych.call import Call
from triptych_triton.norm_backward import norm_backward
from triptych_triton.norm_forward import norm_forward
from triptych_triton.requirements import reasons_against_norm


def forward(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """y in x's dtype and rstd in float32 (float64 for float64), row-major."""
    y, _, rstd = norm_forward(x, None, weight, eps, offset, rounding)
    return y, rstd


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
    offset: float,
    rounding: str,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx in x's dtype and dw in weight's, row-major; one that is not needed has shape [0]. Deterministic."""
    return norm_backward(dy, None, x, weight, rstd, offset, rounding, need_dx, need_dw)


def reasons_against(call: Call) -> list[str]:
    return reasons_against_norm(call)
