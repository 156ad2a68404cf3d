"""analog_linear in PyTorch operations: one product over all columns where tiles differ in scale only.

Shapes: R rows, N inputs, C channels, T tiles, B = ceil(C / 8); x, dx [..., N]; weight, dweight [C, N];
bias, dbias [C]; input_range, drange [T]; wmax [T, C]; seed [1]; y, dy [..., C]; clipped [T, R, B].
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from triptych_torch.ops import _input_range, _read_out, _sums, _tiles
from triptych_torch.ops._products import operand_dtype, product

Tensor = torch.Tensor


class Settings(NamedTuple):
    """The op's scalars, in their order."""

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

    @property
    def has_limits(self) -> bool:
        """Whether inputs are clamped to a range, which then has a gradient."""
        return self.input_range_mode in ("learned", "fast")

    def converted(self, x: Tensor, input_range: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The rows of x behind the DACs, as operands in `dtype`."""
        return _input_range.converted(x, input_range, self.tiles, self.input_range_mode, self.inp_res, dtype)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_range: Tensor | None,
    wmax: Tensor | None,
    seed: Tensor | None,
    *scalars: Any,
) -> tuple[Tensor, Tensor]:
    """y in x's dtype, rounded once, and the bits of `clipped`; [0] without an ADC."""
    settings = Settings(*scalars)
    rows = _tiles.matrix(x)
    if settings.out_bound > 0 or settings.out_noise > 0:
        y, clipped = _analog(rows, weight, bias, input_range, wmax, seed, settings)
    else:
        operand = operand_dtype(x, x.dtype)
        inputs = settings.converted(rows, input_range, operand)
        y = product(inputs, weight.to(operand).T, x.dtype, bias)
        clipped = torch.empty(0, dtype=torch.uint8, device=x.device)
    return y.view(*x.shape[:-1], weight.shape[0]), clipped


def _analog(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_range: Tensor | None,
    wmax: Tensor | None,
    seed: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """y [R, C] and clipped with output noise or an ADC; partial sums stay in float32 (float64 for float64)."""
    (count, columns), channels, tiles = x.shape, weight.shape[0], settings.tiles
    shape = (tiles, count, (channels + 7) // 8) if settings.out_bound > 0 else (0,)
    clipped = torch.empty(shape, dtype=torch.uint8, device=x.device)
    if count == 0 or channels == 0:
        return x.new_empty(count, channels), clipped
    wide = _tiles.wide_dtype(x.dtype)
    operand = operand_dtype(x, wide)
    inputs, weight = settings.converted(x, input_range, operand), weight.to(operand)
    assert wmax is not None
    ranges = _input_range.ranges_of(x, input_range, tiles, settings.input_range_mode)
    deviations = bounds = None
    if settings.out_noise > 0:
        share = settings.out_noise / math.sqrt(tiles)
        deviations = _read_out.scales(ranges, share, wmax, settings.out_noise_per_channel)
    if settings.out_bound > 0:
        bounds = _read_out.scales(ranges, settings.out_bound, wmax, settings.out_bound_per_channel)
    total = product(inputs, weight.T, wide) if bounds is None else inputs.new_zeros((count, channels), dtype=wide)
    for tile, (start, stop) in enumerate(_tiles.bounds(columns, tiles)):
        y = total if bounds is None else product(inputs[:, start:stop], weight[:, start:stop].T, wide)
        if deviations is not None:
            assert seed is not None
            _read_out.add_noise_(y, deviations[tile], seed, tile)
        if bounds is not None:
            _read_out.convert_(y, bounds[tile], settings.out_res, clipped[tile])
            total += y
    if bias is not None:
        total += bias
    return total.to(x.dtype), clipped


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_range: Tensor | None,
    clipped: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dweight, dbias, drange, in their inputs' dtypes; [0] for one that is not wanted or whose input is absent."""
    settings = Settings(*rest[:-4])
    need_dx, need_dweight, need_dbias, need_drange = rest[-4:]
    rows, gradient = _tiles.matrix(x), _tiles.matrix(dy)
    dx, dweight, dbias, drange = (
        torch.empty(0, dtype=x.dtype if each is None else each.dtype, device=x.device)
        for each in (x, weight, bias, input_range)
    )
    adc = clipped if settings.out_bound > 0 else None
    limits = input_range if settings.has_limits else None
    if need_dweight:
        operand = operand_dtype(x, weight.dtype)
        dweight = _dweight(gradient.to(operand), settings.converted(rows, input_range, operand), adc, weight.dtype)
    if need_dbias and bias is not None:
        dbias = _sums.over_rows(gradient, _tiles.wide_dtype(x.dtype)).to(bias.dtype)
    wants_range = need_drange and limits is not None
    if need_dx or wants_range:
        # The range's gradient is a sum of what dx is rounded from.
        kind = _tiles.wide_dtype(x.dtype) if wants_range else x.dtype
        operand = operand_dtype(x, kind)
        gx = _gx(gradient.to(operand), weight.to(operand), adc, kind)
        if wants_range and limits is not None:
            mode, decay, share = settings.input_range_mode, settings.decay, settings.input_min_percentage
            drange = _input_range.range_gradient(gx, rows, limits, mode, decay, share).to(limits.dtype)
        if need_dx:
            if limits is not None:
                _input_range.clamp_gradient_(gx, rows, limits)
            dx = gx.to(x.dtype).view(x.shape)
    return dx, dweight, dbias, drange


def _gx(gradient: Tensor, weight: Tensor, clipped: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The gradient of the converted inputs: [R, N] in `dtype`."""
    if clipped is None:
        return product(gradient, weight, dtype)
    result = torch.empty(gradient.shape[0], weight.shape[1], dtype=dtype, device=weight.device)
    for bits, (start, stop) in zip(clipped, _tiles.bounds(weight.shape[1], clipped.shape[0]), strict=True):
        result[:, start:stop] = product(_read_out.masked(gradient, bits), weight[:, start:stop], dtype)
    return result


def _dweight(gradient: Tensor, inputs: Tensor, clipped: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The gradient of the weights: [C, N] in `dtype`."""
    if clipped is None:
        return product(gradient.T, inputs, dtype)
    result = torch.empty(gradient.shape[1], inputs.shape[1], dtype=dtype, device=inputs.device)
    for bits, (start, stop) in zip(clipped, _tiles.bounds(inputs.shape[1], clipped.shape[0]), strict=True):
        result[:, start:stop] = product(_read_out.masked(gradient, bits).T, inputs[:, start:stop], dtype)
    return result
