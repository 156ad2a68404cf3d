"""How far from the reference a correct analog_linear may lie; docs/numerics.md has the derivation.

Three kinds of error meet. Sums have that of `_norm_bounds.sum_error`. Quotients near a tie of a quantiser may round to
either neighbour. And what goes through the ADC may come out anywhere between what its lower and its upper end come out
as, since the ADC never decreases. Operands of a product may be rounded to x's dtype once.

Shapes: as in _analog_product.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from triptych import noise
from triptych.ops import _analog_product as product
from triptych.ops._analog_product import Converter, Operands, Settings, converters
from triptych.ops._norm_bounds import smallest, statistics_dtype, sum_error, unit
from triptych.ops._quantizer import DIVISION, divided, step_of, tie_error

Tensor = torch.Tensor


class Inputs(NamedTuple):
    """A tile's x_q in float64, and how far an element may be off."""

    exact: Tensor
    error: Tensor


def converted(x: Tensor, tile: Converter, settings: Settings, dtype: torch.dtype, least: float) -> Inputs:
    """x_q of one tile: a step off at a tie; two roundings of level times step; one of the operand to `dtype`."""
    part = x[:, tile.columns]
    exact = product.converted(part, tile.bound, settings, least)
    error = exact.abs() * (unit(dtype) if dtype.itemsize == 2 else 0.0)
    if settings.inp_res > 0 and tile.bound is not None:
        step = step_of(tile.bound, settings.inp_res)
        q = divided(product.limited(part, tile.bound, settings.input_range_mode), step, least)
        # `tie_error` is 0 or 1, and both candidates are then further from 0 than the nearer one by one step.
        error = error + tie_error(q, dtype) * step.abs() + exact.abs() * (DIVISION * unit(statistics_dtype(dtype)))
    return Inputs(exact, error)


def of_product(inputs: Inputs, other: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of inputs.exact @ other.T: of its sum, and of its operands."""
    relative = sum_error(other.shape[1], dtype)
    magnitude = (inputs.exact.abs() + inputs.error) @ other.abs().T
    return magnitude * relative + inputs.error @ other.abs().T


def forward(operands: Operands, settings: Settings, dtype: torch.dtype, least: float) -> tuple[Tensor, Tensor]:
    """The bounds of y [R, C] and of the bytes of clipped."""
    x, weight, bias, input_range, wmax, seed = operands
    wide = unit(statistics_dtype(dtype))
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64, device=x.device)
    error, magnitude = torch.zeros_like(total), torch.zeros_like(total)
    doubtful = []
    for tile in converters(x, input_range, wmax, settings):
        inputs = converted(x, tile, settings, dtype, least)
        part = weight[:, tile.columns]
        y, off = inputs.exact @ part.T, of_product(inputs, part, dtype)
        if tile.noise is not None:
            assert seed is not None
            place = (seed, noise.output_stream(tile.number), y.shape[0], y.shape[1])
            normal = noise.normal(*place, torch.float64)
            off = off + tile.noise * (
                noise.normal_bound(*place, statistics_dtype(dtype)) + normal.abs() * (DIVISION * wide)
            )
            y = y + tile.noise * normal
            off = off + y.abs() * wide
        if tile.adc_bound is not None:
            y, off, doubt = _read_out(y, off, tile.adc_bound, settings, wide, least)
            doubtful.append(doubt)
        total, error, magnitude = total + y, error + off, magnitude + y.abs()
    if bias is not None:
        total, magnitude = total + bias, magnitude + bias.abs()
    error = error + magnitude * ((settings.tiles + 1) * wide)
    error = error + (total.abs() + error) * unit(dtype) + smallest(dtype)
    return error, product.pack(torch.stack(doubtful) if doubtful else None, x).double()


def _read_out(
    y: Tensor, off: Tensor, bound: Tensor, settings: Settings, wide: float, least: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What the ADC makes of y, how far that may be off, and where it is in doubt whether it clips."""
    exact, beyond = product.read_out(y, bound, settings.out_res, least)
    off = off + y.abs() * (2 * DIVISION * wide)  # the quotient's roundings, and those of the bound, seen from y
    ends = [product.read_out(end, bound, settings.out_res, least) for end in (y - off, y + off)]
    spread = torch.maximum(*((end - exact).abs() for end, _ in ends))
    doubt = (ends[0][1] != beyond) | (ends[1][1] != beyond)
    return exact, spread + exact.abs() * (2 * DIVISION * wide), doubt


def backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    input_range: Tensor | None,
    clipped: Tensor,
    settings: Settings,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    least: float,
) -> product.Gradients:
    """The bounds of all four gradients, given which outputs were clipped; the tensors are float64 already.

    `dtypes` are those of the data, of bias and of input_range. g and weight are operands as they are; dx may be rounded
    to that of the data before its sum makes drange.
    """
    dtype, bias_dtype, range_dtype = dtypes
    exact = product.backward(g, x, weight, input_range, clipped, settings, least)
    dx, dweight = torch.zeros_like(exact.dx), torch.zeros_like(exact.dweight)
    drange = torch.zeros_like(exact.drange)
    beyond = product.unpack(clipped, weight.shape[0]) if settings.out_bound > 0 else None
    for tile in converters(x, input_range, None, settings):
        g_tile = g if beyond is None else torch.where(beyond[tile.number], 0, g)
        part, x_tile = weight[:, tile.columns], x[:, tile.columns]
        gx = g_tile @ part
        off = of_product(Inputs(g_tile, torch.zeros_like(g_tile)), part.T, dtype)
        off = off + (gx.abs() + off) * unit(dtype) + smallest(dtype)
        inputs = converted(x, tile, settings, dtype, least)
        turned = Inputs(inputs.exact.T, inputs.error.T)
        dweight[:, tile.columns] = of_product(turned, g_tile.T, dtype).T
        if settings.input_range_mode in ("learned", "fast"):
            assert tile.bound is not None
            edge = (x_tile >= tile.bound) | (x_tile <= -tile.bound)
            magnitude, doubt = (torch.where(edge, each, 0).sum() for each in (gx.abs() + off, off))
            factor = tile.bound.abs() if settings.input_range_mode == "learned" else 1.0
            relative = sum_error(x_tile.numel(), dtype)
            drange[tile.number] = factor * (doubt + (magnitude + settings.decay) * relative)
            off = torch.where(product.outside(x_tile, tile.bound), 0, off)
        dx[:, tile.columns] = off
    dweight = dweight + (exact.dweight.abs() + dweight) * unit(dtype) + smallest(dtype)
    dbias = g.abs().sum(0) * sum_error(g.shape[0], dtype)
    dbias = dbias + (exact.dbias.abs() + dbias) * unit(bias_dtype) + smallest(bias_dtype)
    drange = drange + (exact.drange.abs() + drange) * unit(range_dtype) + smallest(range_dtype)
    return product.Gradients(dx, dweight, dbias, drange)
