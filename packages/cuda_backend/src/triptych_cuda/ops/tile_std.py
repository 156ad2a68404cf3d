"""tile_std in C++ and CUDA: the unbiased standard deviation of each tile. The mathematics is in triptych.ops.tile_std.

Shapes: T tiles; x [..., N]; std [T], wide.
"""

from __future__ import annotations

import torch

from triptych.call import Call
from triptych_cuda import parts

Tensor = torch.Tensor


def reasons_against(call: Call) -> list[str]:
    """Why the call cannot run: device, dtype, or a part that can be neither loaded nor built."""
    return parts.reasons_against(call)


def forward(x: Tensor, tiles: int) -> tuple[Tensor]:
    """(std,)."""
    out: tuple[Tensor] = parts.module_for(x).tile_std_forward(x, tiles)
    return out
