# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals)
"""Weights as an analog crossbar holds them: clipped, discretised, with noise. Host launches, then kernels.

    C channels, N columns in T tiles; weight, modified [C, N]; clip, wmax [T, C]

First the maxima, then one pass that does all the rest. Which maximum a step or a noise is measured by, the channel's
own or the tile's largest, is a matter of a stride: one kernel serves every combination of settings.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triptych_triton.launch import launch
from triptych_triton.philox import load_key, normals
from triptych_triton.quantiser import clamp, divide, round_half_even, safe
from triptych_triton.rounding import accumulator_dtype, narrow, number, widen
from triptych_triton.rows import as_rows, empty_rows
from triptych_triton.tile_columns import block_of, split, tile_size, tile_start
from triptych_triton.tile_reduce import abs_max_of_tiles

# What the pass does to a weight before noise.
KEEP = tl.constexpr(0)
CLAMP = tl.constexpr(1)
QUANTISE = tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class Grain:
    """A scale for each tile and channel, as a tensor and the distances between its elements.

    Attributes:
        values: [T, C], or [T] for one scale a tile.
        tile_stride, channel_stride: distances in elements; a channel stride of 0 repeats a tile's scale.
    """

    values: torch.Tensor
    tile_stride: int
    channel_stride: int


def grain_of(wmax: torch.Tensor, per_channel: bool) -> Grain:
    """The maxima of the channels, or the largest of each tile."""
    if per_channel:
        return Grain(wmax, wmax.shape[1], 1)
    return Grain(abs_max_of_tiles(wmax, 1).view(-1), 1, 0)


def levels(res: float) -> float:
    """The number of steps between the bounds of a quantiser."""
    return max(res, 1 / res)


def modify_weight(
    weight: torch.Tensor,
    clip: torch.Tensor | None,
    seed: torch.Tensor | None,
    tiles: int,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The modified weights and the maxima of each tile and channel, freshly allocated."""
    channels, n = weight.shape
    if clip is None:
        wmax = abs_max_of_tiles(weight, tiles)
    else:
        wide = clip.contiguous().to(accumulator_dtype(weight.dtype))
        wmax = wide.clamp(min=torch.finfo(wide.dtype).smallest_normal)
    modified = empty_rows(weight)
    if modified.numel() == 0:
        return modified, wmax

    action = QUANTISE if quantization != "none" else KEEP if clip is None else CLAMP
    step_grain = grain_of(wmax, per_channel=clip is not None or quantization != "per_tensor")
    noise_grain = step_grain
    if noise != "none" and (noise == "per_channel") != (step_grain.channel_stride == 1):
        noise_grain = grain_of(wmax, noise == "per_channel")
    weight, weight_stride = as_rows(weight)
    columns = split(n, tiles)
    elements = 1024 if wmax.dtype == torch.float64 else 4096  # cos and sin of float64 take many registers
    block = block_of(columns.longest, elements, most_columns=512, fewest_columns=4)
    # One block more, for a tile that begins inside a group of four columns.
    across = block.column_blocks(columns.longest if _begins_at_groups(n, tiles) else columns.longest + 3)
    launch(
        _modify,
        (across * tiles * block.row_blocks(channels),),
        weight.device,
        weight,
        step_grain.values,
        noise_grain.values,
        None if noise == "none" else seed,
        modified,
        weight_stride,
        channels,
        n,
        tiles,
        across,
        columns.base,
        columns.extra,
        step_grain.tile_stride,
        step_grain.channel_stride,
        noise_grain.tile_stride,
        noise_grain.channel_stride,
        action.value,
        levels(res) if action == QUANTISE else 1.0,
        std_dev,
        EVEN=columns.even,
        ALIGNED=_begins_at_groups(n, tiles),
        ROWS=block.rows,
        COLUMNS=block.columns,
    )
    return modified, wmax


def _begins_at_groups(n: int, tiles: int) -> bool:
    """Whether every tile begins at a multiple of 4, where a call of Philox does."""
    return tiles == 1 or n % (4 * tiles) == 0


@triton.jit(
    do_not_specialize=[
        "step_tile_stride",
        "step_channel_stride",
        "noise_tile_stride",
        "noise_channel_stride",
        "action",
    ]
)
def _modify(
    weight,
    step_scale,
    noise_scale,
    seed,
    modified,
    weight_stride,
    channels,
    n,
    tiles,
    across,
    base,
    extra,
    step_tile_stride,
    step_channel_stride,
    noise_tile_stride,
    noise_channel_stride,
    action,
    steps: tl.float64,
    std_dev: tl.float64,
    EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    STORAGE: tl.constexpr = modified.dtype.element_ty
    ACC: tl.constexpr = step_scale.dtype.element_ty
    tile = (tl.program_id(0) // across) % tiles
    row = ((tl.program_id(0) // across) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tile_start(tile, base, extra, EVEN)
    end = start + tile_size(tile, base, extra, EVEN)
    first = start + (tl.program_id(0) % across) * COLUMNS
    if not ALIGNED:
        first = (start // 4) * 4 + (tl.program_id(0) % across) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    in_rows = row < channels
    inside = in_rows[:, None] & (column < end)[None, :]
    if not ALIGNED:
        inside &= (column >= start)[None, :]

    stored = tl.load(weight + (row * weight_stride)[:, None] + column[None, :], mask=inside, other=0.0)
    value = widen(stored, ACC)
    if action != KEEP:
        step = tl.load(step_scale + tile.to(tl.int64) * step_tile_stride + row * step_channel_stride, mask=in_rows)
        step = tl.where(in_rows, step, 1.0)
        if action == QUANTISE:
            step = divide(2.0 * step, number(steps, ACC) + tl.zeros_like(step))
            limit = number(steps, ACC)[:, None] * 0.5
            quotient = divide(value, safe(step)[:, None] + tl.zeros_like(value))
            value = round_half_even(clamp(quotient, -limit, limit)) * step[:, None]
        else:
            quotient = divide(value, step[:, None] + tl.zeros_like(value))
            value = clamp(quotient, -1.0, 1.0) * step[:, None]
    if seed is not None:
        k0, k1 = load_key(seed)
        scale = tl.load(noise_scale + tile.to(tl.int64) * noise_tile_stride + row * noise_channel_stride, mask=in_rows)
        scale = tl.where(in_rows, scale, 0.0) * number(std_dev, ACC)
        value += scale[:, None] * normals(k0, k1, 0, row, first, COLUMNS, ACC)
    tl.store(modified + (row * n)[:, None] + column[None, :], narrow(value, STORAGE), mask=inside)
