"""analog_linear in C++ and CUDA: the product of a crossbar, tile by tile. The mathematics is in triptych.ops.

Shapes: T tiles, R rows, C outputs; x, dx [..., N]; weight, dweight [C, N]; bias, dbias [C]; input_range, drange [T];
wmax [T, C]; seed [1]; y, dy [..., C]; clipped [T, R, (C + 7) // 8], one bit an output.
"""

from __future__ import annotations

import torch

from triptych.call import Call
from triptych_cuda import parts

Tensor = torch.Tensor


def reasons_against(call: Call) -> list[str]:
    """Why the call cannot run: device, dtype, or a part that can be neither loaded nor built."""
    return parts.reasons_against(call)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_range: Tensor | None,
    wmax: Tensor | None,
    seed: Tensor | None,
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
) -> tuple[Tensor, Tensor]:
    """(y, clipped); decay and input_min_percentage concern backward only."""
    out: tuple[Tensor, Tensor] = parts.module_for(x).analog_linear_forward(
        x,
        weight,
        bias,
        input_range,
        wmax,
        seed,
        tiles,
        input_range_mode,
        inp_res,
        out_noise,
        out_noise_per_channel,
        out_bound,
        out_res,
        out_bound_per_channel,
        decay,
        input_min_percentage,
    )
    return out


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_range: Tensor | None,
    clipped: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias, drange)."""
    out: tuple[Tensor, Tensor, Tensor, Tensor] = parts.module_for(x).analog_linear_backward(
        dy,
        x,
        weight,
        bias,
        input_range,
        clipped,
        tiles,
        input_range_mode,
        inp_res,
        out_noise,
        out_noise_per_channel,
        out_bound,
        out_res,
        out_bound_per_channel,
        decay,
        input_min_percentage,
        need_dx,
        need_dweight,
        need_dbias,
        need_drange,
    )
    return out
