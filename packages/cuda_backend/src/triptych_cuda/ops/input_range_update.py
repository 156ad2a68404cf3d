"""input_range_update in C++ and CUDA: one batch of calibration. The mathematics is in triptych.ops.input_range_update.

Shapes: T tiles; x [..., N]; input_range, count, x_min, x_max and the outputs [T].
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
    input_range: Tensor,
    count: Tensor,
    x_min: Tensor | None,
    x_max: Tensor | None,
    tiles: int,
    mode: str,
    init_from_data: int,
    init_std_alpha: float,
    act_range_momentum: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(range, new_count, new_min, new_max); the last two are [0] in mode "std"."""
    out: tuple[Tensor, Tensor, Tensor, Tensor] = parts.module_for(x).input_range_update_forward(
        x, input_range, count, x_min, x_max, tiles, mode, init_from_data, init_std_alpha, act_range_momentum
    )
    return out
