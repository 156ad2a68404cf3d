"""The uniform quantiser of the analog ops: division by a step is a real division on every device.

On CUDA torch multiplies by the reciprocal where a divisor is a Python number, which gives other results on ties; so
divisors are tensors here.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def step_of(bound: Tensor, res: float) -> Tensor:
    """The step of a quantiser of resolution `res` that covers -bound to bound, in bound's dtype."""
    return divided(2 * bound, res) if res > 1 else (2 * bound).mul_(res)


def divided(values: Tensor, number: float) -> Tensor:
    """values / number, rounded once."""
    return values / torch.full((), number, dtype=values.dtype, device=values.device)


def levels(res: float) -> float:
    """The number of steps between -bound and bound."""
    return max(res, 1 / res)


def safe(step: Tensor) -> Tensor:
    """`step` as a divisor: the smallest normal number in place of what is nearer to zero, so that 0 / 0 is 0."""
    tiny = torch.finfo(step.dtype).smallest_normal
    return torch.where(step.abs() >= tiny, step, tiny)
