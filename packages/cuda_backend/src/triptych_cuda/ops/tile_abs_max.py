"""tile_abs_max in C++ and CUDA: the largest magnitude of each tile of each row. The mathematics is in triptych.ops.

Shapes: T tiles; x [..., N]; abs_max [T, ...], wide.
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
    """(abs_max,)."""
    out: tuple[Tensor] = parts.module_for(x).tile_abs_max_forward(x, tiles)
    return out
