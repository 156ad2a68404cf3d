"""What the parts of one call ask of each other, answered over a mesh.

Everything goes through DTensor's own redistribution: it is public, traced by torch.compile, and counted by
torch.distributed.tensor.debug.CommDebugMode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from triptych.sharding.rule import Exchange, Output, Part, Request, Stacked


def over(mesh: DeviceMesh, part: Part, exchange: Exchange) -> tuple[Output, ...]:
    """Run what a part does to its end; its outputs."""
    try:
        request = next(exchange)
        while True:
            request = exchange.send(_answer(mesh, part, request))
    except StopIteration as end:
        outputs: tuple[Output, ...] = end.value
        return outputs


def _answer(mesh: DeviceMesh, part: Part, request: Request) -> torch.Tensor:
    stacked = isinstance(request, Stacked)
    mine = request.tensor.unsqueeze(0) if stacked else request.tensor
    along = part.along(*request.kinds)
    if not along:
        return mine
    split: Placement = Shard(0) if stacked else Partial("sum")
    placements: list[Placement] = [split if i in along else Replicate() for i in range(mesh.ndim)]
    return gathered(DTensor.from_local(mine, mesh, placements, run_check=False))


def gathered(tensor: Any) -> torch.Tensor:
    """The whole of a DTensor, as a plain tensor."""
    whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    local: torch.Tensor = whole.to_local()
    return local
