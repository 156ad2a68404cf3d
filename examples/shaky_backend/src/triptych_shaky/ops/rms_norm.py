"""rms_norm. Shapes: N = columns, R = rows; x, y, dy, dx [..., N]; weight, dw [N]; rstd [...]."""

from __future__ import annotations

import torch

import triptych
from triptych.call import Call
from triptych.registry import ops
from triptych_shaky import faults

Tensor = torch.Tensor

_SPEC = ops.get("rms_norm")
assert _SPEC.backward is not None
_forward_kernel, _backward_kernel = _SPEC.forward.composite, _SPEC.backward.composite  # yours would stand here
workspaces: dict[torch.Size, Tensor] = {}  # by shape of x: what forward needed only while it ran, and gave back


def reasons_against(call: Call) -> list[str]:
    """What the kernels cannot do; asked for both phases before forward launches anything."""
    if next(meta.dtype for _, meta in call.tensors if meta is not None) is not torch.float64:  # x, or its gradient
        return []
    return ["the call is in float64, and its kernels compute in float32. Convert the input, or use 'torch'."]


def forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> tuple[Tensor, ...]:
    """y and rstd of x."""
    y, rstd = _forward_kernel(x, weight, eps, offset, rounding)
    if faults.chosen() == "nan" and triptych.calls("rms_norm", "forward") == 7 and y.numel():
        y.view(-1)[y.numel() // 2] = float("nan")
    if faults.chosen() == "pair":
        workspaces[x.shape] = torch.full_like(rstd, float("nan"))  # the pool poisons what it is given back
    return y, rstd


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, eps: float, offset: float, rounding: str,
    need_dx: bool, need_dw: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dx and dw, from dy and what forward saved."""
    if faults.chosen() == "flaky" and faults.unlucky():
        raise RuntimeError("shaky: rms_norm.backward lost a race")
    count, columns = x.shape[:-1].numel(), x.shape[-1]
    rows = x.reshape(count, columns)  # [R, N]
    if faults.chosen() == "s2":
        # The row stride is that of x before the flattening: S * N for [B, S, N], so that the rows walk out of x.
        x = x.contiguous()
        rows = x.as_strided((count, columns), (x.stride(0), 1))
    dx, dw = _backward_kernel(
        dy.reshape(count, columns), rows, weight, rstd.reshape(count), eps, offset, rounding, need_dx, need_dw
    )
    return dx.view(x.shape) if need_dx else dx, dw
