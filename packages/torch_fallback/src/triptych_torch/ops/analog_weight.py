"""analog_weight in PyTorch operations.

Shapes: C channels, N inputs, T tiles; weight, modified, dmodified, dweight [C, N]; clip, dclip, wmax [T, C]; seed [1].
"""

from __future__ import annotations

import math

import torch

from triptych_torch.ops import _philox, _quantizer, _sums, _tiles, tile_abs_max

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]

_STREAM = 0


def forward(
    weight: Tensor,
    clip: Tensor | None,
    seed: Tensor | None,
    tiles: int,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
) -> Pair:
    """The modified weights in weight's dtype and the maxima wmax in float32 (float64 for float64)."""
    wide = _tiles.wide_dtype(weight.dtype)
    wmax = tile_abs_max.forward(weight, tiles)[0] if clip is None else _divisors(clip, wide)
    modified = torch.empty(weight.shape, dtype=wide, device=weight.device).copy_(weight)
    if weight.numel():
        if quantization != "none":
            grain = "per_channel" if clip is not None else quantization
            _quantize(modified, _quantizer.divided(2 * _grained(wmax, grain), _quantizer.levels(res)), res)
        elif clip is not None:
            for run in _tiles.runs(weight.shape[1], tiles):
                bound = run.numbers(wmax)
                run.of(modified).div_(bound).clamp_(-1, 1).mul_(bound)
        if noise != "none" and std_dev > 0:
            assert seed is not None
            _add_noise(modified, seed, std_dev * _grained(wmax, noise))
    return modified.to(weight.dtype), wmax


def backward(
    dmodified: Tensor,
    weight: Tensor,
    clip: Tensor | None,
    tiles: int,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
    need_dweight: bool,
    need_dclip: bool,
) -> Pair:
    """dweight in weight's dtype and dclip in clip's; [0] for one that is not wanted, and for dclip without a clip."""
    if clip is None:
        dweight = dmodified.clone(memory_format=torch.contiguous_format) if need_dweight else weight.new_empty(0)
        return dweight, weight.new_empty(0)
    wide = _tiles.wide_dtype(weight.dtype)
    dweight = weight.new_empty(weight.shape if need_dweight else (0,))
    dclip = torch.zeros(clip.shape if need_dclip else (0,), dtype=wide, device=clip.device)
    divisors = _divisors(clip, wide)
    limit = 1.0
    if quantization != "none":
        limit = _quantizer.levels(res) / 2
        divisors = _quantizer.safe(_quantizer.divided(2 * divisors, 2 * limit))
    for run in _tiles.runs(weight.shape[1], tiles):
        q = run.of(weight) / run.numbers(divisors)
        size, gradient = q.abs(), run.of(dmodified)
        if need_dweight:  # a NaN is not beyond: its gradient goes on
            torch.where(size > limit, gradient.new_zeros(()), gradient, out=run.of(dweight))
        if need_dclip and q.numel():
            within = 0 if quantization == "none" else torch.round(q).sub_(q)
            terms = torch.where(size <= limit, within, q.clamp_(-limit, limit)).mul_(gradient)
            dclip[run.slice] = _sums.over_last(terms).T * _scale(weight.shape[0] * run.size, quantization, limit)
    return dweight, dclip.to(clip.dtype)


def _divisors(clip: Tensor, wide: torch.dtype) -> Tensor:
    """The clip of each channel, positive; fresh and contiguous."""
    result = torch.empty(clip.shape, dtype=wide, device=clip.device).copy_(clip)
    return result.clamp_(min=torch.finfo(wide).smallest_normal)


def _grained(wmax: Tensor, grain: str) -> Tensor:
    """The maxima [T, C], or the largest of each tile [T, 1]."""
    return wmax if grain == "per_channel" else wmax.amax(1, keepdim=True)


def _quantize(values: Tensor, steps: Tensor, res: float) -> None:
    """In place, to multiples of each tile's step."""
    limit = _quantizer.levels(res) / 2
    divisors = _quantizer.safe(steps)
    for run in _tiles.runs(values.shape[1], steps.shape[0]):
        part = run.of(values).div_(run.numbers(divisors))
        part.clamp_(-limit, limit).round_().mul_(run.numbers(steps))


def _add_noise(values: Tensor, seed: Tensor, deviations: Tensor) -> None:
    """In place, normal numbers times each tile's deviation, [T, C] or [T, 1]."""
    channels, inputs = values.shape
    deviations = deviations.expand(-1, channels)
    for first, count in _philox.blocks(channels, inputs, values.device):
        drawn = _philox.normal(seed, _STREAM, first, count, inputs, values.dtype)
        block = values.narrow(0, first, count)
        for run in _tiles.runs(inputs, deviations.shape[0]):
            run.of(block).addcmul_(run.of(drawn), run.numbers(deviations.narrow(1, first, count)))


def _scale(elements: int, quantization: str, limit: float) -> float:
    """What the sum over a channel is multiplied by, in a tile of so many elements."""
    if quantization == "none":
        return 1 / math.sqrt(elements)
    return 2 * math.sqrt(limit / elements) / (2 * limit)
