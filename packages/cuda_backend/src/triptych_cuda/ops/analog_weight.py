"""analog_weight in C++ and CUDA: weights as a crossbar holds them. The mathematics is in triptych.ops.analog_weight.

Shapes: T tiles; weight, modified, dmodified, dweight [C, N]; clip, dclip, wmax [T, C]; seed [1].
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
    weight: Tensor,
    clip: Tensor | None,
    seed: Tensor | None,
    tiles: int,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
) -> tuple[Tensor, Tensor]:
    """(modified, wmax)."""
    out: tuple[Tensor, Tensor] = parts.module_for(weight).analog_weight_forward(
        weight, clip, seed, tiles, quantization, res, noise, std_dev
    )
    return out


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
) -> tuple[Tensor, Tensor]:
    """(dweight, dclip); noise passes gradients straight through."""
    out: tuple[Tensor, Tensor] = parts.module_for(weight).analog_weight_backward(
        dmodified, weight, clip, tiles, quantization, res, noise, std_dev, need_dweight, need_dclip
    )
    return out
