# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals)
"""Standard deviation and extremes of whole tiles: host launches, then kernels.

    x [..., N], R rows; T tiles; P programs a tile; partial [K, T, P] for K numbers of each program

Each program takes every P-th block of a tile and reduces it; what comes after (here and in range_update) merges the P
results. Deviations are taken from the tile's first element and from each block's own mean, and merged by the formula
of Chan, Golub and LeVeque (1979): nothing cancels, and a tile of equal elements has exactly 0.

With `count` and `limit`, tiles whose count has reached the limit are not read. That is decided on the device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triptych_triton.launch import launch, limits
from triptych_triton.quantiser import divide, magnitude, root
from triptych_triton.rounding import accumulator_dtype, bound, number, widen
from triptych_triton.rows import as_rows
from triptych_triton.tile_columns import Split, block_of, split, tile_size, tile_start
from triptych_triton.tiles import ceil_div

# The most programs of a tile, which one block of the merging kernels holds.
MOST_PROGRAMS = 1024


@dataclass(frozen=True, slots=True)
class Partial:
    """What the programs of each tile found.

    Attributes:
        values: [K, T, P] in the accumulation type.
        programs: P; 0 where there are no elements, and `values` then holds nothing.
        rows: R.
        columns: how the columns are split.
    """

    values: torch.Tensor
    programs: int
    rows: int
    columns: Split


def tile_moments(x: torch.Tensor, tiles: int, count: torch.Tensor | None = None, limit: int = 0) -> Partial:
    """Elements, mean distance from the first element, and sum of squared deviations, of each program's share."""
    return _reduce(_moments, x, tiles, count, limit)


def tile_extremes(x: torch.Tensor, tiles: int, count: torch.Tensor | None = None, limit: int = 0) -> Partial:
    """Smallest, largest, and largest magnitude, NaN if there is one, of each program's share."""
    return _reduce(_extremes, x, tiles, count, limit)


def std_of_tiles(x: torch.Tensor, tiles: int) -> torch.Tensor:
    """The unbiased standard deviation of each tile, [T] in the accumulation type; NaN of fewer than two elements."""
    std = x.new_empty(tiles, dtype=accumulator_dtype(x.dtype))
    partial = tile_moments(x, tiles)
    columns = partial.columns
    launch(
        _std,
        (tiles,),
        x.device,
        partial.values,
        std,
        partial.rows,
        tiles,
        partial.programs,
        columns.base,
        columns.extra,
        EVEN=columns.even,
        PROGRAMS=MOST_PROGRAMS,
    )
    return std


def _reduce(kernel: object, x: torch.Tensor, tiles: int, count: torch.Tensor | None, limit: int) -> Partial:
    n = x.shape[-1]
    rows = x.numel() // max(n, 1)
    columns = split(n, tiles)
    block = block_of(columns.longest, 4096)
    blocks = block.row_blocks(rows) * block.column_blocks(columns.longest)
    programs = min(blocks, ceil_div(4 * limits(x.device).multiprocessors, tiles), MOST_PROGRAMS)
    values = x.new_empty((3, tiles, programs), dtype=accumulator_dtype(x.dtype))
    if programs:
        x, x_stride = as_rows(x)
        launch(
            kernel,
            (tiles * programs,),
            x.device,
            x,
            count,
            values,
            x_stride,
            rows,
            limit,
            tiles,
            programs,
            columns.base,
            columns.extra,
            EVEN=columns.even,
            ROWS=block.rows,
            COLUMNS=block.columns,
        )
    return Partial(values, programs, rows, columns)


