# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals)
"""Calibration of input ranges: host launches, then kernels. One program a tile, after tile_moments.

    T tiles; input_range, count, x_min, x_max [T]

Everything is decided on the device: the host never learns how many batches were counted.
"""

import torch
import triton
import triton.language as tl

from triptych_triton.launch import launch
from triptych_triton.quantiser import divide
from triptych_triton.rounding import largest_number, narrow, number, widen
from triptych_triton.tile_columns import tile_size
from triptych_triton.tile_moments import MOST_PROGRAMS, load_partial, merged_std, tile_extremes, tile_moments


def range_from_std(
    x: torch.Tensor,
    input_range: torch.Tensor,
    count: torch.Tensor,
    tiles: int,
    init_from_data: int,
    init_std_alpha: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new range and count: the mean of `init_std_alpha` times the standard deviations of the first batches."""
    count = count.contiguous()
    new_range, new_count = _empty(input_range), _empty(count)
    partial = tile_moments(x, tiles, count, init_from_data)
    columns = partial.columns
    launch(
        _update_from_std,
        (tiles,),
        x.device,
        partial.values,
        input_range.contiguous(),
        count,
        new_range,
        new_count,
        partial.rows,
        init_from_data,
        init_std_alpha,
        tiles,
        partial.programs,
        columns.base,
        columns.extra,
        EVEN=columns.even,
        PROGRAMS=MOST_PROGRAMS,
    )
    return new_range, new_count


def range_from_extremes(
    x: torch.Tensor,
    input_range: torch.Tensor,
    count: torch.Tensor,
    x_min: torch.Tensor,
    x_max: torch.Tensor,
    tiles: int,
    init_from_data: int,
    momentum: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new range, count and extremes: moving averages of those of the first batches, or all of them at -1."""
    count = count.contiguous()
    new = tuple(_empty(each) for each in (input_range, count, x_min, x_max))
    partial = tile_extremes(x, tiles, count, init_from_data)
    launch(
        _update_from_extremes,
        (tiles,),
        x.device,
        partial.values,
        input_range.contiguous(),
        count,
        x_min.contiguous(),
        x_max.contiguous(),
        *new,
        init_from_data,
        momentum,
        tiles,
        partial.programs,
        PROGRAMS=MOST_PROGRAMS,
    )
    return new[0], new[1], new[2], new[3]


def _empty(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


@triton.jit
def _in_range(value, STORAGE: tl.constexpr):
    """`value`, 0 or greater, rounded to the storage type; never infinite. NaN stays."""
    largest = largest_number(STORAGE, value.dtype)
    return narrow(tl.where(value > largest, largest, value), STORAGE)


@triton.jit(do_not_specialize=["rows", "init_from_data", "programs"])
def _update_from_std(
    partial,
    input_range,
    count,
    new_range,
    new_count,
    rows,
    init_from_data,
    init_std_alpha: tl.float64,
    tiles,
    programs,
    base,
    extra,
    EVEN: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    ACC: tl.constexpr = partial.dtype.element_ty
    tile = tl.program_id(0)
    here = tile + tl.arange(0, 1)
    counted = tl.load(count + here)
    before = tl.load(input_range + here)
    calibrating = counted < init_from_data
    elements = rows.to(tl.int64) * tile_size(tile, base, extra, EVEN)
    std = merged_std(partial, tile, tiles, programs, elements, PROGRAMS)
    # The programs of a tile that is done left nothing to merge. A deviation that overflowed counts no more than a NaN.
    taken = calibrating & (std > 0) & (std < float("inf"))
    wide = widen(before, ACC)
    batches = counted.to(ACC)
    mean = divide(wide * batches + number(init_std_alpha, ACC) * std, tl.where(taken, batches + 1.0, 1.0))
    after = _in_range(tl.abs(tl.where(taken, mean, wide)), new_range.dtype.element_ty)
    tl.store(new_range + here, tl.where(calibrating, after, before))
    tl.store(new_count + here, counted + taken.to(tl.int64))


@triton.jit(do_not_specialize=["init_from_data", "programs"])
def _update_from_extremes(
    partial,
    input_range,
    count,
    x_min,
    x_max,
    new_range,
    new_count,
    new_min,
    new_max,
    init_from_data,
    momentum: tl.float64,
    tiles,
    programs,
    PROGRAMS: tl.constexpr,
):
    ACC: tl.constexpr = partial.dtype.element_ty
    tile = tl.program_id(0)
    here = tile + tl.arange(0, 1)
    counted = tl.load(count + here)
    before = tl.load(input_range + here)
    low_before = tl.load(x_min + here)
    high_before = tl.load(x_max + here)
    low = tl.min(load_partial(partial, 0, tile, tiles, programs, float("inf"), PROGRAMS), axis=0)
    high = tl.max(load_partial(partial, 1, tile, tiles, programs, float("-inf"), PROGRAMS), axis=0)
    largest = load_partial(partial, 2, tile, tiles, programs, 0.0, PROGRAMS)
    not_finite = tl.sum((largest < float("inf")).to(tl.int32) - 1, axis=0)
    taken = (counted < init_from_data) & (not_finite == 0) & (programs > 0)
    low = tl.where(taken, number(0.0, ACC) + low, 0.0)
    high = tl.where(taken, number(0.0, ACC) + high, 0.0)
    keep = number(momentum, ACC)
    take = tl.where(keep == -1.0, 0.0, 1.0 - keep)
    low_mean = tl.where(keep == -1.0, tl.minimum(low_before, low), low_before * keep + low * take)
    high_mean = tl.where(keep == -1.0, tl.maximum(high_before, high), high_before * keep + high * take)
    low = tl.where(taken, tl.where(counted == 0, low, low_mean), low_before)
    high = tl.where(taken, tl.where(counted == 0, high, high_mean), high_before)
    after = _in_range(tl.maximum(tl.abs(low), tl.abs(high)), new_range.dtype.element_ty)
    tl.store(new_range + here, tl.where(taken, after, before))
    tl.store(new_count + here, counted + taken.to(tl.int64))
    tl.store(new_min + here, low)
    tl.store(new_max + here, high)
