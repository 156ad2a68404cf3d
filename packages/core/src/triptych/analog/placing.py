"""Where the tensors beside the weight belong when the weight of a layer is spread over a mesh (tensor parallelism).

The styles of torch.distributed.tensor.parallel know weight and bias. ColwiseParallel splits whatever else a layer has
along its first dimension, RowwiseParallel replicates it. Here they get the part of tiles and channels that goes with
that of the weight: what the ops would move them to in every step, and where their gradients arrive.

    weight        input_range, update_idx, x_min, x_max [T]     learnable_weight_clip [T, C]
    Shard(0)      Replicate                                     Shard(1)
    Shard(1)      Shard(0)                                      Shard(0)
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from triptych.analog.state import CLIP, COUNT, EXTREMES, RANGE
from triptych.sharding.tiles import whole_tiles

if TYPE_CHECKING:
    from triptych.analog.layer import AnalogLayer


def registered(layer: AnalogLayer, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """The Parameter that a parallel style registers under a name, in the place that goes with the weight's."""
    if name not in (RANGE, CLIP) or not _is_spread(parameter) or layer.crossbars > 1:
        return parameter
    moved: nn.Parameter = _moved(layer, name, parameter)
    return moved


def place_buffers(layer: AnalogLayer) -> None:
    """Have the state of calibration where the ranges are, so that nothing is gathered to write it."""
    ranges = layer.input_range
    if torch.compiler.is_compiling() or ranges is None or not _is_spread(ranges):
        return
    for name in (COUNT, *EXTREMES):
        buffer: Any = layer._buffers.get(name)
        if buffer is not None and _is_spread(buffer) and buffer.placements != ranges.placements:  # type: ignore[attr-defined]
            # Around this alone: a program that torch.export made with a region without gradients could not be loaded.
            with torch.no_grad():
                layer._buffers[name] = buffer.redistribute(placements=ranges.placements)  # type: ignore[attr-defined]


def _is_spread(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _moved(layer: AnalogLayer, name: str, parameter: Any) -> Any:
    weight: Any = layer._parameters.get("weight")
    if not _is_spread(weight) or weight.device_mesh != parameter.device_mesh:
        return parameter
    from torch.distributed.tensor import Replicate, Shard

    along = tuple(weight.device_mesh.size(i) for i, each in enumerate(weight.placements) if each == Shard(1))
    fits = whole_tiles(weight.shape[1], layer.tiles, along) is not None
    placements = [
        Shard(0) if each == Shard(1) and fits else Shard(1) if each == Shard(0) and name == CLIP else Replicate()
        for each in weight.placements
    ]
    if list(parameter.placements) == placements:
        return parameter
    with torch.no_grad():
        moved: Tensor = parameter.detach().redistribute(placements=placements)
    return nn.Parameter(moved, requires_grad=parameter.requires_grad)
