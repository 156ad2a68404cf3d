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
_workspaces: dict[torch.Size, Tensor] = {}


def reasons_against(call: Call) -> list[str]:
    """What the kernels cannot do; asked for both phases before forward launches anything."""
    dtype = next(meta.dtype for _, meta in call.tensors if meta is not None)  # of x, or of its gradient
    if dtype is not torch.float64:
        return []
    return ["the call is in float64, and its kernels compute in float32. Convert the input, or use 'torch'."]


def forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> tuple[Tensor, ...]:
    y, rstd = _forward_kernel(x, weight, eps, offset, rounding)
    if faults.chosen() == "nan" and triptych.calls("rms_norm", "forward") == 7 and y.numel():
        y.view(-1)[y.numel() // 2] = float("nan")
    if faults.chosen() == "pair":
        # The workspace has done its work and goes back to the pool, which poisons what it is given.
        _workspaces[x.shape] = torch.full_like(rstd, float("nan"))
    return y, rstd


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, eps: float, offset: float, rounding: str,
    need_dx: bool, need_dw: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    if faults.chosen() == "flaky" and faults.unlucky():
        raise RuntimeError("shaky: rms_norm.backward lost a race")
    if faults.chosen() == "pair":
        rstd = _workspaces.get(x.shape, rstd)
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
