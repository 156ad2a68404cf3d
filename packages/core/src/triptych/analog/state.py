"""The tensors of an analog layer beside weight and bias, and what may be loaded into them.

    input_range            Parameter [G T]     the range of each tile
    input_range_update_idx int64 [G T]         over how many batches it was calibrated
    x_min, x_max           wide [G T]          the extremes of fast mode, in float32 (float64 beside float64 weights)
    learnable_weight_clip  Parameter [G T, C]  the learned bound of the weights of each tile and output

G crossbars of T tiles and C outputs. Names are those of aihwkit-lightning, whose state_dicts load.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from triptych.analog.config import AnalogConfig
from triptych.analog.enums import WeightClipType
from triptych.errors import ArgumentError
from triptych.ops._norm_bounds import statistics_dtype

if TYPE_CHECKING:
    from triptych.analog.layer import AnalogLayer

RANGE = "input_range"
COUNT = "input_range_update_idx"
EXTREMES = ("x_min", "x_max")
CLIP = "learnable_weight_clip"


def needed(config: AnalogConfig) -> tuple[str, ...]:
    """Which of them a configuration needs; the count goes with the range."""
    range_ = config.pre_post.input_range
    names: tuple[str, ...] = (RANGE,) if range_.is_static else ()
    names += EXTREMES if range_.is_static and range_.fast_mode else ()
    return names + ((CLIP,) if config.clip.type is WeightClipType.LEARNABLE_PER_CHANNEL else ())


def prepare(layer: AnalogLayer, state_dict: dict[str, Any], prefix: str) -> list[str]:
    """Bring a state_dict that is about to be loaded to what the layer holds; returns what else torch should say.

    aihwkit-lightning counts in floats, keeps extremes where nothing uses them, and in the dtype of the weights. Its
    Conv1d writes the learned clip of a single tile without the dimension of tiles.

    Raises:
        ArgumentError: a range or a learned clip is not finite, or a count is none.
    """
    clip, given = layer.learnable_weight_clip, state_dict.get(prefix + CLIP)
    if clip is not None and isinstance(given, Tensor) and given.dim() == 1 and clip.shape[0] == 1:
        state_dict[prefix + CLIP] = given.unsqueeze(0)
    if clip is not None and isinstance(given, Tensor):
        _check_clip(layer, given, f"{prefix}{CLIP} of the state_dict")
    if layer.input_range is None:
        return []
    for name in EXTREMES:
        if getattr(layer, name) is None:
            state_dict.pop(prefix + name, None)
        elif isinstance(extreme := state_dict.get(prefix + name), Tensor):
            state_dict[prefix + name] = extreme.to(statistics_dtype(layer.weight.dtype))
    count = state_dict.get(prefix + COUNT)
    if isinstance(count, Tensor):
        state_dict[prefix + COUNT] = _whole(layer, count, prefix)
    given = state_dict.get(prefix + RANGE)
    if not isinstance(given, Tensor):
        return []
    if given.shape != _shape(layer):
        return [f"{prefix}{RANGE} must have {_shape_text(layer)}: was it saved with other tiles?"]
    check_range(layer, given, f"{prefix}{RANGE} of the state_dict")
    return []


def _whole(layer: AnalogLayer, count: Tensor, prefix: str) -> Tensor:
    """Counts as integers. An infinite one is how aihwkit-lightning says that calibrate_input_ranges was here."""
    done = torch.full_like(count, layer.rpu_config.pre_post.input_range.init_from_data, dtype=torch.float64)
    exact = torch.where(count.isinf(), done, count.double())
    if _can_be_read(count) and not bool((exact >= 0).all()):
        raise ArgumentError(
            f"{layer.title}: {prefix}{COUNT} of the state_dict holds {count.tolist()}. It must count batches."
        )
    return exact.round().to(torch.int64) if count.is_floating_point() else count


def check_range(layer: AnalogLayer, value: Tensor, what: str) -> None:
    """Raise ArgumentError for a range of the wrong shape or, where it can be looked at, with NaN or infinities."""
    if value.shape != _shape(layer):
        raise ArgumentError(f"{layer.title}: {what} has shape {list(value.shape)}. It must have {_shape_text(layer)}.")
    if not _can_be_read(value):
        return
    values = value.tolist()
    if not all(map(math.isfinite, values)):
        raise ArgumentError(
            f"{layer.title}: {what} holds {values}. Each range must be a finite number: take one from before the "
            f"training diverged, or calibrate it again."
        )


def _check_clip(layer: AnalogLayer, value: Tensor, what: str) -> None:
    if _can_be_read(value) and not bool(value.isfinite().all()):
        raise ArgumentError(
            f"{layer.title}: {what} holds NaN or infinities. Each bound must be a finite number: take them from before "
            f"the training diverged."
        )


def _can_be_read(value: Tensor) -> bool:
    """Whether there are numbers to look at, rather than a tensor that is traced or fake."""
    plain = type(value) in (Tensor, nn.Parameter) and not value.is_meta
    return plain and not torch._C._len_torch_dispatch_stack() and not torch.compiler.is_compiling()


def _shape(layer: AnalogLayer) -> tuple[int, ...]:
    return (layer.crossbars * layer.tiles,)


def _shape_text(layer: AnalogLayer) -> str:
    return f"shape {list(_shape(layer))}, one number for each tile"
