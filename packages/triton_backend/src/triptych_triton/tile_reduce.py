# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals)
"""Maxima of the magnitudes of each row in each tile: host launch, then kernel.

x [..., N]; T tiles; maxima [T, ...]; R rows, the product of the leading dimensions
"""

import torch
import triton
import triton.language as tl

from triptych_triton.launch import launch
from triptych_triton.quantiser import magnitude
from triptych_triton.rounding import accumulator_dtype, bound, widen
from triptych_triton.rows import as_rows
from triptych_triton.tile_columns import block_of, split, tile_size, tile_start


def abs_max_of_tiles(x: torch.Tensor, tiles: int) -> torch.Tensor:
    """max |x| of each tile and row, [T, ...] in the accumulation type; NaN where there is one, 0 of nothing."""
    n = x.shape[-1]
    maxima = x.new_empty((tiles, *x.shape[:-1]), dtype=accumulator_dtype(x.dtype))
    if n == 0 or maxima.numel() == 0:
        return maxima.zero_()
    x, x_stride = as_rows(x)
    rows = maxima.numel() // tiles
    columns = split(n, tiles)
    block = block_of(columns.longest, 4096)
    launch(
        _abs_max,
        (block.row_blocks(rows) * tiles,),
        x.device,
        x,
        maxima,
        x_stride,
        rows,
        tiles,
        columns.base,
        columns.extra,
        EVEN=columns.even,
        ROWS=block.rows,
        COLUMNS=block.columns,
    )
    return maxima


@triton.jit(do_not_specialize=["rows"])
def _abs_max(
    x,
    maxima,
    x_stride,
    rows,
    tiles,
    base,
    extra,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    ACC: tl.constexpr = maxima.dtype.element_ty
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tile_start(tile, base, extra, EVEN)
    size = tile_size(tile, base, extra, EVEN)
    place = x + (row * x_stride)[:, None] + start
    largest = magnitude(tl.zeros([ROWS, COLUMNS], dtype=ACC))
    for first in range(0, bound(size), COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < size)[None, :]
        value = widen(tl.load(place + column[None, :], mask=inside, other=0.0), ACC)
        largest = tl.maximum(largest, magnitude(value))
    maximum = tl.max(largest, axis=1).to(ACC, bitcast=True)
    tl.store(maxima + tile.to(tl.int64) * rows + row, maximum, mask=row < rows)
