"""tile_std in Triton: the unbiased standard deviation of all elements of each tile of columns.

    x [..., N]; tiles T; std [T] in float32 (float64 for float64)

Rows of any length, any number of tiles, any strides, empty tensors; float32, bfloat16, float16 and float64. Kernels:
tile_moments.
"""

import torch

from triptych.call import Call
from triptych_triton.requirements import reasons_against_analog
from triptych_triton.tile_moments import std_of_tiles


def forward(x: torch.Tensor, tiles: int) -> tuple[torch.Tensor]:
    """NaN for fewer than two elements, and where one is not finite; exactly 0 where all are equal. Deterministic."""
    return (std_of_tiles(x, tiles),)


def reasons_against(call: Call) -> list[str]:
    return reasons_against_analog(call)
