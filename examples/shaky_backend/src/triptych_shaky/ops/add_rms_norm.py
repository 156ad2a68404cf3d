"""add_rms_norm. Shapes: x, residual, h, y, dy, dh, dx [..., N]; weight, dw [N]; rstd [...]."""

from __future__ import annotations

import os
import time

import torch

import triptych
from triptych.registry import ops
from triptych_shaky import faults
from triptych_shaky.ops.rms_norm import reasons_against, workspaces

__all__ = ["backward", "forward", "reasons_against"]
Tensor = torch.Tensor

_SPEC = ops.get("add_rms_norm")
assert _SPEC.backward is not None
_forward_kernel, _backward_kernel = _SPEC.forward.composite, _SPEC.backward.composite


def forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str
) -> tuple[Tensor, ...]:
    """y, h = x + residual, and rstd of h."""
    while faults.chosen() == "hang" and triptych.calls("add_rms_norm", "forward") == 5:
        time.sleep(60)
    return _forward_kernel(x, residual, weight, eps, offset, rounding)


def backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, rstd: Tensor, eps: float, offset: float,
    rounding: str, need_dx: bool, need_dw: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dx, which is also the gradient of residual, and dw, from dy, dh and what forward saved."""
    if faults.chosen() == "abort":
        os.abort()
    if faults.chosen() == "pair":
        rstd = workspaces.get(h.shape, rstd)  # taken for this op's own, which would hold the same numbers
    return _backward_kernel(dy, dh, h, weight, rstd, eps, offset, rounding, need_dx, need_dw)
