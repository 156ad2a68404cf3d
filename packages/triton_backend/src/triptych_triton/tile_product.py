# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals)
"""The product of analog tiles whose outputs are noisy or digitised before they are added. Host launch, then kernel.

    R rows, N inputs in T tiles, C channels; x [R, T * pitch] from input_pass; weight [C, N]; y [R, C]
    ranges [T], or [T, R] when dynamic; wmax [T, C]; clipped [T, R, ceil(C / 8)], a bit a channel
    y_s = x_s W_s^T + noise;  y_s = clamp(round(y_s / step) step, +-bound);  y = sum_s y_s + bias

One program walks over the inputs of each tile in turn. Its accumulator goes through noise and ADC, and is added to the
total. One loop over all inputs, with noise and ADC in a branch, would keep fetching across tiles, but the branch has
the assembler wait for every matrix instruction (seen in the machine code for sm_90; 2 times slower).
"""

import torch
import triton
import triton.language as tl

from triptych_triton.input_pass import convert_inputs
from triptych_triton.launch import launch, limits
from triptych_triton.philox import load_key, normals
from triptych_triton.plain_product import multiply_blocks
from triptych_triton.quantiser import clamp, divide, divide_by, round_half_even, safe, step_of
from triptych_triton.rounding import accumulator_dtype, bound, narrow, number, widen
from triptych_triton.tile_columns import split
from triptych_triton.tiles import ceil_div
from triptych_triton.weight_pass import Grain, grain_of, levels

_FLOATS = {torch.float32: tl.float32, torch.float64: tl.float64}

# Shared memory beside the blocks that are fetched ahead. Normal numbers, bits and the output are exchanged between
# threads in the place of those blocks, which are not alive then.
_OTHER_SHARED = 2048


def pitch_of(n: int, tiles: int) -> int:
    """Columns that each tile takes in the operands: a multiple of the block that the kernel walks in."""
    longest = max(split(n, tiles).longest, 1)
    return ceil_div(longest, _depth_of(longest)) * _depth_of(longest)


def _depth_of(longest: int) -> int:
    return min(64, max(16, int(triton.next_power_of_2(longest))))


def padded_weight(weight: torch.Tensor, tiles: int, pitch: int) -> torch.Tensor:
    """weight with `pitch` columns to a tile, the last ones zeros: itself where it is so already, else a copy."""
    if weight.is_contiguous() and weight.shape[1] == tiles * pitch and weight.data_ptr() % 16 == 0:
        return weight
    return convert_inputs(weight, None, tiles, "none", -1.0, pitch).values


