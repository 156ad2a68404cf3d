"""Parameters that torch.distributed.fsdp.fully_shard spreads over processes, seen from the layer that has them.

Between steps a layer has its piece of each Parameter, a DTensor. For a forward and a backward FSDP puts the whole
Parameter in its place, which it gathers anew each time and throws away: what is written there is lost. It changes one
for the other by assigning to the module, so the layer learns of it (`AnalogLayer.__setattr__`), and knows in forward
which piece the whole one stands for.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

_PIECES = "_pieces"
"""The attribute of a layer that holds the pieces, by name; there only while something whole stands in their place."""


def mesh_of(value: object) -> Any:
    """The mesh that a tensor is spread over; None for a plain one."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported here: half a second, and no DTensor without it
    return value.device_mesh if module is not None and isinstance(value, module.DTensor) else None


def _dimensions(value: object) -> int:
    mesh = mesh_of(value)
    return 0 if mesh is None else int(mesh.ndim)


def assigned(layer: nn.Module, name: str, new: nn.Parameter) -> bool:
    """Take note of what is about to be assigned to a Parameter; returns whether it is FSDP that gathers or spreads it.

    Under tensor parallelism the whole Parameter is a DTensor too, on a mesh of fewer dimensions.
    """
    before, after = _dimensions(layer._parameters.get(name)), _dimensions(new)
    if before == after:
        return False
    pieces = layer.__dict__.setdefault(_PIECES, {})
    if after < before:
        pieces[name] = layer._parameters[name]
    else:
        pieces.pop(name, None)
    if not pieces:
        del layer.__dict__[_PIECES]
    return True


def piece(layer: nn.Module, name: str) -> Any:
    """The DTensor that the layer's Parameter of this name stands for at the moment; None if it stands for itself."""
    return layer.__dict__.get(_PIECES, {}).get(name)


def whole(layer: nn.Module, name: str) -> Tensor:
    """The values of a Parameter, in the dtype in which it is trained. Every process of its mesh must call this."""
    kept = piece(layer, name)
    values: Any = layer._parameters[name].detach()  # type: ignore[union-attr]
    # The whole one may be in the dtype of a mixed-precision policy. Pieces offloaded to main memory stay there.
    if kept is not None and kept.device == values.device:
        values = kept.detach()
    found: Tensor = values if mesh_of(values) is None else values.full_tensor()
    return found


@torch.no_grad()
def write(layer: nn.Module, name: str, values: Tensor) -> None:
    """Give a Parameter these values, which are the same in every process: now, and for good."""
    for target in (layer._parameters[name], piece(layer, name)):
        if target is not None:
            put(target, values)


@torch.no_grad()
def put(target: Any, values: Tensor) -> None:
    """Write values, which are the same in every process, into a tensor that may be spread over them."""
    mesh = mesh_of(target)
    if mesh is None:
        target.copy_(values)
        return
    from torch.distributed.tensor import distribute_tensor

    moved = values.to(target.device, target.dtype)
    target.copy_(distribute_tensor(moved, mesh, target.placements, src_data_rank=None))
