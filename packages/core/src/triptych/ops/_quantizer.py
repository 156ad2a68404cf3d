"""The uniform quantiser that the analog ops share: steps, levels, rounding, all in the dtype of what they are given.

step_of(bound, res) = 2 bound / res    res > 1: the number of steps between -bound and bound (254 for 8 bits)
                      2 bound res      res <= 1: the step as a share of that
q = v / safe(step), rounded half to even: a real division; the product with 1 / step gives other results on ties
"""

from __future__ import annotations

import torch

from triptych.ops._norm_bounds import statistics_dtype, unit

Tensor = torch.Tensor

DIVISION = 6
"""How many roundings lie between v, bound and q, at most: of 2 bound / res with res itself rounded (3), of a product of
three factors in its place, of the quotient."""


def smallest_step(dtype: torch.dtype) -> float:
    """What a divisor of data of `dtype` is at least: the smallest normal number of the dtype of the arithmetic."""
    return torch.finfo(statistics_dtype(dtype)).smallest_normal


def step_of(bound: Tensor, res: float) -> Tensor:
    """The step of a quantiser of resolution `res` that covers -bound to bound."""
    return 2 * bound / res if res > 1 else 2 * bound * res


def levels(res: float) -> float:
    """The number of steps between -bound and bound."""
    return max(res, 1 / res)


def divided(value: Tensor, step: Tensor, smallest: float) -> Tensor:
    """value / step, with `smallest` in place of a step nearer to zero: 0 / 0 is 0 here."""
    return value / torch.where(step.abs() >= smallest, step, smallest)


def tie_error(q: Tensor, dtype: torch.dtype, limit: float = float("inf")) -> Tensor:
    """How far a correctly computed round(clamp(q, -limit, limit)) may lie from the exact one: 1 near a tie, else 0.

    Args:
        q: the exact quotients, float64.
        dtype: of the data; its arithmetic computes q to within DIVISION roundings.
    """
    relative = DIVISION * unit(statistics_dtype(dtype))
    low, high = (torch.round((q * factor).clamp(-limit, limit)) for factor in (1 - relative, 1 + relative))
    return (high - low).abs()


def near(value: Tensor, edge: float, dtype: torch.dtype) -> Tensor:
    """Where a computed |value| may fall on the other side of `edge`, not negative, than the exact one does."""
    return (value.abs() - edge).abs() <= DIVISION * unit(statistics_dtype(dtype)) * edge
