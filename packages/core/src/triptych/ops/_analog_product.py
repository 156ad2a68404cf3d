"""The formulas of analog_linear, tile by tile, in whatever dtype they are given: float64 for the reference.

The mathematics is in analog_linear.py. Shapes: x [R, N]; weight [C, N]; y, g [R, C]; input_range [T]; wmax [T, C];
clipped [T, R, ceil(C / 8)] in bytes, or [T, R, C] as booleans; a tile's range is a number, or [R, 1] when dynamic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from triptych import noise
from triptych.ops._quantizer import divided, levels, step_of
from triptych.tiling import tile_slices

Tensor = torch.Tensor


class Settings(NamedTuple):
    """The scalars of analog_linear, in their order."""

    tiles: int
    input_range_mode: str
    inp_res: float
    out_noise: float
    out_noise_per_channel: bool
    out_bound: float
    out_res: float
    out_bound_per_channel: bool
    decay: float
    input_min_percentage: float


class Operands(NamedTuple):
    """The tensors of forward in the dtype of the computation, with x as a matrix."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    input_range: Tensor | None
    wmax: Tensor | None
    seed: Tensor | None


class Converter(NamedTuple):
    """The two ends of the analog part of one tile.

    Attributes:
        columns: of the tile.
        number: of the tile.
        bound: of the input: IR; None where there is none.
        adc_bound: of the output, [C] or [1], or [R, 1 or C] when the range is dynamic; None without an ADC.
        noise: standard deviation of the output noise, shaped like that; None without.
    """

    columns: slice
    number: int
    bound: Tensor | None
    adc_bound: Tensor | None
    noise: Tensor | None


def matrix(x: Tensor) -> Tensor:
    """x with its leading dimensions as rows."""
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return x.reshape(rows, x.shape[-1])


def converters(x: Tensor, input_range: Tensor | None, wmax: Tensor | None, settings: Settings) -> Iterator[Converter]:
    """The tiles, with the ranges of their inputs and outputs."""
    for number, columns in enumerate(tile_slices(x.shape[1], settings.tiles)):
        bound: Tensor | None = None
        if settings.input_range_mode == "dynamic":
            part = x[:, columns].abs()
            bound = part.amax(-1, keepdim=True) if part.shape[1] else part.new_zeros(part.shape[0], 1)
        elif input_range is not None:
            bound = input_range[number]
        adc_bound = deviation = None
        if wmax is not None and bound is not None:
            if settings.out_bound > 0:
                adc_bound = bound * settings.out_bound * _maxima(wmax[number], settings.out_bound_per_channel)
            if settings.out_noise > 0:
                share = settings.out_noise / settings.tiles**0.5
                deviation = bound * share * _maxima(wmax[number], settings.out_noise_per_channel)
        yield Converter(columns, number, bound, adc_bound, deviation)


def _maxima(wmax: Tensor, per_channel: bool) -> Tensor:
    return wmax if per_channel or not wmax.numel() else wmax.amax().unsqueeze(0)


def limited(x: Tensor, bound: Tensor | None, mode: str) -> Tensor:
    """The inputs of a tile, clamped to its range where it has a fixed one."""
    if mode in ("learned", "fast"):
        assert bound is not None
        return torch.minimum(torch.maximum(x, -bound), bound)
    return x


def converted(x: Tensor, bound: Tensor | None, settings: Settings, least: float) -> Tensor:
    """x_q: the inputs of a tile behind its DAC."""
    x = limited(x, bound, settings.input_range_mode)
    if settings.inp_res <= 0 or bound is None:
        return x
    step = step_of(bound, settings.inp_res)
    return torch.round(divided(x, step, least)) * step


def read_out(y: Tensor, bound: Tensor, out_res: float, least: float) -> tuple[Tensor, Tensor]:
    """The outputs of a tile behind its ADC, and where they were clipped: decided on the level, so that the last level,
    which is the bound itself, is not beyond it by a rounding."""
    if out_res <= 0:
        return torch.minimum(torch.maximum(y, -bound), bound), y.abs() > bound
    step, limit = step_of(bound, out_res), levels(out_res) / 2
    level = torch.round(divided(y, step, least))
    return level.clamp(-limit, limit) * step, level.abs() > limit


