"""The formulas of analog_weight, in whatever dtype they are given, and how far from them a result may lie.

The mathematics is in analog_weight.py. Shapes: w, modified, g [C, N]; clip, wmax [T, C]; q those of a tile.
"""

from __future__ import annotations

import torch

from triptych import noise as noises
from triptych.ops._norm_bounds import smallest, statistics_dtype, sum_error, unit
from triptych.ops._quantizer import DIVISION, divided, levels, near, smallest_step, tie_error
from triptych.tiling import tile_slices

Tensor = torch.Tensor


def _maxima(w: Tensor, clip: Tensor | None, tiles: int, least: float) -> Tensor:
    """m_c of each tile, [T, C]."""
    if clip is not None:
        return clip.to(w.dtype).clamp(min=least)
    parts = [w[:, columns].abs() for columns in tile_slices(w.shape[1], tiles)]
    return torch.stack([part.amax(-1) if part.shape[1] else part.new_zeros(part.shape[0]) for part in parts])


def _grained(maxima: Tensor, grain: str) -> Tensor:
    """The maxima of one tile as a column: each channel's own, or the largest of them for all."""
    column = maxima.unsqueeze(-1)
    return column if grain == "per_channel" or not column.numel() else column.amax(0, keepdim=True)


def _steps(maxima: Tensor, clip: Tensor | None, quantization: str, res: float) -> Tensor:
    return 2 * _grained(maxima, "per_channel" if clip is not None else quantization) / levels(res)


def forward(
    w: Tensor,
    clip: Tensor | None,
    seed: Tensor | None,
    tiles: int,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
    *,
    least: float,
) -> tuple[Tensor, Tensor]:
    """The modified weights and the maxima in w's dtype; `least` is the smallest divisor."""
    wmax = _maxima(w, clip, tiles, least)
    modified = w.clone(memory_format=torch.contiguous_format)
    for maxima, columns in zip(wmax, tile_slices(w.shape[1], tiles), strict=True):
        part = modified[:, columns]
        if quantization != "none":
            step = _steps(maxima, clip, quantization, res)
            limit = levels(res) / 2
            part.copy_(torch.round(divided(part, step, least).clamp(-limit, limit)) * step)
        elif clip is not None:
            a = maxima.unsqueeze(-1)
            part.copy_((part / a).clamp(-1, 1) * a)
    if noise != "none":
        assert seed is not None
        normal = noises.normal(seed, noises.WEIGHT_STREAM, w.shape[0], w.shape[1], w.dtype)
        for maxima, columns in zip(wmax, tile_slices(w.shape[1], tiles), strict=True):
            modified[:, columns] += std_dev * _grained(maxima, noise) * normal[:, columns]
    return modified, wmax


def _quotients(
    w: Tensor, clip: Tensor, columns: slice, tile: int, quantization: str, res: float, least: float
) -> tuple[Tensor, float]:
    """q of one tile, and beyond which |q| is clipped."""
    maxima = clip[tile].to(w.dtype).clamp(min=least)
    if quantization == "none":
        return w[:, columns] / maxima.unsqueeze(-1), 1.0
    return divided(w[:, columns], _steps(maxima, clip, quantization, res), least), levels(res) / 2


def _clip_scale(channels: int, size: int, quantization: str, res: float) -> float:
    """What a sum of `_clip_terms` is multiplied by."""
    elements = max(channels * size, 1)
    if quantization == "none":
        return float(elements**-0.5)
    return float(2 * (levels(res) / 2 / elements) ** 0.5 / levels(res))


def _clip_terms(q: Tensor, limit: float, quantization: str) -> Tensor:
    """d W' / d a of each element, up to `_clip_scale`."""
    outside = limit * ((q > limit).to(q.dtype) - (q < -limit).to(q.dtype))
    if quantization == "none":
        return outside
    return outside + torch.where(q.abs() <= limit, torch.round(q) - q, 0)


