"""tile_abs_max in Triton: the largest magnitude of each row in each tile of columns.

    x [..., N]; tiles T; abs_max [T, ...] in float32 (float64 for float64)

Rows of any length, any number of tiles, any strides, empty tensors; float32, bfloat16, float16 and float64. Kernel:
tile_reduce.
"""

import torch

from triptych.call import Call
from triptych_triton.requirements import reasons_against_analog
from triptych_triton.tile_reduce import abs_max_of_tiles


def forward(x: torch.Tensor, tiles: int) -> tuple[torch.Tensor]:
    """The maxima, row-major; NaN where a tile holds one, 0 for an empty tile."""
    return (abs_max_of_tiles(x, tiles),)


def reasons_against(call: Call) -> list[str]:
    return reasons_against_analog(call)
