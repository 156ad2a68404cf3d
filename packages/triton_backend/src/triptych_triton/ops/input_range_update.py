"""input_range_update in Triton: one batch of the calibration of input ranges.

    x [..., N]; tiles T; input_range, count, x_min, x_max and their new values [T]

Rows of any length, any number of tiles, any strides, empty tensors; float32, bfloat16, float16 and float64. The host
does not wait for the device, and tiles that are done are not read. Kernels: tile_moments, range_update.
"""

import torch

from triptych.call import Call
from triptych_triton.range_update import range_from_extremes, range_from_std
from triptych_triton.requirements import reasons_against_analog
from triptych_triton.rounding import accumulator_dtype


def forward(
    x: torch.Tensor,
    input_range: torch.Tensor,
    count: torch.Tensor,
    x_min: torch.Tensor | None,
    x_max: torch.Tensor | None,
    tiles: int,
    mode: str,
    init_from_data: int,
    init_std_alpha: float,
    act_range_momentum: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new range, count, x_min and x_max, fresh also where nothing changed; the last two are [0] in mode "std"."""
    if mode == "std":
        new_range, new_count = range_from_std(x, input_range, count, tiles, init_from_data, init_std_alpha)
        wide = accumulator_dtype(x.dtype)
        return new_range, new_count, x.new_empty(0, dtype=wide), x.new_empty(0, dtype=wide)
    assert x_min is not None and x_max is not None
    return range_from_extremes(x, input_range, count, x_min, x_max, tiles, init_from_data, act_range_momentum)


def reasons_against(call: Call) -> list[str]:
    return reasons_against_analog(call)
