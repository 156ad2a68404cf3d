# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803, SIM300 (compile-time constants of kernels are in capitals)
"""Conversions between storage and accumulation types that mean the same compiled and interpreted.

Storage is float32, bfloat16, float16 or float64; accumulation is float32, or float64 for float64.
"""

import torch
import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether @triton.jit gave interpreted functions; fixed when this module is loaded, as the decorator itself is."""

# The same for kernels. Branches on it are resolved when a kernel is compiled and leave nothing behind. Every `return`
# in such a branch has its `else`: Triton compiles what follows the branch even so.
_INTERPRETED = tl.constexpr(INTERPRETED)

# The largest finite numbers of the storage types, for kernels.
_MOST64 = tl.constexpr(torch.finfo(torch.float64).max)
_MOST32 = tl.constexpr(torch.finfo(torch.float32).max)
_MOST_BF16 = tl.constexpr(torch.finfo(torch.bfloat16).max)
_MOST16 = tl.constexpr(torch.finfo(torch.float16).max)

# Triton's interpreter holds bfloat16 as bits and converts them by truncation, and it loses subnormals: there the
# conversions below are spelled out on the bits. Compiled code uses the hardware's, which rounds to nearest even.


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which statistics and products of `dtype` are computed, and the type of rstd."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@triton.jit
def widen(value, ACC: tl.constexpr):
    """`value` in the accumulation type, exactly."""
    if _INTERPRETED and value.dtype == tl.bfloat16:
        bits = value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True).to(ACC)
    else:
        return value.to(ACC)


@triton.jit
def narrow(value, STORAGE: tl.constexpr):
    """`value` rounded to the storage type, ties to even."""
    if _INTERPRETED and STORAGE == tl.bfloat16:
        bits = value.to(tl.float32).to(tl.uint32, bitcast=True)
        # Adding just under half of the dropped part, plus the lowest kept bit, carries exactly when the
        # nearest-even rule goes up. A NaN would carry into the sign, so it is set apart.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(value != value, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(STORAGE)


@triton.jit
def largest_number(STORAGE: tl.constexpr, ACC: tl.constexpr):
    """The largest finite number of the storage type, in the accumulation type, as a block of one."""
    if STORAGE == tl.float64:
        return tl.full([1], _MOST64, ACC)
    elif STORAGE == tl.float32:
        return tl.full([1], _MOST32, ACC)
    elif STORAGE == tl.bfloat16:
        return tl.full([1], _MOST_BF16, ACC)
    else:
        return tl.full([1], _MOST16, ACC)


@triton.jit
def keep_packed(value):
    """`value`, unchanged: what was computed from it before must be computed anew after.

    Two 16-bit values share a register; widened, they take two. The compiler widens once and keeps the wide ones over
    a reduction, although widening is one instruction: 98 registers instead of 80 in the backward kernel at N = 4096,
    112 bytes spilled instead of 48 at 16384 (sm_90). It cannot see through this empty piece of assembly.
    """
    if _INTERPRETED or value.dtype.primitive_bitwidth != 16:
        return value
    else:
        return tl.inline_asm_elementwise("", "=r,0", [value], dtype=value.dtype, is_pure=False, pack=2)


@triton.jit
def number(value, ACC: tl.constexpr):
    """A scalar argument as a one-element block of the accumulation type.

    tl.full takes a run-time scalar, a constant (a 1 that Triton specialised) and the interpreter's plain Python
    number alike; a cast would send the last through float32.
    """
    return tl.full([1], value, ACC)


@triton.jit
def bound(value):
    """A run-time integer as the bound of a range.

    Triton 3.6 interprets scalars as arrays of one element, and numpy 2.4 no longer takes those for Python integers.
    """
    if _INTERPRETED:
        return value.handle.data.item()
    else:
        return value
