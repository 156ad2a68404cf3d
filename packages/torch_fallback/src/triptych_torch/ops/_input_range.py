"""The input side of analog_linear: input ranges, the clamp to them, the DAC, and the gradients of range and clamp.

Shapes: R rows, N columns, T tiles; x, gx [R, N]; input_range, drange [T]; ranges [T, 1], or [T, R] when dynamic.
"""

from __future__ import annotations

import math

import torch

from triptych_torch.ops import _quantizer, _sums, _tiles, tile_abs_max

Tensor = torch.Tensor


def ranges_of(x: Tensor, input_range: Tensor | None, tiles: int, mode: str) -> Tensor:
    """The range of each tile and row, in float32 (float64 for float64). Not for mode "none"."""
    if mode == "dynamic":
        return tile_abs_max.forward(x, tiles)[0]
    assert input_range is not None
    return input_range.to(_tiles.wide_dtype(x.dtype)).unsqueeze(1)


def converted(x: Tensor, input_range: Tensor | None, tiles: int, mode: str, res: float, dtype: torch.dtype) -> Tensor:
    """What the tiles see of x, in `dtype`: clamped in the modes that clamp, quantised if res > 0. May be x itself."""
    clamps = mode in ("learned", "fast")
    if not clamps and res <= 0:
        return x.to(dtype)
    ranges = ranges_of(x, input_range, tiles, mode)
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    for run in _tiles.runs(x.shape[1], tiles):
        bound = run.numbers(ranges)
        if res <= 0:
            torch.clamp(run.of(x), -bound, bound, out=run.of(result))
            continue
        step = _quantizer.step_of(bound, res)
        divisor = _quantizer.safe(step)
        q = torch.clamp(run.of(x), -bound, bound).div_(divisor) if clamps else run.of(x) / divisor
        torch.mul(q.round_(), step, out=run.of(result))
    return result


def range_gradient(gx: Tensor, x: Tensor, input_range: Tensor, mode: str, decay: float, least_share: float) -> Tensor:
    """The gradient of each tile's range; gx is that of the clamped inputs, in float32 (float64 for float64).

    Args:
        mode: "learned" or "fast".
        decay: by how much of itself a range shrinks where hardly an input is clipped; mode "learned" only.
        least_share: a range shrinks where a larger share of its inputs than this lies inside of it.
    """
    tiles = input_range.shape[0]
    ranges = input_range.to(gx.dtype)
    terms = torch.empty(gx.shape, dtype=gx.dtype, device=gx.device)
    shrinks = torch.zeros_like(ranges)
    for run in _tiles.runs(x.shape[1], tiles):
        part, gradient, bound = run.of(x), run.of(gx), run.numbers(ranges.unsqueeze(1))
        if mode == "fast":
            grows = torch.where(part > bound, gradient, 0)
            torch.sub(grows, torch.where(part < -bound, gradient, 0), out=run.of(terms))
            continue
        above, below = part >= bound, part <= -bound
        grows = torch.where(above, gradient, 0).clamp_(max=0)
        torch.sub(grows, torch.where(below, gradient, 0).clamp_(min=0), out=run.of(terms))
        elements = x.shape[0] * run.size
        if decay > 0 and elements:
            inside = elements - torch.count_nonzero(above.logical_or_(below), (0, 2))
            shrinks[run.slice] = inside > math.floor(least_share * elements)
    sums = _sums.over_tiles(terms, tiles)
    return sums if mode == "fast" else sums.add_(shrinks, alpha=decay).mul_(ranges)


def clamp_gradient_(gx: Tensor, x: Tensor, input_range: Tensor) -> None:
    """In place, from the gradient of the clamped inputs to that of x: 0 beyond the range, kept where |x| is the range.

    |x| > range is what the rule "x >= range or x <= -range, and |x| != range" comes to, of a negative range too.
    """
    ranges = input_range.to(_tiles.wide_dtype(x.dtype)).unsqueeze(1)
    for run in _tiles.runs(x.shape[1], input_range.shape[0]):
        run.of(gx).masked_fill_(run.of(x).abs() > run.numbers(ranges), 0)