def forward(operands: Operands, settings: Settings, least: float) -> tuple[Tensor, Tensor | None]:
    """y [R, C], and clipped as booleans [T, R, C]; None without an ADC."""
    x, weight, bias, input_range, wmax, seed = operands
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    clipped = []
    for tile in converters(x, input_range, wmax, settings):
        y = converted(x[:, tile.columns], tile.bound, settings, least) @ weight[:, tile.columns].T
        if tile.noise is not None:
            assert seed is not None
            rows, channels = y.shape
            y = y + tile.noise * noise.normal(seed, noise.output_stream(tile.number), rows, channels, y.dtype)
        if tile.adc_bound is not None:
            y, beyond = read_out(y, tile.adc_bound, settings.out_res, least)
            clipped.append(beyond)
        total += y
    return total if bias is None else total + bias, torch.stack(clipped) if clipped else None


def pack(clipped: Tensor | None, x: Tensor) -> Tensor:
    """Eight booleans of the last dimension to a byte, the first one lowest; [0] for None."""
    if clipped is None:
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    padded = torch.nn.functional.pad(clipped.to(torch.uint8), (0, -clipped.shape[-1] % 8))
    bits = padded.view(*padded.shape[:-1], padded.shape[-1] // 8, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=x.device)).sum(-1, dtype=torch.uint8)


def unpack(clipped: Tensor, channels: int) -> Tensor:
    """`pack` undone: booleans [T, R, C]."""
    bits = clipped.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=clipped.device)
    return (bits & 1).bool().reshape(*clipped.shape[:-1], clipped.shape[-1] * 8)[..., :channels]


class Gradients(NamedTuple):
    """What backward returns, in the dtype of the computation."""

    dx: Tensor
    dweight: Tensor
    dbias: Tensor
    drange: Tensor


def backward(
    g: Tensor, x: Tensor, weight: Tensor, input_range: Tensor | None, clipped: Tensor, settings: Settings, least: float
) -> Gradients:
    """All four gradients; drange is zeros [T] without a range."""
    dx, dweight = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)
    drange = torch.zeros(settings.tiles, dtype=x.dtype, device=x.device)
    beyond = unpack(clipped, weight.shape[0]) if settings.out_bound > 0 else None
    for tile in converters(x, input_range, None, settings):
        g_tile = g if beyond is None else torch.where(beyond[tile.number], 0, g)
        x_tile = x[:, tile.columns]
        gx = g_tile @ weight[:, tile.columns]
        dweight[:, tile.columns] = g_tile.T @ converted(x_tile, tile.bound, settings, least)
        if settings.input_range_mode in ("learned", "fast"):
            assert tile.bound is not None
            drange[tile.number] = range_gradient(gx, x_tile, tile.bound, settings)
            gx = torch.where(outside(x_tile, tile.bound), 0, gx)
        dx[:, tile.columns] = gx
    return Gradients(dx, dweight, g.sum(0), drange)


def outside(x: Tensor, bound: Tensor) -> Tensor:
    """Where the clamp of the inputs lets no gradient through: beyond the range, not on it."""
    return ((x >= bound) | (x <= -bound)) & (x.abs() != bound)


def range_gradient(gx: Tensor, x: Tensor, bound: Tensor, settings: Settings) -> Tensor:
    """The gradient of one tile's input range; gx is that of the clamped inputs."""
    if settings.input_range_mode == "fast":
        return torch.where(x > bound, gx, 0).sum() - torch.where(x < -bound, gx, 0).sum()
    above, below = x >= bound, x <= -bound
    gradient = torch.where(above, gx.clamp(max=0), 0).sum() - torch.where(below, gx.clamp(min=0), 0).sum()
    if settings.decay > 0 and x.numel():
        inside = x.numel() - (above | below).sum()
        shrinks = inside.double() > settings.input_min_percentage * x.numel()
        gradient = gradient + settings.decay * shrinks.to(x.dtype)  # a boolean times a float would be a float32
    return bound * gradient
