"""fully_shard: the model that ranks train in pieces is the one that a single process trains on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import Rank, Ranks
from subjects import (
    CONVERTERS,
    UNCALIBRATED,
    Analog,
    assert_close,
    batch,
    build,
    config,
    ran_on,
    step,
)
from torch import nn
from twins import (
    EACH_OP,
    assert_same_everywhere,
    assert_state_alike,
    full,
    made,
    mean_over_ranks,
    pairs,
    state_of,
    train_alike,
)

from triptych.analog import calibrate_input_ranges, named_analog_layers, synchronise_ranges
from triptych.scope import process_policy
from triptych.testing import under

NORMS_AND_RANGES = ("rms_norm", "add_rms_norm", "analog_calibrating")


def sharded(model: nn.Module, rank: Rank, shape: tuple[int, ...] = (), **how: Any) -> Any:
    """Each block by itself, and the root; over all ranks, or a mesh of a shape."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = shape or (rank.world,)
    mesh = init_device_mesh(rank.device.split(":")[0], shape, mesh_dim_names=("replicas", "pieces")[-len(shape) :])
    for block in model.children():
        fully_shard(block, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


# --- as in one process ------------------------------------------------------------------------------------------------


def train(rank: Rank, name: str, backend: str, **how: Any) -> None:
    model = sharded(made(rank, name, backend), rank, **how)
    train_alike(rank, backend, name, model, made(rank, name, backend))


@pytest.mark.feature("FSDP2")
@pytest.mark.parametrize(("name", "backend"), pairs())
def test_training(two_ranks: Ranks, name: str, backend: str) -> None:
    two_ranks(train, name, backend)


@pytest.mark.feature("FSDP2")
@pytest.mark.parametrize("name", EACH_OP)
@pytest.mark.parametrize("keep", [False, True])
def test_weights_that_stay_whole_after_forward(two_ranks: Ranks, name: str, keep: bool) -> None:
    two_ranks(train, name, "torch", reshard_after_forward=not keep)


@pytest.mark.feature("HSDP")
@pytest.mark.parametrize(("name", "backend"), pairs(*EACH_OP, interpreted=NORMS_AND_RANGES))
def test_training_in_replicas_of_pieces(four_ranks: Ranks, name: str, backend: str) -> None:
    four_ranks(train, name, backend, shape=(2, 2))


def accumulate(rank: Rank, name: str, backend: str) -> None:
    model = sharded(made(rank, name, backend), rank)

    @contextmanager
    def collecting(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)
        yield

    train_alike(rank, backend, name, model, made(rank, name, backend), micro=3, collecting=collecting)


@pytest.mark.feature("gradient accumulation")
@pytest.mark.parametrize(("name", "backend"), pairs(*EACH_OP, interpreted=("rms_norm", "add_rms_norm")))
def test_accumulated_gradients(two_ranks: Ranks, name: str, backend: str) -> None:
    two_ranks(accumulate, name, backend)


def copied(rank: Rank, name: str, backend: str) -> None:
    model = made(rank, name, backend)
    twin = copy.deepcopy(model)
    train_alike(rank, backend, name, sharded(copy.deepcopy(model), rank), twin, steps=2)


@pytest.mark.feature("FSDP2")
@pytest.mark.parametrize("name", EACH_OP)
def test_a_copy_of_a_model(two_ranks: Ranks, name: str) -> None:
    two_ranks(copied, name, "composite")


# --- models that begin without values ---------------------------------------------------------------------------------


def empty(rank: Rank, name: str, backend: str) -> Any:
    model = sharded(made(rank, name, backend).to("meta"), rank)
    model.to_empty(device=rank.device)
    return model


def broadcast_state(rank: Rank, name: str, backend: str) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model, twin = empty(rank, name, backend), made(rank, name, backend)
    with torch.no_grad():
        for module in twin.modules():
            if getattr(module, "input_range", None) is not None:
                module.input_range.mul_(1.5)  # type: ignore[union-attr,operator]
    state = twin.state_dict() if rank.number == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert_state_alike(model, twin, "after loading")
    train_alike(rank, backend, name, model, twin, steps=2)


@pytest.mark.feature("meta device and FSDP2")
@pytest.mark.parametrize(("name", "backend"), pairs(*EACH_OP, interpreted=NORMS_AND_RANGES))
def test_state_of_rank_0_in_a_model_from_the_meta_device(two_ranks: Ranks, name: str, backend: str) -> None:
    two_ranks(broadcast_state, name, backend)


def reset(rank: Rank, name: str, backend: str) -> None:
    model, twin = empty(rank, name, backend), made(rank, name, backend)
    for each in model.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()
    twin.load_state_dict({key: full(value) for key, value in model.state_dict().items()})
    for _, layer in named_analog_layers(twin):
        assert layer.input_range is not None and layer.input_range.tolist() == [3.0] * layer.tiles
        assert layer.input_range_update_idx is not None and not layer.input_range_update_idx.any()
    assert_same_everywhere(twin.state_dict().values())
    assert all(bool(each.isfinite().all()) for each in twin.parameters())
    train_alike(rank, backend, name, model, twin, steps=2)


@pytest.mark.feature("meta device and FSDP2")
@pytest.mark.parametrize("name", EACH_OP)
def test_reset_parameters_in_a_model_from_the_meta_device(two_ranks: Ranks, name: str) -> None:
    two_ranks(reset, name, "torch")


# --- mixed precision --------------------------------------------------------------------------------------------------


def mixed(rank: Rank, name: str, backend: str) -> None:
    """Beside masters in float32 whose copies in bfloat16 see each rank's part in turn."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(made(rank, name, backend), rank, mp_policy=policy)
    masters = made(rank, name, backend)
    first, second = torch.optim.SGD(model.parameters(), 0.2), torch.optim.SGD(masters.parameters(), 0.2)
    for number in range(3):
        x = batch(rank.device, rows=2 * rank.world, number=number)
        copies = copy.deepcopy(masters).bfloat16()
        with process_policy(backend):
            with ran_on(backend, name):
                loss = step(model, x.chunk(rank.world)[rank.number])
            assert loss.dtype == torch.bfloat16
            losses = []
            for part in x.bfloat16().chunk(rank.world):
                losses.append(step(copies, part).float())
                for master, each in zip(masters.parameters(), copies.parameters(), strict=True):
                    assert each.grad is not None
                    sofar = torch.zeros_like(master) if master.grad is None else master.grad
                    master.grad, each.grad = sofar + each.grad.float() / rank.world, None
        assert_close(mean_over_ranks(loss), sum(losses) / rank.world, "loss")
        for (path, mine), theirs in zip(model.named_parameters(), masters.parameters(), strict=True):
            assert mine.grad is not None and mine.grad.dtype == torch.float32 and theirs.grad is not None
            assert_close(full(mine.grad), theirs.grad, f"gradient of {path}")
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    assert_state_alike(model, masters)


@pytest.mark.feature("FSDP2 mixed precision")
@pytest.mark.parametrize(
    ("name", "backend"), pairs("rms_norm", "add_rms_norm", "analog", "analog_clipped", interpreted=NORMS_AND_RANGES)
)
def test_bfloat16_beside_float32_masters(two_ranks: Ranks, name: str, backend: str) -> None:
    two_ranks(mixed, name, backend)


def mixed_ranges(rank: Rank, backend: str, batches: int) -> None:
    """Of the first layer, whose inputs are known; its range has a float32 master that no rounding reaches."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings = config(CONVERTERS, {"pre_post.input_range.init_from_data": 100})
    model = sharded(nn.Sequential(Analog(settings)).to(rank.device), rank, mp_policy=policy)
    deviations = []
    for number in range(batches):
        x = batch(rank.device, rows=2 * rank.world, number=number).bfloat16()
        with process_policy(backend), ran_on(backend, "analog"):
            step(model, x.chunk(rank.world)[rank.number])
        deviations.append(torch.stack([part.double().std() for part in x.chunk(2, dim=-1)]))
    up = model[0].up
    assert up.input_range.dtype == torch.float32
    assert_close(full(up.input_range), 3 * torch.stack(deviations).mean(0), "input_range")
    assert up.input_range_update_idx.tolist() == [batches] * 2


@pytest.mark.feature("FSDP2 mixed precision")
def test_ranges_are_calibrated_in_their_masters(two_ranks: Ranks, backend: str) -> None:
    two_ranks(mixed_ranges, backend, batches=2 if backend == "triton" else 20)


# --- ranges set before training ---------------------------------------------------------------------------------------


def calibrate(rank: Rank, kind: str, wrap: str) -> None:
    """From the batches of both ranks, as one process does from all; and the ranges last."""
    parts = ({"pre_post.input_range.init_from_data": 5}, {"pre_post.input_range.fast_mode": kind == "Max"})
    model, twin = (nn.Sequential(Analog(config(CONVERTERS, *parts)), nn.Identity()).to(rank.device) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    if wrap == "fsdp":
        model = sharded(model, rank)
    else:
        devices = None if rank.device == "cpu" else [rank.device]
        model = nn.parallel.DistributedDataParallel(model, device_ids=devices)
    batches = [batch(rank.device, rows=1, number=number) * (1 + number) for number in range(4)]
    with process_policy("torch"):
        calibrate_input_ranges(model, kind, batches[rank.number :: rank.world], quantile=0.9)
        calibrate_input_ranges(twin, kind, batches, quantile=0.9)
        step(model, batch(rank.device))
    assert_state_alike(model, twin)
    assert_same_everywhere(state_of(model).values())
    up = twin[0].up
    assert up.input_range_update_idx.tolist() == [5, 5] and not (up.input_range == 3).any()  # type: ignore[union-attr]


@pytest.mark.feature("calibration across ranks")
@pytest.mark.parametrize("kind", ["MovingStd", "MovingQuantile", "CacheQuantile", "Max"])
@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
def test_calibrate_input_ranges(two_ranks: Ranks, kind: str, wrap: str) -> None:
    two_ranks(calibrate, kind, wrap)


def clip(rank: Rank, settings: dict[str, object]) -> None:
    """Clipped once a step, on whole matrices; a forward between two steps clips nothing."""
    model, twin = (nn.Sequential(Analog(config(CONVERTERS, UNCALIBRATED, settings))).to(rank.device) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    model = sharded(model, rank)
    optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (model, twin)]
    changed = 0
    for number in range(4):
        x = batch(rank.device, rows=2 * rank.world, number=number)
        with process_policy("composite"):
            step(model, x.chunk(rank.world)[rank.number])
            step(twin, x)
            if number % 2:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                changed += int((twin[0].up.weight.abs() == twin[0].up.weight.abs().max()).sum() > 1)  # type: ignore
        assert_state_alike(model, twin, f"after batch {number}")
    assert changed or settings["clip.type"] != "LayerGaussian", "nothing was clipped"


@pytest.mark.feature("clipping and FSDP2")
@pytest.mark.parametrize("kind", ["LayerGaussian", "LayerGaussianPerChannel", "LearnablePerChannel"])
def test_weights_are_clipped_once_a_step(two_ranks: Ranks, kind: str) -> None:
    two_ranks(clip, {"clip.type": kind, "clip.sigma": 1.0} if kind.startswith("Layer") else {"clip.type": kind})


# --- compiled ---------------------------------------------------------------------------------------------------------


def compiled(rank: Rank, wrap: str) -> None:
    """The collectives of calibration run inside one operator of the graph."""
    name, backend = "analog_calibrating", "torch"
    model, twin = build(name, rank.device), build(name, rank.device)
    if wrap == "fsdp":
        model = sharded(model, rank)
        for block in model.children():
            block.compile(backend="aot_eager")
    elif wrap == "ddp":
        devices = None if rank.device == "cpu" else [rank.device]
        model.compile(backend="aot_eager", fullgraph=True)
        model = nn.parallel.DistributedDataParallel(model, device_ids=devices)
    else:
        synchronise_ranges(model)
        model.compile(backend="aot_eager", fullgraph=True)
    for number in range(3):
        x = batch(rank.device, rows=2 * rank.world, number=number)
        with under(backend):
            model(x.chunk(rank.world)[rank.number]).square().mean().backward()
            twin(x)
        assert_state_alike(model, twin, f"after batch {number}")
    assert twin[0].up.input_range_update_idx.tolist() == [2, 2]


@pytest.mark.feature("calibration across ranks")
@pytest.mark.parametrize("wrap", ["fsdp", "ddp", "told"])
def test_compiled_layers_calibrate_together(two_ranks: Ranks, wrap: str) -> None:
    two_ranks(compiled, wrap)
