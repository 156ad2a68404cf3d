"""That all processes of a mesh have drawn the same seed: looked at once for each mesh.

A layer draws its seed as a plain tensor, from the generator of its process. Replicas of a tensor are only the same, and
columns only belong to the same weight, if these generators agree. Where they do not, results would be wrong in silence.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from triptych.errors import ArgumentError
from triptych.sharding.exchange import gathered

_seen: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()


def check(mesh: DeviceMesh, seed: Any) -> None:
    """Raise ArgumentError unless a plain seed is the same on every process of the mesh. Every process must come here.

    Under torch.compile there are no values to look at.
    """
    if seed is None or isinstance(seed, DTensor) or torch.compiler.is_compiling() or _seen.get(id(mesh)) is mesh:
        return
    if seed.is_meta or torch._C._len_torch_dispatch_stack():
        return
    placements: list[Placement] = [Shard(0)] * mesh.ndim
    seeds = gathered(DTensor.from_local(seed, mesh, placements, run_check=False))
    if bool((seeds != seeds[0]).any()):
        raise ArgumentError(
            f"The ranks of {mesh} have drawn different seeds, {seeds.tolist()}, for the noise of one layer: replicas "
            f"would differ, and shards not be parts of one layer. Call torch.manual_seed with one value on all ranks "
            f"of this mesh (and with another one for each data-parallel replica), and draw the same random numbers on "
            f"all of them since."
        )
    _seen[id(mesh)] = mesh
