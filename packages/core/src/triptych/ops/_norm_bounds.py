"""How far from the reference a correct root mean square norm may lie.

Everything here is derived from the dtypes, the reduction lengths and the magnitudes of the terms; docs/numerics.md has
the derivation. `unit`, `sum_error` and `smallest` know nothing of a norm.

Shapes: as in rms_norm.py; gain [N] is |weight + offset|, in float64.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of rstd and of every sum: float32, or float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def sum_error(length: int, dtype: torch.dtype) -> float:
    """Relative error, to the sum of magnitudes, of a sum of `length` products in `dtype`'s statistics, in any order.

    Rounding errors behave as independent: the error exceeds lambda * sqrt(n) * u with probability
    2 exp(-lambda^2 / 2) (Higham and Mary, 2019, theorem 2.4); lambda = 6 gives 3e-8 a sum. 8 u more for what surrounds
    the sum: the products, the division, the root.
    """
    return float(6 * length**0.5 + 8) * unit(statistics_dtype(dtype))


def smallest(dtype: torch.dtype) -> float:
    """The absolute rounding error near zero: one subnormal step."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def tie_error(x: Tensor, rstd: Tensor, relative: float, rounding: str) -> Tensor:
    """How far the rounded x * rstd may lie from the reference's: one step within `relative` of a tie, 0 elsewhere.

    Two values that are `relative` apart round to the same number unless the border between two numbers, a tie, lies
    between them. 0 everywhere without rounding "before_weight".
    """
    xhat = x.double() * rstd.double().unsqueeze(-1)
    if rounding != "before_weight":
        return torch.zeros_like(xhat)
    low, high = ((xhat * factor).to(x.dtype).double() for factor in (1 - relative, 1 + relative))
    return (high - low).abs()


def forward(y: Tensor, rstd: Tensor, x: Tensor, gain: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """The bounds of y and rstd, elementwise and in float64.

    rstd has the error of its sum, taken whole although the root halves it. y has that error, the one rounding to x's
    dtype, and where x * rstd is rounded first the step to its neighbour, if it lies at a tie.

    Args:
        y, rstd: the reference's.
        x, rounding: what they were computed from.
        gain: |weight + offset|.
    """
    statistics = sum_error(x.shape[-1], x.dtype)
    ties = tie_error(x, rstd, statistics, rounding) * gain
    y_bound = (y.abs() + ties) * (unit(x.dtype) + statistics) + ties + smallest(x.dtype)
    return y_bound, rstd.abs() * statistics


def backward_dx(dx: Tensor, dy: Tensor, x: Tensor, gain: Tensor, rstd: Tensor) -> Tensor:
    """The bound of dx: one rounding to x's dtype, and its row's sum relative to the magnitudes of both of its terms.

    The two terms of dx cancel, so that the bound does not shrink with dx.

    Args:
        dx: the reference's.
        dy, x, rstd: what it was computed from.
        gain: |weight + offset|.
    """
    columns = x.shape[-1]
    scale = rstd.double().abs().unsqueeze(-1)
    xhat = x.double().abs() * scale
    wdy = dy.double().abs() * gain
    terms = scale * (wdy + xhat * (wdy * xhat).sum(-1, keepdim=True) / max(columns, 1))
    return dx.abs() * unit(x.dtype) + terms * sum_error(columns, x.dtype) + smallest(x.dtype)


def backward_dw(dw: Tensor, dy: Tensor, x: Tensor, rstd: Tensor, dtype: torch.dtype, rounding: str) -> Tensor:
    """The bound of dw: one rounding to the weight's `dtype`, and the sum over all rows relative to its magnitudes.

    With rounding "before_weight" a summand holds the neighbour of the reference's rounded x * rstd if that product lies
    at a tie. Backward is given rstd, so that the product has one rounding of its own and no sum's: 4 u are plenty.

    Args:
        dw: the reference's.
        dy, x, rstd, rounding: what it was computed from.
    """
    columns = x.shape[-1]
    rows = x.numel() // max(columns, 1)
    magnitudes = dy.double().abs().reshape(rows, columns)
    xhat = (x.double() * rstd.double().unsqueeze(-1)).abs().reshape(rows, columns)
    ties = tie_error(x, rstd, 4 * unit(statistics_dtype(x.dtype)), rounding).reshape(rows, columns)
    of_sum = (magnitudes * (xhat + ties)).sum(0) * sum_error(rows, x.dtype)
    return dw.abs() * unit(dtype) + of_sum + smallest(dtype) + (magnitudes * ties).sum(0)
