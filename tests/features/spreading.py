"""Calls of ops on DTensors beside the same calls on whole tensors: what the tests of sharding rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import Rank, Ranks
from subjects import assert_close
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

REDUCE, GATHER = "all_reduce", "all_gather_into_tensor"
Places = tuple[Placement, ...]
"""For each dimension of a mesh."""
ROWS, SEQUENCE, COLUMNS, WHOLE = Shard(0), Shard(1), Shard(-1), Replicate()


REFUSING = ("test_what_cannot_be_right_is_refused", "test_ranks_that_draw_different_seeds_are_told")


@pytest.fixture(autouse=True)
def everything_ran_where_it_should(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test runs ops on all ranks on the backend that it is about (torch where it names none), and no other."""
    group: Ranks = request.getfixturevalue("two_ranks" if "two_ranks" in request.fixturenames else "four_ranks")
    expected = request.getfixturevalue("backend") if "backend" in request.fixturenames else "torch"
    if "without_a_rule" in request.node.name:
        expected = "composite"  # the only one that an op of another package has
    before = group.counts.copy()
    yield
    found = {backend for _, _, backend in group.counts - before}
    assert found == (set() if request.node.originalname in REFUSING else {expected})


def mesh_of(rank: Rank) -> DeviceMesh:
    return init_device_mesh("cpu" if rank.device == "cpu" else "cuda", (rank.world,))


def tensor(*shape: int, number: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(7 + number)
    return scale * torch.randn(*shape, generator=generator)


def spread(value: Tensor | None, mesh: DeviceMesh, placement: Placement | Places, device: str) -> Any:
    if value is None:
        return None
    places = placement if isinstance(placement, tuple) else (placement,)
    found = distribute_tensor(value.to(device), mesh, places, src_data_rank=None)
    return found.requires_grad_() if value.is_floating_point() else found


def leaf(value: Tensor | None, device: str) -> Tensor | None:
    """A leaf of its own: what is on the device already is not shared."""
    if value is None:
        return None
    copy = value.clone().to(device)
    return copy.requires_grad_() if value.is_floating_point() else copy


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _said(value: Any) -> str:
    return " ".join(str(each) for each in value.placements)


def whole(value: Any) -> Tensor:
    found: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return found.detach().cpu()


def compared(
    rank: Rank,
    function: Callable[..., Any],
    tensors: tuple[Tensor | None, ...],
    placed: tuple[Placement | Places, ...],
    mesh: DeviceMesh | None = None,
) -> tuple[dict[str, int], list[str], list[str]]:
    """Run an op on whole tensors and on spread ones, and assert that outputs and gradients agree.

    Returns:
        The collectives of forward and backward, and the placements of the outputs and of the gradients.
    """
    mesh = mesh_of(rank) if mesh is None else mesh
    plain = [leaf(value, rank.device) for value in tensors]
    parts = [spread(value, mesh, each, rank.device) for value, each in zip(tensors, placed, strict=True)]
    expected = as_tuple(function(*plain))
    with CommDebugMode() as comms:
        found = as_tuple(function(*parts))
        graded = [each for each in found if each.requires_grad]
        grads = [
            distribute_tensor(tensor(*each.shape, number=50 + i).to(rank.device), mesh, [WHOLE] * mesh.ndim)
            for i, each in enumerate(graded)
        ]
        if graded:
            torch.autograd.backward(graded, grads)
    collectives = {str(op).split(".")[-1]: number for op, number in comms.get_comm_counts().items()}
    collectives.pop("broadcast_", None)  # of distribute_tensor
    if graded:
        plain_graded = [each for each in expected if each.requires_grad]
        torch.autograd.backward(plain_graded, [grad.to_local() for grad in grads])
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_close(whole(one), whole(other), f"output {i}")
    gradients = [part.grad for part in parts if part is not None and part.requires_grad and part.grad is not None]
    for i, (part, each) in enumerate(zip(parts, plain, strict=True)):
        if part is not None and part.requires_grad and (part.grad is not None or each.grad is not None):
            assert_close(whole(part.grad), whole(each.grad), f"gradient {i}")
    return collectives, [_said(each) for each in found], [_said(each) for each in gradients]
