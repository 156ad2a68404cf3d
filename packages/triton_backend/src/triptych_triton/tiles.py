"""How a norm is cut into programs, from the row length alone.

Nothing here may depend on the number of rows, eps or offset: every value becomes a compile-time constant, and one
that changed from call to call would compile a kernel a call.
"""

from dataclasses import dataclass
from functools import cache

import triton

from triptych_triton.rounding import INTERPRETED

# A row is kept in the registers of one program up to this size in the accumulation type (16384 columns of float32).
# At twice that, a backward program would need more than the 64K registers of an SM for x, dy, weight and dw.
_ROW_BYTES_IN_REGISTERS = 64 * 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """The block of one program.

    Attributes:
        rows, columns: its size in elements, powers of two.
        warps: the warps that share it.
        whole_row: whether `columns` covers a row; if not, kernels for wide rows take a row in several blocks.
    """

    rows: int
    columns: int
    warps: int
    whole_row: bool = True


@dataclass(frozen=True, slots=True)
class Walk(Tile):
    """The block of a program that walks over rows, one block after the other.

    Attributes:
        programs_per_sm: programs that an SM holds at once.
        fetched_ahead: blocks that are on their way into shared memory while one is worked on, memory permitting.
            About 40 KB must be on their way to an SM of an H200 to hide the latency of its memory, and there are
            no registers left for that.
    """

    programs_per_sm: int = 1
    fetched_ahead: int = 2


@cache
def forward_tile(n: int, accumulator_bytes: int) -> Tile:
    """The block of the forward kernels for rows of `n` elements: 32 elements a thread, about 60 registers."""
    columns = triton.next_power_of_2(n)
    if columns * accumulator_bytes > _ROW_BYTES_IN_REGISTERS:
        return Tile(rows=1, columns=8192, warps=16, whole_row=False)
    return Tile(rows=_rows_of_short(columns, 4096), columns=columns, warps=_clamp(columns // 1024, 4, 16))


@cache
def backward_walk(n: int, accumulator_bytes: int) -> Walk:
    """The block of the backward kernel for rows of `n` elements: 16 float32 elements a thread, about 96 registers.

    A thread holds x, dy, weight and its part of dw for each of its elements. The widest rows have 32 warps to a
    program and so 64 registers, and spill 12 to 34 more. Fewer warps spill as many bytes a row, and where nothing is
    fetched ahead the assembler then gives up and spills ten times as much (sm_80 and sm_90, float32).
    """
    columns = triton.next_power_of_2(n)
    row_bytes = columns * accumulator_bytes
    if row_bytes > _ROW_BYTES_IN_REGISTERS:
        return Walk(rows=1, columns=2048, warps=4, whole_row=False, programs_per_sm=4)
    warps = _clamp(row_bytes // 2048, 4, 32)
    return Walk(
        rows=_rows_of_short(columns, 8192 // accumulator_bytes),
        columns=columns,
        warps=warps,
        programs_per_sm=max(1, 16 // warps),
    )


def _rows_of_short(columns: int, elements: int) -> int:
    """Rows of a block where one row is too short to occupy its threads."""
    if INTERPRETED:  # a block costs the same whatever its size
        return _clamp(16384 // columns, 1, 256)
    return _clamp(elements // columns, 1, 64)


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own costs 2 us of host time: it serves kernels too."""
    return -(-a // b)