def backward(
    g: Tensor, w: Tensor, clip: Tensor, tiles: int, quantization: str, res: float, least: float
) -> tuple[Tensor, Tensor]:
    """dweight and dclip in w's dtype, with a learned clip."""
    dweight = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    dclip = torch.empty(clip.shape, dtype=w.dtype, device=w.device)
    for tile, columns in enumerate(tile_slices(w.shape[1], tiles)):
        q, limit = _quotients(w, clip, columns, tile, quantization, res, least)
        part = g[:, columns]
        dweight[:, columns] = torch.where(q.abs() > limit, 0, part)
        scale = _clip_scale(w.shape[0], q.shape[1], quantization, res)
        dclip[tile] = scale * (part * _clip_terms(q, limit, quantization)).sum(-1)
    return dweight, dclip


def forward_bound(
    weight: Tensor,
    clip: Tensor | None,
    seed: Tensor | None,
    tiles: int,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
) -> tuple[Tensor, Tensor]:
    """A step where the quotient lies at a tie, the roundings of quotient and product, the error of the normals, and one
    rounding to weight's dtype. The maxima are exact."""
    w = weight.double()
    least, wide_unit = smallest_step(weight.dtype), unit(statistics_dtype(weight.dtype))
    clean, wmax = forward(w, clip, None, tiles, quantization, res, "none", 0.0, least=least)
    error = torch.zeros_like(clean) if quantization == "none" and clip is None else clean.abs() * (DIVISION * wide_unit)
    if quantization != "none":
        limit = levels(res) / 2
        for maxima, columns in zip(wmax, tile_slices(w.shape[1], tiles), strict=True):
            step = _steps(maxima, clip, quantization, res)
            error[:, columns] += tie_error(divided(w[:, columns], step, least), weight.dtype, limit) * step
    modified = clean
    if noise != "none":
        assert seed is not None
        place = (seed, noises.WEIGHT_STREAM, w.shape[0], w.shape[1])
        normal = noises.normal(*place, torch.float64)
        normal_error = noises.normal_bound(*place, statistics_dtype(weight.dtype)) + normal.abs() * 4 * wide_unit
        modified = clean.clone()
        for maxima, columns in zip(wmax, tile_slices(w.shape[1], tiles), strict=True):
            scale = std_dev * _grained(maxima, noise)
            modified[:, columns] += scale * normal[:, columns]
            error[:, columns] += scale * normal_error[:, columns]
        error += (clean.abs() + modified.abs()) * wide_unit
    return error + (modified.abs() + error) * unit(weight.dtype) + smallest(weight.dtype), torch.zeros_like(wmax)


def backward_bound(
    g: Tensor, weight: Tensor, clip: Tensor, tiles: int, quantization: str, res: float
) -> tuple[Tensor, Tensor]:
    """dweight is exact but where |q| lies at the limit; dclip is a sum whose terms may be off there and at ties.

    Both before the rounding of dclip to its dtype.
    """
    g, w, least = g.double().abs(), weight.double(), smallest_step(weight.dtype)
    wide = statistics_dtype(weight.dtype)
    dweight = torch.zeros_like(w)
    dclip = torch.zeros(clip.shape, dtype=torch.float64, device=w.device)
    for tile, columns in enumerate(tile_slices(w.shape[1], tiles)):
        q, limit = _quotients(w, clip, columns, tile, quantization, res, least)
        part, edge = g[:, columns], near(q, limit, weight.dtype)
        dweight[:, columns] = part * edge
        terms = _clip_terms(q, limit, quantization).abs()
        off = edge * (limit + 1.0)
        if quantization != "none":
            inside = q.abs() <= limit
            off = off + inside * (tie_error(q, weight.dtype) + q.abs() * (DIVISION * unit(wide)))
        scale = _clip_scale(w.shape[0], q.shape[1], quantization, res)
        dclip[tile] = scale * (part * (terms * sum_error(q.shape[1], weight.dtype) + off)).sum(-1)
    return dweight, dclip
