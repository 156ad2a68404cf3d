"""analog_linear in Triton: x W^T + bias through analog tiles, with input range, DAC, output noise and ADC.

    x, dx [..., N], R rows; weight, dweight [C, N]; bias, dbias [C]; y, dy [..., C]; tiles T
    input_range, drange [T]; wmax [T, C]; clipped [T, R, ceil(C / 8)]

Rows of any length, any number of tiles, any strides, empty tensors; float32, bfloat16, float16 and float64. Without
output noise and ADC the tiles change only scales, and there is one product over all of them (plain_product). With
either they have a kernel of their own (tile_product), and with an ADC backward has a product for each tile. Other
kernels: input_pass, input_gradient, output_gradient.
"""

import torch

from triptych.call import Call
from triptych_triton.input_gradient import clamp_gradients
from triptych_triton.input_pass import convert_inputs
from triptych_triton.output_gradient import sum_over_rows, unclipped_gradient
from triptych_triton.plain_product import product
from triptych_triton.requirements import reasons_against_analog
from triptych_triton.tile_columns import split
from triptych_triton.tile_product import pitch_of, tile_product


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    input_range: torch.Tensor | None,
    wmax: torch.Tensor | None,
    seed: torch.Tensor | None,
    tiles: int,
    input_range_mode: str,
    inp_res: float,
    out_noise: float,
    out_noise_per_channel: bool,
    out_bound: float,
    out_res: float,
    out_bound_per_channel: bool,
    decay: float,
    input_min_percentage: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y in x's dtype and the bits of what the ADC clipped, [0] without one; row-major."""
    shape = (*x.shape[:-1], weight.shape[0])
    if out_noise <= 0 and out_bound <= 0:
        inputs = convert_inputs(x, input_range, tiles, input_range_mode, inp_res)
        return product(inputs.values, weight.t(), bias).view(shape), x.new_empty(0, dtype=torch.uint8)
    inputs = convert_inputs(x, input_range, tiles, input_range_mode, inp_res, pitch_of(x.shape[-1], tiles))
    assert inputs.ranges is not None and wmax is not None
    y, clipped = tile_product(
        inputs.values,
        inputs.ranges,
        weight,
        bias,
        wmax,
        seed,
        tiles,
        input_range_mode == "dynamic",
        out_noise,
        out_noise_per_channel,
        out_bound,
        out_res,
        out_bound_per_channel,
    )
    return y.view(shape), clipped


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    input_range: torch.Tensor | None,
    clipped: torch.Tensor,
    tiles: int,
    input_range_mode: str,
    inp_res: float,
    out_noise: float,
    out_noise_per_channel: bool,
    out_bound: float,
    out_res: float,
    out_bound_per_channel: bool,
    decay: float,
    input_min_percentage: float,
    need_dx: bool,
    need_dweight: bool,
    need_dbias: bool,
    need_drange: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dweight, dbias and drange, each in the dtype of what it is the gradient of; [0] for one that is not needed or
    whose input is absent. Deterministic."""
    channels, n = weight.shape
    rows = x.shape[:-1].numel()
    dy = dy.reshape(rows, channels)
    need_drange = need_drange and input_range is not None
    need_gx = need_dx or need_drange
    dbias = x.new_empty(0)
    if bias is not None:
        dbias = sum_over_rows(dy, bias) if need_dbias else bias.new_empty(0)

    gx = x.new_empty(rows, n) if need_gx else None
    inputs = convert_inputs(x, input_range, tiles, input_range_mode, inp_res).values if need_dweight else None
    dweight = weight.new_empty((channels, n) if need_dweight else 0)
    if out_bound > 0:
        _multiply_by_tile(dy, clipped, weight, inputs, gx, dweight, tiles)
    else:
        if gx is not None:
            product(dy, weight, out=gx)
        if inputs is not None:
            product(dy.t(), inputs, out=dweight)

    drange = None
    if gx is not None and input_range is not None:
        fast = input_range_mode == "fast"
        drange = clamp_gradients(gx, x, input_range, tiles, fast, decay, input_min_percentage, need_dx, need_drange)
    if drange is None:
        drange = (x if input_range is None else input_range).new_empty(0)
    dx = gx.view(x.shape) if gx is not None and need_dx else x.new_empty(0)
    return dx, dweight, dbias, drange


def _multiply_by_tile(
    dy: torch.Tensor,
    clipped: torch.Tensor,
    weight: torch.Tensor,
    inputs: torch.Tensor | None,
    gx: torch.Tensor | None,
    dweight: torch.Tensor,
    tiles: int,
) -> None:
    """Fill gx, and dweight if there are inputs, from the gradient that the ADC of each tile let through."""
    clipped = clipped.contiguous()
    g = torch.empty_like(dy, memory_format=torch.contiguous_format)
    columns_of = split(weight.shape[1], tiles).columns
    for tile in range(tiles):
        columns = columns_of(tile)
        unclipped_gradient(dy, clipped[tile], g)
        if gx is not None:
            product(g, weight[:, columns], out=gx[:, columns])
        if inputs is not None:
            product(g.t(), inputs[:, columns], out=dweight[:, columns])


def reasons_against(call: Call) -> list[str]:
    return reasons_against_analog(call)
