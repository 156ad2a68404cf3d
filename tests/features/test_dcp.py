"""torch.distributed.checkpoint: what one layout of ranks has saved another loads, and trains on as if nothing was."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, Ranks
from subjects import CALIBRATED, CONVERTERS, Analog, assert_close, batch, build, config, ran_on, step
from torch import nn
from twins import EACH_OP, assert_same_everywhere, pairs, state_of

from triptych.scope import process_policy

FAST_AND_CLIPS = {
    "pre_post.input_range.fast_mode": True,
    "clip.type": "LearnablePerChannel",
}


def model_of(name: str, device: str, blocks: int) -> nn.Sequential:
    """A subject's model, or one with every tensor that an analog layer can have."""
    if name != "everything":
        return build(name, device, blocks)
    torch.manual_seed(1)
    return nn.Sequential(Analog(config(CONVERTERS, CALIBRATED, FAST_AND_CLIPS))).to(device)


def laid_out(model: nn.Module, rank: Rank, layout: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if layout == "alone":
        return model
    if layout == "ddp":
        devices = None if rank.device == "cpu" else [rank.device]
        return nn.parallel.DistributedDataParallel(model, device_ids=devices)
    shape = (rank.world,) if layout == "fsdp" else (2, rank.world // 2)
    mesh = init_device_mesh(rank.device.split(":")[0], shape, mesh_dim_names=("replicas", "pieces")[-len(shape) :])
    for block in model.children():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: Rank, world: int, numbers: range) -> list[float]:
    """On the whole batch by all ranks together; the losses."""
    losses = []
    for number in numbers:
        x = batch(rank.device, rows=4, number=number)
        loss = step(model, x.chunk(world)[rank.number % world])
        optimizer.step()
        optimizer.zero_grad()
        if world > 1:
            dist.all_reduce(loss)
            loss /= world
        losses.append(float(loss))
    return losses


def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def save(rank: Rank, name: str, backend: str, layout: str, folder: str, blocks: int) -> tuple[list[float], list[str]]:
    """Train, save, train on: the losses that others must have after loading."""
    import torch.distributed.checkpoint as dcp

    plain = model_of(name, rank.device, blocks)
    keys = list(plain.state_dict())
    model = laid_out(plain, rank, layout)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    world = 1 if layout == "alone" else rank.world
    with process_policy(backend), ran_on(backend, "analog_calibrating" if name == "everything" else name):
        train(model, optimizer, rank, world, range(1))
        state = parts(model, optimizer)
        assert list(state["model"]) == keys
        dcp.save(state, checkpoint_id=folder)
        losses = train(model, optimizer, rank, world, range(1, 3))
    return losses, keys


def load(rank: Rank, name: str, backend: str, layout: str, folder: str, blocks: int) -> list[float]:
    """Load into a model of other values, and train on."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    plain = model_of(name, rank.device, blocks)
    with torch.no_grad():
        for each in plain.state_dict().values():
            each.zero_()
    model = laid_out(plain, rank, layout)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    state = parts(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    world = 1 if layout == "alone" else rank.world
    with process_policy(backend):
        losses = train(model, optimizer, rank, world, range(1, 3))
    if layout == "ddp":
        assert_same_everywhere(model.module.state_dict().values())
    return losses


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="triptych-dcp-") as path:
        yield path


def assert_goes_on(losses: list[list[float]], expected: list[float]) -> None:
    """After a step of AdamW, which divides gradients by their own size, roundings of one summation order are 512."""
    for found in losses:
        assert_close(torch.tensor(found), torch.tensor(expected), "losses", factor=4)
    assert expected[0] != expected[1]


@pytest.mark.feature("distributed checkpoint")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
@pytest.mark.parametrize(("name", "backend"), pairs(*EACH_OP, "everything", interpreted=("rms_norm", "add_rms_norm")))
def test_from_two_ranks_to_replicas_and_to_one_process(two_ranks: Ranks, name: str, backend: str, folder: str) -> None:
    blocks = 1 if backend == "triton" else 2
    (expected, _), (again, _) = two_ranks(save, name, backend, "fsdp", folder, blocks)
    assert expected == again
    assert_goes_on(two_ranks(load, name, backend, "ddp", folder, blocks), expected)
    assert_goes_on(two_ranks(load, name, backend, "fsdp", folder, blocks), expected)
    assert_goes_on([load(Rank(0, 1, place(two_ranks)), name, backend, "alone", folder, blocks)], expected)


@pytest.mark.feature("distributed checkpoint")
@pytest.mark.parametrize("name", [*EACH_OP, "everything"])
@pytest.mark.parametrize("layouts", [("fsdp", "hsdp"), ("hsdp", "fsdp"), ("hsdp", "ddp")])
def test_between_layouts_of_four_ranks(four_ranks: Ranks, name: str, layouts: tuple[str, str], folder: str) -> None:
    (expected, _), *_ = four_ranks(save, name, "torch", layouts[0], folder, 1)
    assert_goes_on(four_ranks(load, name, "torch", layouts[1], folder, 1), expected)


@pytest.mark.feature("distributed checkpoint")
@pytest.mark.parametrize("name", [*EACH_OP, "everything"])
def test_from_two_ranks_to_four(two_ranks: Ranks, four_ranks: Ranks, name: str, folder: str) -> None:
    if place(two_ranks) != place(four_ranks):
        pytest.skip("another device")
    (expected, _), _ = two_ranks(save, name, "torch", "fsdp", folder, 1)
    assert_goes_on(four_ranks(load, name, "torch", "fsdp", folder, 1), expected)


def place(ranks: Ranks) -> str:
    """The device of rank 0."""
    return str(ranks(where)[0])


def where(rank: Rank) -> str:
    return rank.device


def whole(rank: Rank, name: str, folder: str) -> None:
    """The state_dict that rank 0 gathers has the tensors of the plain model, and so has what they are set from."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    plain = model_of(name, rank.device, 2)
    model = laid_out(model_of(name, rank.device, 2), rank, "fsdp")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if rank.number == 0:
        assert {key: (value.shape, value.dtype) for key, value in state.items()} == {
            key: (value.shape, value.dtype) for key, value in plain.state_dict().items()
        }
        plain.load_state_dict(state)
        state = {key: value * 3 if value.is_floating_point() else value + 3 for key, value in state.items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state if rank.number == 0 else {}, options=options)
    for key, value in state_of(model).items():
        before = plain.state_dict()[key]
        if rank.number == 0:
            assert torch.equal(value, before * 3 if value.is_floating_point() else before + 3), key
    with process_policy("torch"):
        assert bool(step(model, batch(rank.device)).isfinite())


@pytest.mark.feature("distributed checkpoint")
@pytest.mark.parametrize("name", [*EACH_OP, "everything"])
def test_whole_state_dicts(two_ranks: Ranks, name: str, folder: str) -> None:
    two_ranks(whole, name, folder)