@triton.jit
def _share(count, limit, tile, rows, longest, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Blocks of a tile, and blocks side by side in it; no blocks where the tile is done."""
    across = (longest + COLUMNS - 1) // COLUMNS
    blocks = ((rows.to(tl.int64) + ROWS - 1) // ROWS) * across
    if count is not None:
        blocks = tl.where(tl.load(count + tile) < limit, blocks, 0)
    return blocks, across


@triton.jit(do_not_specialize=["rows", "limit", "programs"])
def _moments(
    x,
    count,
    partial,
    x_stride,
    rows,
    limit,
    tiles,
    programs,
    base,
    extra,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    ACC: tl.constexpr = partial.dtype.element_ty
    tile = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    start = tile_start(tile, base, extra, EVEN)
    size = tile_size(tile, base, extra, EVEN)
    blocks, across = _share(count, limit, tile, rows, base + (0 if EVEN else 1), ROWS, COLUMNS)
    shift = widen(tl.load(x + start + tl.arange(0, 1)), ACC)
    elements = tl.zeros([1], dtype=ACC)
    mean = tl.zeros([1], dtype=ACC)
    squares = tl.zeros([1], dtype=ACC)
    for block in range(bound(program.to(tl.int64)), bound(blocks), bound(programs)):
        row = (block // across) * ROWS + tl.arange(0, ROWS).to(tl.int64)
        column = (block % across) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < size)[None, :]
        value = widen(tl.load(x + (row * x_stride)[:, None] + (start + column)[None, :], mask=inside, other=0.0), ACC)
        distance = tl.where(inside, value - shift[:, None], 0.0)
        here = tl.zeros([1], dtype=ACC) + tl.sum(tl.sum(inside.to(tl.int32), axis=1), axis=0).to(ACC)
        if tl.sum(here, axis=0) > 0:
            mean_here = divide(tl.zeros([1], dtype=ACC) + tl.sum(tl.sum(distance, axis=1), axis=0), here)
            deviation = tl.where(inside, distance - mean_here[:, None], 0.0)
            total = elements + here
            apart = mean_here - mean
            mean += apart * divide(here, total)
            squares += tl.sum(tl.sum(deviation * deviation, axis=1), axis=0) + apart * apart * elements * divide(
                here, total
            )
            elements = total
    place = partial + tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    step = tiles * programs.to(tl.int64)
    tl.store(place, elements)
    tl.store(place + step, mean)
    tl.store(place + 2 * step, squares)


@triton.jit(do_not_specialize=["rows", "limit", "programs"])
def _extremes(
    x,
    count,
    partial,
    x_stride,
    rows,
    limit,
    tiles,
    programs,
    base,
    extra,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    ACC: tl.constexpr = partial.dtype.element_ty
    tile = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    start = tile_start(tile, base, extra, EVEN)
    size = tile_size(tile, base, extra, EVEN)
    blocks, across = _share(count, limit, tile, rows, base + (0 if EVEN else 1), ROWS, COLUMNS)
    # Elements outside count as the tile's first, which belongs to it.
    first = widen(tl.load(x + start + tl.arange(0, 1)), ACC)[:, None] + tl.zeros([ROWS, COLUMNS], dtype=ACC)
    low = first
    high = first
    largest = magnitude(first)
    for block in range(bound(program.to(tl.int64)), bound(blocks), bound(programs)):
        row = (block // across) * ROWS + tl.arange(0, ROWS).to(tl.int64)
        column = (block % across) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < size)[None, :]
        loaded = tl.load(x + (row * x_stride)[:, None] + (start + column)[None, :], mask=inside, other=0.0)
        value = tl.where(inside, widen(loaded, ACC), first)
        low = tl.minimum(low, value)
        high = tl.maximum(high, value)
        largest = tl.maximum(largest, magnitude(value))
    place = partial + tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    step = tiles * programs.to(tl.int64)
    tl.store(place, tl.min(tl.min(low, axis=1), axis=0))
    tl.store(place + step, tl.max(tl.max(high, axis=1), axis=0))
    tl.store(place + 2 * step, tl.max(tl.max(largest, axis=1), axis=0).to(ACC, bitcast=True))


@triton.jit
def load_partial(partial, which, tile, tiles, programs, other, PROGRAMS: tl.constexpr):
    """What the programs of `tile` found of number `which`; `other` beyond the last of them."""
    program = tl.arange(0, PROGRAMS)
    place = (which * tiles + tile) * programs.to(tl.int64) + program
    return tl.load(partial + place, mask=program < programs, other=other)


@triton.jit
def merged_std(partial, tile, tiles, programs, elements, PROGRAMS: tl.constexpr):
    """The unbiased standard deviation of a tile of `elements` elements, a block of one."""
    ACC: tl.constexpr = partial.dtype.element_ty
    counts = load_partial(partial, 0, tile, tiles, programs, 0.0, PROGRAMS)
    means = load_partial(partial, 1, tile, tiles, programs, 0.0, PROGRAMS)
    squares = load_partial(partial, 2, tile, tiles, programs, 0.0, PROGRAMS)
    mean = divide(number(0.0, ACC) + tl.sum(counts * means, axis=0), number(tl.maximum(elements, 1), ACC))
    apart = means - mean
    total = number(0.0, ACC) + tl.sum(squares + counts * apart * apart, axis=0)
    variance = divide(total, number(tl.maximum(elements - 1, 1), ACC))
    return tl.where(elements >= 2, root(variance), float("nan"))


@triton.jit(do_not_specialize=["rows", "programs"])
def _std(partial, std, rows, tiles, programs, base, extra, EVEN: tl.constexpr, PROGRAMS: tl.constexpr):
    tile = tl.program_id(0)
    elements = rows.to(tl.int64) * tile_size(tile, base, extra, EVEN)
    tl.store(std + tile + tl.arange(0, 1), merged_std(partial, tile, tiles, programs, elements, PROGRAMS))