def tile_product(
    x: torch.Tensor,
    ranges: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    wmax: torch.Tensor,
    seed: torch.Tensor | None,
    tiles: int,
    dynamic: bool,
    out_noise: float,
    out_noise_per_channel: bool,
    out_bound: float,
    out_res: float,
    out_bound_per_channel: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [R, C] and the bits of what was clipped, or [0] without an ADC."""
    rows, channels = x.shape[0], weight.shape[0]
    pitch = x.shape[1] // tiles
    weight = padded_weight(weight, tiles, pitch)
    y = x.new_empty(rows, channels)
    packed = (tiles, rows, ceil_div(channels, 8)) if out_bound > 0 else (0,)
    clipped = x.new_empty(packed, dtype=torch.uint8)
    if y.numel() == 0:
        return y, clipped
    wmax = wmax.contiguous()
    bound_grain = grain_of(wmax, out_bound_per_channel if out_bound > 0 else True)
    noise_grain = bound_grain
    if out_noise > 0 and (out_noise_per_channel != (bound_grain.channel_stride == 1)):
        noise_grain = grain_of(wmax, out_noise_per_channel)
    if out_bound > 0 and not dynamic:
        bound_grain = _adc_grain(ranges, bound_grain, tiles, channels, out_bound, out_res)
    wide = x.element_size() > 2
    depth = min(pitch & -pitch, 64, 16 if x.element_size() == 8 else 32 if wide else 64)
    block_rows = 64 if wide else 128
    block_columns = max(16, min(triton.next_power_of_2(channels), block_rows))
    if x.element_size() == 8:
        block_rows, block_columns = 32, min(32, block_columns)
    stage = (block_rows + block_columns) * depth * x.element_size()
    stages = max(2, min(4, (limits(x.device).shared_bytes - _OTHER_SHARED) // stage))
    launch(
        _tile_product,
        (ceil_div(rows, block_rows) * ceil_div(channels, block_columns),),
        x.device,
        x,
        weight,
        bias if bias is None else bias.contiguous(),
        ranges,
        bound_grain.values,
        noise_grain.values,
        seed if out_noise > 0 else None,
        y,
        clipped if out_bound > 0 else None,
        rows,
        channels,
        tiles,
        pitch,
        bound_grain.tile_stride,
        bound_grain.channel_stride,
        noise_grain.tile_stride,
        noise_grain.channel_stride,
        out_noise / tiles**0.5,
        out_bound,
        out_res,
        levels(out_res) / 2 if out_res > 0 else 0.0,
        ACC=_FLOATS[accumulator_dtype(x.dtype)],
        ROW_RANGES=dynamic,
        ROWS=block_rows,
        COLUMNS=block_columns,
        DEPTH=depth,
        STAGES=stages,
        num_warps=8 if block_rows * block_columns >= 128 * 128 else 4,
    )
    return y, clipped


def _adc_grain(
    ranges: torch.Tensor, maxima: Grain, tiles: int, channels: int, out_bound: float, out_res: float
) -> Grain:
    """The steps and their reciprocals, [2, T, C]: computed once, and not by every program again."""
    steps = maxima.values.new_empty((2, tiles, channels))
    columns = 256
    launch(
        _adc_steps,
        (tiles * ceil_div(channels, columns),),
        ranges.device,
        ranges,
        maxima.values,
        steps,
        channels,
        tiles,
        maxima.tile_stride,
        maxima.channel_stride,
        out_bound,
        out_res,
        COLUMNS=columns,
    )
    return Grain(steps, channels, 1)


@triton.jit(
    do_not_specialize=[
        "rows",
        "bound_tile_stride",
        "bound_channel_stride",
        "noise_tile_stride",
        "noise_channel_stride",
    ]
)
def _tile_product(
    x,
    weight,
    bias,
    ranges,
    bound_scale,
    noise_scale,
    seed,
    y,
    clipped,
    rows,
    channels,
    tiles,
    pitch,
    bound_tile_stride,
    bound_channel_stride,
    noise_tile_stride,
    noise_channel_stride,
    out_noise: tl.float64,
    out_bound: tl.float64,
    out_res: tl.float64,
    half_levels: tl.float64,
    ACC: tl.constexpr,
    ROW_RANGES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Neighbouring programs share rows of x and of weight in the L2 cache: 8 blocks of rows, then the next channels.
    across = (channels + COLUMNS - 1) // COLUMNS
    down = (rows + ROWS - 1) // ROWS
    group = tl.program_id(0) // (8 * across)
    in_group = tl.minimum(down - group * 8, 8)
    first_row = (group * 8 + (tl.program_id(0) % (8 * across)) % in_group).to(tl.int64) * ROWS
    first_column = ((tl.program_id(0) % (8 * across)) // in_group) * COLUMNS
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    width = tiles * pitch
    # Rows and channels past the end repeat the last one and are never stored. Places within a block take 32 bits.
    last_row = (rows - 1 - first_row).to(tl.int32)
    x_place = (tl.minimum(tl.arange(0, ROWS), last_row) * width)[:, None] + k[None, :]
    last_column = channels - 1 - first_column
    weight_place = (tl.minimum(tl.arange(0, COLUMNS), last_column) * width)[None, :] + k[:, None]
    x += first_row * width
    weight += first_column.to(tl.int64) * width

    total = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    for tile in range(0, bound(tiles)):
        partial = tl.zeros([ROWS, COLUMNS], dtype=ACC)
        for _ in tl.range(0, bound(pitch), DEPTH, num_stages=STAGES):
            partial = multiply_blocks(tl.load(x + x_place), tl.load(weight + weight_place), partial)
            x += DEPTH
            weight += DEPTH
        here = tl.full([1], tile, tl.int64)
        if ROW_RANGES:
            place = ranges + here * rows + row
            limit = widen(tl.load(place, mask=row < rows, other=1.0), ACC)[:, None]
        else:
            limit = widen(tl.load(ranges + here), ACC)[:, None]
        if seed is not None:
            k0, k1 = load_key(seed)
            place = noise_scale + here * noise_tile_stride + column * noise_channel_stride
            scale = tl.load(place, mask=column < channels, other=1.0)[None, :]
            drawn = normals(k0, k1, 1 + tile, row, first_column, COLUMNS, ACC)
            partial += scale * (number(out_noise, ACC)[:, None] * limit) * drawn
        if clipped is not None:
            if ROW_RANGES:
                place = bound_scale + here * bound_tile_stride + column * bound_channel_stride
                scale = tl.load(place, mask=column < channels, other=1.0)[None, :]
                # Dividing by the resolution before the product with the channel's maximum leaves one division a row.
                row_step = limit * number(out_bound, ACC)[:, None]
                if out_res > 0:
                    row_step = step_of(row_step, out_res)
                partial, beyond = read_out(partial, row_step * scale, None, out_res, half_levels)
            else:
                place = bound_scale + here * channels + column
                step = tl.load(place, mask=column < channels, other=1.0)[None, :]
                place += tl.full([1], tiles * channels, tl.int64)
                reciprocal = tl.load(place, mask=column < channels, other=1.0)[None, :]
                partial, beyond = read_out(partial, step, reciprocal, out_res, half_levels)
            _store_bits(clipped, beyond & (column < channels)[None, :], here, row, first_column, rows, channels)
        total += partial
    if bias is not None:
        total += widen(tl.load(bias + column, mask=column < channels, other=0.0), ACC)[None, :]
    inside = (row < rows)[:, None] & (column < channels)[None, :]
    out = narrow(total, y.dtype.element_ty)
    tl.store(y + (row * channels)[:, None] + column[None, :], out, mask=inside)


@triton.jit
def read_out(value, step, reciprocal, out_res, half_levels):
    """`value` behind the ADC, and where it was clipped: decided on the level, not on the product with the step.

    `step` is the bound itself where there is no resolution; `reciprocal` may be None.
    """
    ACC: tl.constexpr = value.dtype
    if out_res > 0:
        if reciprocal is None:
            level = round_half_even(divide(value, safe(step)))
        else:
            level = round_half_even(divide_by(value, safe(step), reciprocal))
        edge = number(half_levels, ACC)[:, None]
        beyond = tl.abs(level) > edge
        value = clamp(level, -edge, edge) * step
    else:
        beyond = tl.abs(value) > step
        value = clamp(value, -step, step)
    return value, beyond


@triton.jit
def _store_bits(clipped, beyond, tile, row, first_column, rows, channels):
    """Eight channels to a byte, the first one lowest. Neighbours are exchanged 32 channels to a word."""
    ROWS: tl.constexpr = beyond.shape[0]
    COLUMNS: tl.constexpr = beyond.shape[1]
    GROUP: tl.constexpr = 32 if COLUMNS >= 32 else COLUMNS
    place_in_word = tl.arange(0, GROUP).to(tl.uint32)[None, None, :]
    bits = tl.reshape(beyond.to(tl.uint32), [ROWS, COLUMNS // GROUP, GROUP]) << place_in_word
    words = tl.sum(bits, axis=2)
    place_in_word = (tl.arange(0, GROUP // 8) * 8).to(tl.uint32)[None, None, :]
    packed = tl.reshape((words[:, :, None] >> place_in_word).to(tl.uint8), [ROWS, COLUMNS // 8])
    width = (channels + 7) // 8
    byte = first_column // 8 + tl.arange(0, COLUMNS // 8)
    place = ((tile * rows + row) * width)[:, None] + byte[None, :]
    tl.store(clipped + place, packed, mask=(row < rows)[:, None] & (byte < width)[None, :])


@triton.jit(do_not_specialize=["tile_stride", "channel_stride"])
def _adc_steps(
    ranges,
    scale,
    steps,
    channels,
    tiles,
    tile_stride,
    channel_stride,
    out_bound: tl.float64,
    out_res: tl.float64,
    COLUMNS: tl.constexpr,
):
    """The steps of all tiles and channels, and their reciprocals, for ranges that are the same for every row.

    Without a resolution the bounds take the place of the steps.
    """
    ACC: tl.constexpr = steps.dtype.element_ty
    across = (channels + COLUMNS - 1) // COLUMNS
    tile = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    limit = widen(tl.load(ranges + tile + tl.arange(0, 1)), ACC)[:, None]
    maximum = tl.load(scale + tile * tile_stride + column * channel_stride, mask=inside, other=1.0)[None, :]
    step = (limit * number(out_bound, ACC)[:, None]) * maximum
    if out_res > 0:
        step = step_of(step, out_res)
    reciprocal = divide(tl.full(step.shape, 1.0, ACC), safe(step))
    place = steps + (tile * channels + column)[None, :]
    tl.store(place, step, mask=inside[None, :])
    tl.store(place + tl.full([1, 1], tiles * channels, tl.int64), reciprocal, mask=inside[None, :])
