# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803 (compile-time constants of kernels are in capitals)
"""Gradients through a learned clip (LSQ, Esser and others, 2020): host launch, then kernel.

    C channels, N columns in T tiles of S columns; g, weight, dweight [C, N]; clip, dclip [T, C]
    q = weight / step;  dweight = g where |q| <= Q;  dclip = kappa * sum over a tile's columns of g * d
    without rounding:  step = clip, Q = 1;          kappa = 1 / sqrt(C S);          d = Q sign(q) outside, 0 inside
    with L levels:     step = 2 clip / L, Q = L / 2; kappa = 2 sqrt(Q / (C S)) / L;  d the same, round(q) - q inside

One program takes whole rows of a tile, so that dclip is summed in one order.
"""

import torch
import triton
import triton.language as tl

from triptych_triton.launch import launch
from triptych_triton.quantiser import divide, root, round_half_even, safe, tiny
from triptych_triton.rounding import accumulator_dtype, bound, narrow, number, widen
from triptych_triton.rows import as_rows, empty_rows
from triptych_triton.tile_columns import block_of, split, tile_size, tile_start
from triptych_triton.weight_pass import levels

_FLOATS = {torch.float32: tl.float32, torch.float64: tl.float64}


def clip_gradients(
    g: torch.Tensor,
    weight: torch.Tensor,
    clip: torch.Tensor,
    tiles: int,
    quantization: str,
    res: float,
    need_dweight: bool,
    need_dclip: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dweight and dclip, freshly allocated; one that is not needed is empty."""
    channels, n = weight.shape
    dweight = empty_rows(weight) if need_dweight else weight.new_empty(0)
    dclip = clip.new_empty(tuple(clip.shape) if need_dclip else 0)
    if not (need_dweight or need_dclip) or weight.numel() == 0:
        return dweight, dclip.zero_()
    g, g_stride = as_rows(g)
    weight, weight_stride = as_rows(weight)
    columns = split(n, tiles)
    block = block_of(columns.longest, 2048)
    rounded = quantization != "none"
    steps = levels(res) if rounded else 2.0
    launch(
        _clip_gradients,
        (tiles * block.row_blocks(channels),),
        weight.device,
        g,
        weight,
        clip.contiguous(),
        dweight if need_dweight else None,
        dclip if need_dclip else None,
        g_stride,
        weight_stride,
        channels,
        n,
        tiles,
        columns.base,
        columns.extra,
        int(rounded),
        steps,
        2 * (steps / 2) ** 0.5 / steps if rounded else 1.0,
        ACC=_FLOATS[accumulator_dtype(weight.dtype)],
        EVEN=columns.even,
        ROWS=block.rows,
        COLUMNS=block.columns,
    )
    return dweight, dclip


@triton.jit(do_not_specialize=["rounded"])
def _clip_gradients(
    g,
    weight,
    clip,
    dweight,
    dclip,
    g_stride,
    weight_stride,
    channels,
    n,
    tiles,
    base,
    extra,
    rounded,
    steps: tl.float64,
    kappa: tl.float64,
    ACC: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = row < channels
    start = tile_start(tile, base, extra, EVEN)
    size = tile_size(tile, base, extra, EVEN)
    learned = widen(tl.load(clip + tile.to(tl.int64) * channels + row, mask=in_rows, other=1.0), ACC)
    learned = tl.where(learned < tiny(ACC), tiny(ACC), learned)
    # Without rounding, `steps` is 2: the step is the clip itself, and Q is 1.
    step = safe(divide(2.0 * learned, number(steps, ACC) + tl.zeros_like(learned)))[:, None]
    limit = (number(steps, ACC) * 0.5)[:, None]
    total = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    for first in range(0, bound(size), COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = in_rows[:, None] & (column < size)[None, :]
        w = widen(
            tl.load(weight + (row * weight_stride)[:, None] + (start + column)[None, :], mask=inside, other=0.0), ACC
        )
        arrived = tl.load(g + (row * g_stride)[:, None] + (start + column)[None, :], mask=inside, other=0.0)
        quotient = divide(w, step + tl.zeros_like(w))
        within = tl.abs(quotient) <= limit
        if dweight is not None:
            kept = tl.where(tl.abs(quotient) > limit, tl.zeros_like(arrived), arrived)
            tl.store(dweight + (row * n)[:, None] + (start + column)[None, :], kept, mask=inside)
        if dclip is not None:
            slope = tl.where(rounded != 0, round_half_even(quotient) - quotient, quotient * 0.0)
            slope = tl.where(
                within, slope, tl.where(quotient > limit, limit, tl.where(quotient < -limit, -limit, quotient))
            )
            total += widen(arrived, ACC) * slope
    if dclip is not None:
        elements = number(size, ACC) * number(channels, ACC)
        scale = divide(number(kappa, ACC), root(elements))
        summed = narrow(tl.sum(total, axis=1) * scale, dclip.dtype.element_ty)
        tl.store(dclip + tile.to(tl.int64) * channels + row, summed, mask=in_rows)
