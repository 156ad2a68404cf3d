"""rms_norm in PyTorch operations: ATen's fused kernel where it computes the same, few passes over memory elsewhere.

Shapes: N = columns; x, y, dy, dx [..., N]; weight, dw [N]; rstd [...].
"""

from __future__ import annotations

import torch

from triptych_torch.ops import _tracing

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]


def forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> Pair:
    """y in x's dtype and rstd in that of the statistics, both contiguous."""
    if _has_fused(x, weight, offset, rounding) and x.is_contiguous():
        y, rstd = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], weight, eps)
        return y, rstd.view(x.shape[:-1])
    wide = _tracing.operand(x).to(_statistics_dtype(x.dtype))
    rstd = torch.rsqrt(wide.square().sum(-1, keepdim=True).div_(max(x.shape[-1], 1)).add_(eps))
    y = torch.mul(wide, rstd, out=torch.empty(x.shape, dtype=wide.dtype, device=x.device))
    if rounding == "before_weight":
        y = _tracing.rounded(y, x.dtype)
    if weight is not None:
        y *= weight + offset if weight.dtype == wide.dtype else weight.to(wide.dtype) + offset
    return y.to(x.dtype), rstd.view(x.shape[:-1])


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
) -> Pair:
    """dx in x's dtype and dw in the weight's, contiguous; [0] for one that is not wanted or has no weight."""
    if _has_fused(x, weight, offset, rounding) and x.is_contiguous():
        return _fused_backward(dy, x, weight, rstd, need_dx, need_dw)
    dx, dw = wide_backward(dy, x, weight, rstd, offset, rounding, need_dx, need_dw)
    return dx.to(x.dtype), dw.to(x.dtype if weight is None else weight.dtype)


def wide_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    rounding: str,
    need_dx: bool,
    need_dw: bool,
) -> Pair:
    """Both gradients in rstd's dtype, not yet rounded; one that is not wanted has shape [0]."""
    columns = x.shape[-1]
    x, wide_dy = _tracing.operand(x), _tracing.operand(dy).to(rstd.dtype)
    scale = rstd.unsqueeze(-1)
    xhat = torch.mul(x, scale, out=torch.empty(x.shape, dtype=rstd.dtype, device=x.device))
    dx, dw = (torch.empty(0, dtype=rstd.dtype, device=x.device) for _ in range(2))
    if need_dw and weight is not None:
        seen = _tracing.rounded(xhat, x.dtype) if rounding == "before_weight" else xhat
        dw = (wide_dy * seen).reshape(x.numel() // max(columns, 1), columns).sum(0)
    if need_dx:
        wdy = wide_dy if weight is None else wide_dy * (weight.to(rstd.dtype) + offset)
        mean = (wdy * xhat).mean(-1, keepdim=True)
        dx = torch.addcmul(wdy, xhat, mean, value=-1, out=torch.empty_like(xhat)).mul_(scale)
    return dx, dw


def _has_fused(x: Tensor, weight: Tensor | None, offset: float, rounding: str) -> bool:
    """ATen's kernel takes one dtype, has no offset, rounds once; it exists for CUDA only. A compiler cannot fuse it."""
    if _tracing.traced():
        return False
    same = weight is None or (weight.dtype == x.dtype and weight.is_contiguous())
    return x.is_cuda and same and offset == 0 and x.numel() > 0 and (rounding == "after_weight" or weight is None)


def _fused_backward(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, need_dx: bool, need_dw: bool) -> Pair:
    dx, dw = torch.ops.aten._fused_rms_norm_backward(
        dy.contiguous(), x, x.shape[-1:], rstd.unsqueeze(-1), weight, [need_dx, need_dw and weight is not None]
    )
    if dx is None:
        dx = torch.empty(0, dtype=x.dtype, device=x.device)
    if dw is None:
        dw = torch.empty(0, dtype=x.dtype if weight is None else weight.dtype, device=x.device)
    return dx, dw


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
