"""DistributedDataParallel: the replicas that ranks train are the model that one process trains on the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, Ranks, RanksFailed
from subjects import (
    CALIBRATED,
    CONVERTERS,
    Analog,
    assert_close,
    batch,
    build,
    config,
    ran_on,
    step,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from twins import EACH_OP, assert_same_everywhere, full, made, pairs, train_alike

from triptych.analog import AnalogLinear, convert_to_analog, named_analog_layers, synchronise_ranges
from triptych.errors import UsageError
from triptych.scope import process_policy


def replicated(model: nn.Module, rank: Rank, **how: Any) -> DistributedDataParallel:
    devices = None if rank.device == "cpu" else [rank.device]
    return DistributedDataParallel(model, device_ids=devices, **how)


def train(rank: Rank, name: str, backend: str, **how: Any) -> None:
    model = replicated(made(rank, name, backend), rank, **how)
    train_alike(rank, backend, name, model, made(rank, name, backend))
    assert_same_everywhere(model.module.state_dict().values())


@pytest.mark.feature("DDP")
@pytest.mark.parametrize(("name", "backend"), pairs())
def test_training(sharing_ranks: Ranks, name: str, backend: str) -> None:
    sharing_ranks(train, name, backend)


@pytest.mark.feature("DDP")
@pytest.mark.parametrize("name", EACH_OP)
@pytest.mark.parametrize(
    "how",
    [
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
        {"bucket_cap_mb": 0.001},
    ],
    ids=str,
)
def test_options(sharing_ranks: Ranks, name: str, how: dict[str, Any]) -> None:
    sharing_ranks(train, name, "torch", **how)


def accumulate(rank: Rank, name: str, backend: str) -> None:
    model = replicated(made(rank, name, backend), rank)

    @contextmanager
    def collecting(last: bool) -> Iterator[None]:
        if last:
            yield
        else:
            with model.no_sync():
                yield

    train_alike(rank, backend, name, model, made(rank, name, backend), micro=3, collecting=collecting)


@pytest.mark.feature("gradient accumulation")
@pytest.mark.parametrize(("name", "backend"), pairs(*EACH_OP, interpreted=("rms_norm", "add_rms_norm")))
def test_accumulated_gradients(sharing_ranks: Ranks, name: str, backend: str) -> None:
    sharing_ranks(accumulate, name, backend)


# --- ranges -----------------------------------------------------------------------------------------------------------


FAST = {"pre_post.input_range.fast_mode": True, "pre_post.input_range.act_range_momentum": -1}


def extremes(rank: Rank, backend: str) -> None:
    """Those of all ranks, to the bit."""
    settings = config(CONVERTERS, FAST, {"pre_post.input_range.init_from_data": 2})
    model, twin = (nn.Sequential(Analog(settings)).to(rank.device) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    wrapped = replicated(model, rank)
    with process_policy(backend):
        for number in range(3):
            x = batch(rank.device, rows=2 * rank.world, number=number)
            with ran_on(backend, "analog"):
                wrapped(x.chunk(rank.world)[rank.number])
            twin(x)
    mine, theirs = model[0].up, twin[0].up
    for name in ("input_range", "x_min", "x_max", "input_range_update_idx"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    assert mine.input_range_update_idx.tolist() == [2, 2]


@pytest.mark.feature("calibration across ranks")
def test_fast_mode_follows_the_extremes_of_all_ranks(sharing_ranks: Ranks, backend: str) -> None:
    sharing_ranks(extremes, backend)


def convolve(rank: Rank, backend: str) -> None:
    settings = config(CONVERTERS, CALIBRATED, {"mapping.max_input_size": 5})
    model = convert_to_analog(nn.Sequential(nn.Conv1d(4, 6, 3, groups=2)), settings).to(rank.device)
    twin = convert_to_analog(nn.Sequential(nn.Conv1d(4, 6, 3, groups=2)), settings).to(rank.device)
    twin.load_state_dict(model.state_dict())
    wrapped = replicated(model, rank)
    with process_policy(backend):
        for number in range(2):
            x = torch.randn(2 * rank.world, 4, 9, generator=torch.Generator().manual_seed(number)).to(rank.device)
            x = x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=rank.device).view(4, 1)
            wrapped(x.chunk(rank.world)[rank.number])
            twin(x)
    assert_close(full(model[0].input_range), full(twin[0].input_range), "input_range")
    assert len(set(model[0].input_range.tolist())) == 4, "two groups of two tiles"


@pytest.mark.feature("calibration across ranks")
def test_every_group_of_a_convolution(sharing_ranks: Ranks, backend: str) -> None:
    sharing_ranks(convolve, backend)


def uneven(rank: Rank) -> None:
    """Rank 0 has nothing in one batch, then one row, then NaN; one tile has no information anywhere."""
    layer = AnalogLinear(6, 2, rpu_config=config({"pre_post.input_range.enable": True, "mapping.max_input_size": 2}))
    model = replicated(layer.to(rank.device), rank)
    generator = torch.Generator().manual_seed(3)
    seen = []
    for rows in (0, 1, 5):
        x = torch.randn(rows + 7, 6, generator=generator)
        x[:, 4:] = 1.25
        seen.append(x)
        with process_policy("torch"):
            model((x[:rows] if rank.number == 0 else x[rows:]).to(rank.device))
    bad = torch.randn(4, 6, generator=generator)
    bad[:, 4:] = 1.25
    if rank.number == 0:
        bad[2, 0] = float("nan")
    with process_policy("torch"):
        model(bad.to(rank.device))
    expected = torch.stack([torch.stack([3 * x[:, i : i + 2].double().std() for i in (0, 2)]) for x in seen])
    found = layer.input_range.detach().cpu()
    assert layer.input_range_update_idx.tolist() == [3, 4, 0]
    assert_close(found[0], expected[:, 0].mean(), "the tile with NaN in the last batch")
    assert found[2] == 3.0, "a tile without information keeps its range"
    assert_same_everywhere([layer.input_range, layer.input_range_update_idx])


@pytest.mark.feature("calibration across ranks")
def test_ranks_with_nothing_or_one_row_and_batches_that_do_not_count(sharing_ranks: Ranks) -> None:
    sharing_ranks(uneven)


def stop(rank: Rank) -> list[int]:
    """How often a layer gathers anything, forward by forward."""
    layer = AnalogLinear(4, 2, rpu_config=config(CALIBRATED, {"pre_post.input_range.enable": True})).to(rank.device)
    model = replicated(layer, rank)
    gathered: list[int] = []
    real = dist.all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        gathered[-1] += 1
        return real(*args, **kwargs)

    dist.all_gather = counted
    try:
        for number in range(6):
            gathered.append(0)
            if number == 4:
                layer.load_state_dict({**layer.state_dict(), "input_range_update_idx": torch.tensor([1])})
            with process_policy("composite"):
                step(model, torch.randn(3, 4, device=rank.device))  # type: ignore[arg-type]
    finally:
        dist.all_gather = real
    return gathered


@pytest.mark.feature("calibration across ranks")
def test_nothing_is_gathered_once_ranges_are_calibrated(sharing_ranks: Ranks) -> None:
    assert sharing_ranks(stop) == [[1, 1, 0, 0, 1, 0]] * 2


def by_hand(rank: Rank, backend: str, told: bool) -> list[float]:
    """Training without a wrapper: gradients are averaged by hand."""
    model, twin = (made(rank, "analog_calibrating", backend) for _ in range(2))
    if told:
        with torch.no_grad():
            for _, layer in named_analog_layers(model):
                assert layer.input_range is not None
                layer.input_range.add_(rank.number)  # rank 0's are taken
        synchronise_ranges(model)
    with process_policy(backend):
        for number in range(2):
            x = batch(rank.device, rows=2 * rank.world, number=number)
            with ran_on(backend, "analog_calibrating"):
                model(x.chunk(rank.world)[rank.number])
            twin(x)
    if told:
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert_close(full(mine), full(theirs), "a Parameter")
    found: list[float] = model[0].up.input_range.tolist()  # type: ignore[union-attr,operator]
    return found


@pytest.mark.feature("calibration across ranks")
def test_synchronise_ranges(sharing_ranks: Ranks, backend: str) -> None:
    first, second = sharing_ranks(by_hand, backend, told=True)
    assert first == second
    first, second = sharing_ranks(by_hand, backend, told=False)
    assert first != second, "nobody could know that these are copies of one model"


def disagree(rank: Rank) -> None:
    layer = AnalogLinear(4, 2, rpu_config=config(CALIBRATED, {"pre_post.input_range.enable": True}))
    model = replicated(layer.to(rank.device), rank)
    with torch.no_grad():
        layer.input_range.add_(rank.number)  # type: ignore[union-attr]
    model(torch.randn(3, 4, device=rank.device))


def test_ranks_that_start_from_different_ranges_are_told(sharing_ranks: Ranks) -> None:
    with pytest.raises(
        RanksFailed, match=r"(?s)rank 0:.*start from different ones.*rank 1:.*start from different ones"
    ):
        sharing_ranks(disagree)


def flattened(rank: Rank) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    settings = config(CALIBRATED, {"pre_post.input_range.enable": True})
    layers = nn.Sequential(AnalogLinear(4, 4, rpu_config=settings)).to(rank.device)
    model = FullyShardedDataParallel(layers, use_orig_params=True, device_id=torch.device(rank.device))
    try:
        model(torch.randn(3, 4, device=rank.device))
    except UsageError as error:
        return str(error)
    raise AssertionError("the ranges would have been lost")


@pytest.mark.feature("calibration across ranks")
def test_flattened_ranges_are_refused(sharing_ranks: Ranks) -> None:
    for text in sharing_ranks(flattened):
        assert text == (
            "AnalogLinear: it is to calibrate its input range in the first 2 batches of training, but "
            "FullyShardedDataParallel keeps the Parameter elsewhere, and what a forward writes into it is lost. Call "
            "triptych.analog.calibrate_input_ranges(model, ...) before the model is wrapped, or set "
            "pre_post.input_range.init_from_data to 0."
        )


# --- noise ------------------------------------------------------------------------------------------------------------


def draw(rank: Rank, apart: bool) -> list[list[float]]:
    torch.manual_seed(7 + rank.number if apart else 7)
    model = replicated(build("analog_noise", rank.device), rank)
    x = batch(rank.device)
    with process_policy("torch"), ran_on("torch", "analog_noise"):
        outputs = [model(x) for _ in range(2)]
        step(model, x)
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert_same_everywhere(gradients)
    return [each.detach().flatten().tolist() for each in outputs]


@pytest.mark.feature("DDP")
def test_ranks_draw_the_noise_of_their_generators(sharing_ranks: Ranks) -> None:
    first, second = sharing_ranks(draw, apart=False)
    assert first == second
    assert first[0] != first[1], "each forward draws anew"
    first, second = sharing_ranks(draw, apart=True)
    assert first[0] != second[0]
