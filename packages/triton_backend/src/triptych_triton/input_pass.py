# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals)
"""Inputs as they reach the crossbar: clamped to the input range and through the DAC. Host launch, then kernel.

    x [..., N], R rows; T tiles; input_range [T]; row_range [T, R]; converted [R, N] or [R, T * pitch]

With a pitch, each tile takes that many columns and what it has fewer is filled with zeros: then kernels that walk over
a tile need no masks, and every tile begins where wide loads can.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triptych_triton.launch import launch
from triptych_triton.quantiser import clamp, divide, magnitude, round_half_even, safe, step_of
from triptych_triton.rounding import accumulator_dtype, bound, narrow, widen
from triptych_triton.rows import as_rows
from triptych_triton.tile_columns import block_of, split, tile_size, tile_start


@dataclass(frozen=True, slots=True)
class Converted:
    """Inputs behind the DAC.

    Attributes:
        values: [R, N], or [R, T * pitch].
        ranges: what bounds them: input_range [T], or with a dynamic range the maxima of the rows [T, R]; None without.
    """

    values: torch.Tensor
    ranges: torch.Tensor | None


def convert_inputs(
    x: torch.Tensor, input_range: torch.Tensor | None, tiles: int, mode: str, inp_res: float, pitch: int = 0
) -> Converted:
    """x behind clamp and DAC, rounded to x's dtype, as a matrix; x itself where there is neither and no pitch."""
    n = x.shape[-1]
    rows = x.numel() // n if n else x.shape[:-1].numel()
    dynamic = mode == "dynamic"
    if not pitch and (mode == "none" or (dynamic and inp_res <= 0)):
        return Converted(x.reshape(rows, n), None)
    values = x.new_empty(rows, tiles * pitch if pitch else n)
    ranges = None if input_range is None else input_range.contiguous()
    if dynamic:
        ranges = x.new_empty((tiles, rows), dtype=accumulator_dtype(x.dtype))
    if rows == 0 or n == 0:
        return Converted(values.zero_(), ranges if ranges is None or not dynamic else ranges.zero_())
    x, x_stride = as_rows(x)
    columns = split(n, tiles)
    width = pitch if pitch else columns.longest
    block = block_of(width, 4096)
    across = 1 if dynamic else block.column_blocks(width)
    launch(
        _convert,
        (across * tiles * block.row_blocks(rows),),
        x.device,
        x,
        ranges,
        values,
        x_stride,
        rows,
        inp_res,
        tiles,
        across,
        values.shape[1],
        width,
        columns.base,
        columns.extra,
        DYNAMIC=dynamic,
        PADDED=pitch > 0,
        EVEN=columns.even,
        ROWS=block.rows,
        COLUMNS=block.columns,
    )
    return Converted(values, ranges)


@triton.jit(do_not_specialize=["rows"])
def _convert(
    x,
    ranges,
    values,
    x_stride,
    rows,
    inp_res: tl.float64,
    tiles,
    across,
    values_stride,
    width,
    base,
    extra,
    DYNAMIC: tl.constexpr,
    PADDED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    ACC: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    tile = (tl.program_id(0) // across) % tiles
    row = ((tl.program_id(0) // across) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tile_start(tile, base, extra, EVEN)
    size = tile_size(tile, base, extra, EVEN)
    source = x + (row * x_stride)[:, None] + start
    target = values + (row * values_stride)[:, None] + (tile * width if PADDED else start)
    if DYNAMIC:
        # One program takes whole rows of a tile, and reads them again from the cache.
        largest = magnitude(tl.zeros([ROWS, COLUMNS], dtype=ACC))
        for first in range(0, bound(size), COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = (row < rows)[:, None] & (column < size)[None, :]
            value = widen(tl.load(source + column[None, :], mask=inside, other=0.0), ACC)
            largest = tl.maximum(largest, magnitude(value))
        limit = tl.max(largest, axis=1).to(ACC, bitcast=True)
        tl.store(ranges + tile.to(tl.int64) * rows + row, limit, mask=row < rows)
        for first in range(0, bound(width), COLUMNS):
            _convert_block(source, target, first, row < rows, size, width, limit, inp_res, DYNAMIC, PADDED, COLUMNS)
    else:
        limit = tl.zeros([1], dtype=ACC)
        if ranges is not None:
            limit = widen(tl.load(ranges + tile + tl.arange(0, 1)), ACC)
        first = (tl.program_id(0) % across) * COLUMNS
        _convert_block(source, target, first, row < rows, size, width, limit, inp_res, ranges is None, PADDED, COLUMNS)


@triton.jit
def _convert_block(
    source,
    target,
    first,
    in_rows,
    size,
    width,
    limit,
    inp_res,
    UNLIMITED: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Clamp, unless `limit` only serves the DAC, and convert COLUMNS columns."""
    column = first + tl.arange(0, COLUMNS)
    inside = in_rows[:, None] & (column < size)[None, :]
    value = widen(tl.load(source + column[None, :], mask=inside, other=0.0), limit.dtype)
    if not UNLIMITED:
        value = clamp(value, -limit[:, None], limit[:, None])
    if inp_res > 0:
        step = step_of(limit, inp_res)
        quotient = divide(value, safe(step)[:, None] + tl.zeros_like(value))
        value = round_half_even(quotient) * step[:, None]
    if PADDED:
        value = tl.where(inside, value, 0.0)
        inside = in_rows[:, None] & (column < width)[None, :]
    tl.store(target + column[None, :], narrow(value, target.dtype.element_ty), mask=inside)
