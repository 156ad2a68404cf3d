# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals)
"""Gradients through the clamp of the inputs and of the input range, in one pass. Host launches, then kernels.

    x, gx [R, N]; T tiles; input_range, drange [T]; P programs a tile; sums [2, T, P]; inside [T, P]
    dx = gx, but 0 where |x| > range
    learned: above = sum over x >= range of min(gx, 0), below = sum over x <= -range of max(gx, 0)
             drange = range (above - below + decay [inside > input_min_percentage elements])
    fast:    above = sum over x > range of gx, below = sum over x < -range of gx; drange = above - below

Deterministic: each program adds up every P-th block of a tile, and a last kernel the P sums.
"""

import torch
import triton
import triton.language as tl

from triptych_triton.launch import launch, limits
from triptych_triton.rounding import accumulator_dtype, bound, narrow, number, widen
from triptych_triton.rows import as_rows
from triptych_triton.tile_columns import block_of, split, tile_size, tile_start
from triptych_triton.tile_moments import MOST_PROGRAMS
from triptych_triton.tiles import ceil_div


def clamp_gradients(
    gx: torch.Tensor,
    x: torch.Tensor,
    input_range: torch.Tensor,
    tiles: int,
    fast: bool,
    decay: float,
    input_min_percentage: float,
    need_dx: bool,
    need_drange: bool,
) -> torch.Tensor | None:
    """Turn gx [R, N], row-major, into dx where that is needed; drange where that is, else None."""
    rows, n = gx.shape
    drange = input_range.new_empty(tiles) if need_drange else None
    if gx.numel() == 0:
        return drange if drange is None else drange.zero_()
    x, x_stride = as_rows(x)
    input_range = input_range.contiguous()
    columns = split(n, tiles)
    block = block_of(columns.longest, 4096)
    blocks = block.row_blocks(rows) * block.column_blocks(columns.longest)
    programs = min(blocks, ceil_div(8 * limits(x.device).multiprocessors, tiles), MOST_PROGRAMS)
    sums = inside = None
    if need_drange:
        sums = x.new_empty((2, tiles, programs), dtype=accumulator_dtype(x.dtype))
        inside = x.new_empty((tiles, programs), dtype=torch.int64)
    launch(
        _clamp_gradients,
        (tiles * programs,),
        x.device,
        gx,
        x,
        input_range,
        sums,
        inside,
        x_stride,
        rows,
        n,
        tiles,
        programs,
        columns.base,
        columns.extra,
        FAST=fast,
        NEED_DX=need_dx,
        EVEN=columns.even,
        ROWS=block.rows,
        COLUMNS=block.columns,
    )
    if drange is not None:
        launch(
            _range_gradient,
            (tiles,),
            x.device,
            sums,
            inside,
            input_range,
            drange,
            rows,
            decay,
            input_min_percentage,
            tiles,
            programs,
            columns.base,
            columns.extra,
            FAST=fast,
            EVEN=columns.even,
            PROGRAMS=MOST_PROGRAMS,
        )
    return drange


@triton.jit(do_not_specialize=["rows", "programs"])
def _clamp_gradients(
    gx,
    x,
    input_range,
    sums,
    inside,
    x_stride,
    rows,
    n,
    tiles,
    programs,
    base,
    extra,
    FAST: tl.constexpr,
    NEED_DX: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    ACC: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    tile = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    start = tile_start(tile, base, extra, EVEN)
    size = tile_size(tile, base, extra, EVEN)
    limit = widen(tl.load(input_range + tile + tl.arange(0, 1)), ACC)[:, None]
    across = (base + (0 if EVEN else 1) + COLUMNS - 1) // COLUMNS
    blocks = ((rows.to(tl.int64) + ROWS - 1) // ROWS) * across
    above = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    below = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    unclamped = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
    for block in range(bound(program.to(tl.int64)), bound(blocks), bound(programs)):
        row = (block // across) * ROWS + tl.arange(0, ROWS).to(tl.int64)
        column = (block % across) * COLUMNS + tl.arange(0, COLUMNS)
        present = (row < rows)[:, None] & (column < size)[None, :]
        value = widen(tl.load(x + (row * x_stride)[:, None] + (start + column)[None, :], mask=present, other=0.0), ACC)
        place = gx + (row * n)[:, None] + (start + column)[None, :]
        arrived = tl.load(place, mask=present, other=0.0)
        high = value >= limit
        low = value <= -limit
        if sums is not None:
            wide = widen(arrived, ACC)
            if FAST:
                above += tl.where(value > limit, wide, 0.0)
                below += tl.where(value < -limit, wide, 0.0)
            else:
                above += tl.where(high & (wide < 0), wide, tl.where(high & (wide != wide), wide, 0.0))
                below += tl.where(low & (wide > 0), wide, tl.where(low & (wide != wide), wide, 0.0))
                unclamped += tl.where(present, 1 - (high | low).to(tl.int32), 0)
        if NEED_DX:
            stopped = (high | low) & (tl.abs(value) != limit)
            tl.store(place, tl.where(stopped, tl.zeros_like(arrived), arrived), mask=present)
    if sums is not None:
        here = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
        tl.store(sums + here, tl.sum(tl.sum(above, axis=1), axis=0))
        tl.store(sums + tiles * programs.to(tl.int64) + here, tl.sum(tl.sum(below, axis=1), axis=0))
        tl.store(inside + here, tl.sum(tl.sum(unclamped, axis=1).to(tl.int64), axis=0))


@triton.jit(do_not_specialize=["rows", "programs"])
def _range_gradient(
    sums,
    inside,
    input_range,
    drange,
    rows,
    decay: tl.float64,
    input_min_percentage: tl.float64,
    tiles,
    programs,
    base,
    extra,
    FAST: tl.constexpr,
    EVEN: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """drange of one tile from the sums of its programs."""
    ACC: tl.constexpr = sums.dtype.element_ty
    tile = tl.program_id(0)
    here = tile + tl.arange(0, 1)
    program = tl.arange(0, PROGRAMS)
    place = tile * programs.to(tl.int64) + program
    present = program < programs
    above = tl.sum(tl.load(sums + place, mask=present, other=0.0), axis=0)
    below = tl.sum(tl.load(sums + tiles * programs.to(tl.int64) + place, mask=present, other=0.0), axis=0)
    gradient = tl.zeros([1], dtype=ACC) + (above - below)
    if not FAST:
        unclamped = tl.sum(tl.load(inside + place, mask=present, other=0), axis=0)
        elements = rows.to(tl.int64) * tile_size(tile, base, extra, EVEN)
        share = number(input_min_percentage, tl.float64) * number(elements, tl.float64)
        shrinks = (number(unclamped, tl.float64) > share) & (number(decay, tl.float64) > 0)
        gradient += tl.where(shrinks, number(decay, ACC), 0.0)
        gradient *= widen(tl.load(input_range + here), ACC)
    tl.store(drange + here, narrow(gradient, drange.dtype.element_ty))
