# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803, N806, SIM300 (compile-time constants of kernels are in capitals)
"""Exact division, rounding and maxima inside kernels: the uniform quantiser of the analog ops.

step_of(bound, res) = 2 bound / res    res > 1
                      2 bound res      res <= 1
q = v / safe(step): a real division; the product with 1 / step gives other results on ties
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from triptych_triton.rounding import INTERPRETED, number

_INTERPRETED = tl.constexpr(INTERPRETED)
# The smallest positive normal numbers of float32 and float64.
_TINY32 = tl.constexpr(2.0**-126)
_TINY64 = tl.constexpr(2.0**-1022)


@triton.jit
def divide(a, b):
    """a / b, correctly rounded. Triton's own division of float32 compiles to one that is off by two units."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def divide_by(value, divisor, reciprocal):
    """value / divisor, correctly rounded, given the rounded 1 / divisor; for quotients that are then rounded.

    An exact remainder corrects the product with the reciprocal (Markstein, 1990): three instructions where a division
    has twenty. Products of 2^22 and more are left as they are, infinite ones among them: they are whole numbers.
    """
    if _INTERPRETED or value.dtype == tl.float64:
        return divide(value, divisor + tl.zeros_like(value))
    else:
        near = value * reciprocal
        exact = tl.fma(tl.fma(-near, divisor + tl.zeros_like(near), value), reciprocal + tl.zeros_like(near), near)
        return tl.where(tl.abs(near) < 4194304.0, exact, near)


@triton.jit
def root(value):
    """The square root, correctly rounded."""
    if value.dtype == tl.float32:
        return tl.sqrt_rn(value)
    else:
        return tl.sqrt(value)


@triton.jit
def round_half_even(value):
    """`value` rounded to a whole number, ties to the even one."""
    if _INTERPRETED:
        # Triton's interpreter has no rint. Adding 1.5 * 2^52 leaves no bits for a fraction, and the addition rounds;
        # values of 2^51 and more have none, and NaN stays.
        wide = value.to(tl.float64)
        rounded = (wide + 6755399441055744.0) - 6755399441055744.0
        return tl.where(tl.abs(wide) < 2251799813685248.0, rounded, wide).to(value.dtype)
    else:
        return libdevice.rint(value)


@triton.jit
def tiny(ACC: tl.constexpr):
    """The smallest positive normal number, as a block of one."""
    if ACC == tl.float64:
        return tl.full([1], _TINY64, ACC)
    else:
        return tl.full([1], _TINY32, ACC)


@triton.jit
def safe(step):
    """`step`, or the smallest normal number in place of one nearer to zero: a divisor that keeps 0 / 0 at 0."""
    ACC: tl.constexpr = step.dtype
    return tl.where(tl.abs(step) >= tiny(ACC), step, tiny(ACC))


@triton.jit
def step_of(bound, res):
    """The step of a quantiser of resolution `res`, a scalar argument, that covers -bound to bound."""
    ACC: tl.constexpr = bound.dtype
    resolution = number(res, ACC)
    # Both are computed, so neither may divide by zero.
    divisor = tl.where(resolution > 1.0, resolution, 1.0)
    factor = tl.where(resolution > 1.0, 1.0, resolution)
    return divide(2.0 * bound, divisor + tl.zeros_like(bound)) * factor


@triton.jit
def clamp(value, low, high):
    """`value` between `low` and `high`, or `high` where they are the wrong way round. NaN of any stays."""
    raised = tl.maximum(value, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(raised, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitude(value):
    """The bits of |value| as an integer. As integers they are ordered as the magnitudes are, with NaN the largest."""
    if value.dtype == tl.float64:
        return value.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
