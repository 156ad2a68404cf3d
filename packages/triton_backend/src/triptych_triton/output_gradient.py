# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals)
"""Gradients at the outputs: where the ADC let none through, and their sum over rows. Host launches, then kernels.

R rows, C channels; dy, g [R, C]; bits [R, ceil(C / 8)] of one tile; dbias [C]; P programs; partial [P, C]
g = dy, but 0 where a bit says that the ADC clipped;  dbias = sum of dy over rows
"""

import torch
import triton
import triton.language as tl

from triptych_triton.launch import launch, limits
from triptych_triton.rounding import accumulator_dtype, bound, narrow, widen
from triptych_triton.rows import as_rows
from triptych_triton.tile_columns import block_of
from triptych_triton.tiles import ceil_div


def unclipped_gradient(dy: torch.Tensor, bits: torch.Tensor, g: torch.Tensor) -> None:
    """Write dy into g, a row-major matrix, with zeros where a bit is set; `bits` is row-major too."""
    rows, channels = dy.shape
    if dy.numel() == 0:
        return
    dy, dy_stride = as_rows(dy)
    block = block_of(channels, 4096, fewest_columns=8)
    launch(
        _mask_clipped,
        (block.row_blocks(rows) * block.column_blocks(channels),),
        dy.device,
        dy,
        bits,
        g,
        dy_stride,
        rows,
        channels,
        ROWS=block.rows,
        COLUMNS=block.columns,
    )


def sum_over_rows(dy: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The sum of dy over its rows, in the accumulation type, rounded once to `like`'s dtype. Deterministic."""
    rows, channels = dy.shape
    total = like.new_empty(channels)
    if dy.numel() == 0:
        return total.zero_()
    dy, dy_stride = as_rows(dy)
    block = block_of(channels, 4096, most_columns=128)
    across = block.column_blocks(channels)
    programs = min(block.row_blocks(rows), ceil_div(4 * limits(dy.device).multiprocessors, across))
    if programs == 1:
        _sum_rows_into(dy, dy_stride, total, 1)
        return total
    partial = dy.new_empty((programs, channels), dtype=accumulator_dtype(dy.dtype))
    _sum_rows_into(dy, dy_stride, partial, programs)
    _sum_rows_into(partial, channels, total, 1)
    return total


def _sum_rows_into(source: torch.Tensor, source_stride: int, total: torch.Tensor, programs: int) -> None:
    rows, channels = source.shape
    block = block_of(channels, 4096, most_columns=128)
    launch(
        _sum_rows,
        (block.column_blocks(channels) * programs,),
        source.device,
        source,
        total,
        source_stride,
        rows,
        channels,
        programs,
        ROWS=block.rows,
        COLUMNS=block.columns,
    )


@triton.jit(do_not_specialize=["rows"])
def _mask_clipped(dy, bits, g, dy_stride, rows, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    across = (channels + COLUMNS - 1) // COLUMNS
    width = (channels + 7) // 8
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (tl.program_id(0) % across) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    byte = first // 8 + tl.arange(0, COLUMNS // 8)
    in_bits = (row < rows)[:, None] & (byte < width)[None, :]
    packed = tl.load(bits + (row * width)[:, None] + byte[None, :], mask=in_bits, other=0).to(tl.int32)
    each = (packed[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    inside = (row < rows)[:, None] & (column < channels)[None, :]
    value = tl.load(dy + (row * dy_stride)[:, None] + column[None, :], mask=inside, other=0.0)
    value = tl.where(tl.reshape(each, [ROWS, COLUMNS]) == 0, value, tl.zeros_like(value))
    tl.store(g + (row * channels)[:, None] + column[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["rows", "source_stride", "programs"], do_not_specialize_on_alignment=["source", "total"])
def _sum_rows(source, total, source_stride, rows, channels, programs, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    ACC: tl.constexpr = tl.float64 if source.dtype.element_ty == tl.float64 else tl.float32
    across = (channels + COLUMNS - 1) // COLUMNS
    program = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    for first in range(bound(program * ROWS), bound(rows), bound(programs * ROWS)):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < channels)[None, :]
        value = tl.load(source + (row * source_stride)[:, None] + column[None, :], mask=inside, other=0.0)
        sums += widen(value, ACC)
    out = narrow(tl.sum(sums, axis=0), total.dtype.element_ty)
    tl.store(total + program * channels + column, out, mask=column < channels)
