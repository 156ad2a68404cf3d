"""Models under parallelize_module: losses, gradients and steps are those of the whole model on one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import Rank, Ranks
from subjects import (
    CALIBRATED,
    CONVERTERS,
    GAUSSIAN,
    NOISE,
    UNCALIBRATED,
    WEIGHTS,
    WIDTH,
    Analog,
    assert_close,
    batch,
    config,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import triptych
from triptych import scope
from triptych.analog import AnalogLinear, calibrate_input_ranges
from triptych.layers import AddRMSNorm, RMSNorm
from triptych.scope import process_policy

CONFIGS = {
    "digital": config(),
    "uncalibrated": config(CONVERTERS, UNCALIBRATED),
    "calibrated": config(CONVERTERS, CALIBRATED, WEIGHTS),
    "extremes": config(CONVERTERS, CALIBRATED, {"pre_post.input_range.fast_mode": True}),
    "clipped": config(CONVERTERS, UNCALIBRATED, GAUSSIAN),
    "learned_clip": config(CONVERTERS, UNCALIBRATED, WEIGHTS, {"clip.type": "LearnablePerChannel"}),
    "noisy": config(CONVERTERS, UNCALIBRATED, WEIGHTS, NOISE),
}
EXACT = [kind for kind in CONFIGS if kind != "noisy"]


class Block(nn.Module):
    """A feed-forward block as torchtitan has them: norms in sequence parallel, the two layers column- and row-wise."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH, eps=1e-6)
        self.feed = Analog(settings)
        self.last = AddRMSNorm(WIDTH, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y, h = self.last(self.feed.down(torch.tanh(self.feed.up(h))), residual=x)
        out: Tensor = y + h
        return out


class TorchBlock(nn.Module):
    """The same of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.feed = nn.Module()
        self.feed.up, self.feed.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.last = nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.feed.down(torch.tanh(self.feed.up(self.norm(x)))) + x
        out: Tensor = self.last(h) + h
        return out


def made(kind: str) -> nn.Module:
    torch.manual_seed(1)
    model = TorchBlock() if kind == "torch" else Block(CONFIGS[kind])
    for path, parameter in model.named_parameters():
        if "norm" in path or "last" in path:
            nn.init.normal_(parameter, 1.0, 0.1)
    triptych.name_layers(model)
    return model


def parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Activations are sharded along the sequence between the layers, and at both ends of the block."""
    norm = SequenceParallel(use_local_output=False)  # it passes the first argument on alone: the residual has a name
    plan = {
        "norm": norm,
        "feed.up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "feed.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "last": norm,
    }
    return parallelize_module(model, mesh, plan)


def replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """All Parameters and buffers whole on every rank: activations alone are sharded."""
    for module in model.modules():
        if not list(module.children()):
            distribute_module(module, mesh)
    return model


def mesh_of(rank: Rank) -> DeviceMesh:
    return init_device_mesh("cpu" if rank.device == "cpu" else "cuda", (rank.world,))


def part_of(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sequence, a part on each rank."""
    return distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None)


def step(model: nn.Module, x: Any) -> Tensor:
    loss = model(x).square().mean()
    torch.autograd.backward(loss)
    return loss


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()


def assert_same_gradients(sharded: nn.Module, plain: nn.Module, when: str) -> None:
    for (path, one), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), path
        if one.grad is not None and other.grad is not None:
            assert_close(full(one.grad), full(other.grad), f"{when}: gradient of {path}")


def assert_same_state(sharded: nn.Module, plain: nn.Module, when: str) -> None:
    for (path, one), other in zip(sharded.state_dict().items(), plain.state_dict().values(), strict=True):
        assert_close(full(one).double(), full(other).double(), f"{when}: {path}")


def train(rank: Rank, backend: str, kind: str, spread: str = "parallel", steps: int = 2) -> Any:
    """Steps of the whole model and of the sharded one, compared; what the last sharded one sent, and where all is."""
    mesh = mesh_of(rank)
    plain = made(kind).to(rank.device)
    sharded = {"parallel": parallel, "replicated": replicated}[spread](copy.deepcopy(plain), mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (plain, sharded)]
    sent: dict[str, int] = {}
    with process_policy(backend):
        for number in range(steps):
            x = batch(rank.device, number=number)
            expected = step(plain, x)
            with CommDebugMode() as comms:
                found = step(sharded, part_of(x, mesh))
            sent = {str(op).split(".")[-1]: times for op, times in comms.get_comm_counts().items()}
            assert_close(full(found), full(expected), f"loss {number}")
            assert_same_gradients(sharded, plain, f"step {number}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_state(sharded, plain, f"after step {number}")
    return sent, {path: str(each.placements[0]) for path, each in sharded.state_dict().items()}


def ran(group: Ranks, before: Any, backend: str) -> set[str]:
    """The ops that ran since; on no other backend."""
    found = group.counts - before
    assert {each for _, _, each in found} == {backend}
    return {op for op, _, _ in found}


@pytest.mark.feature("tensor parallel")
@pytest.mark.parametrize("kind", EXACT)
def test_steps_of_a_parallel_block_are_those_of_the_whole(two_ranks: Ranks, kind: str) -> None:
    before = two_ranks.counts.copy()
    expected = two_ranks(train, "torch", "torch")[0][0]
    for sent, places in two_ranks(train, "torch", kind):
        # Beyond torch's: the maxima [T] over the channels of both ranks, where the ADC is relative to them. A learned
        # range sums the gradient of the inputs where it needs it, and not where the layer before would ask for it.
        more = 0 if kind in ("digital", "learned_clip") else 1
        assert sum(sent.values()) == sum(expected.values()) + more, (sent, expected)
        if kind == "digital":
            assert sent == expected
        else:
            assert (places["feed.up.input_range"], places["feed.down.input_range"]) == ("R", "S(0)")
        if kind == "learned_clip":
            clips = [places[f"feed.{name}.learnable_weight_clip"] for name in ("up", "down")]
            assert clips == ["S(1)", "S(0)"]
    ops = ran(two_ranks, before, "torch")
    assert {"rms_norm", "add_rms_norm", "analog_linear"} <= ops
    assert ("input_range_update" in ops) == (kind in ("calibrated", "extremes"))
    assert ("analog_weight" in ops) == (kind in ("calibrated", "learned_clip"))


@pytest.mark.feature("tensor parallel")
@pytest.mark.parametrize("spread", ["parallel", "replicated"])
def test_parallel_blocks_on_every_backend(two_ranks: Ranks, backend: str, spread: str) -> None:
    before = two_ranks.counts.copy()
    two_ranks(train, backend, "calibrated", spread, steps=1)
    assert {"rms_norm", "add_rms_norm", "analog_linear", "analog_weight"} <= ran(two_ranks, before, backend)


@pytest.mark.feature("tensor parallel")
@pytest.mark.parametrize("kind", ["extremes", "learned_clip"])
def test_steps_of_a_block_on_a_sharded_sequence(two_ranks: Ranks, kind: str) -> None:
    """Nothing is gathered: sums of gradients aside, a few numbers a tile are exchanged."""
    for sent, _ in two_ranks(train, "torch", kind, "replicated"):
        assert set(sent) <= {"all_reduce", "all_gather_into_tensor"}
        # The loss; in each analog layer a learned range's decay, a learned clip's sum of gradients, or two extremes.
        assert sum(sent.values()) <= 5


# --- noise ------------------------------------------------------------------------------------------------------------


def noisy(rank: Rank, backend: str) -> None:
    """With noise on weights and outputs, recomputation in backward draws it again: gradients are the same, bit for bit."""
    mesh = mesh_of(rank)
    model = parallel(made("noisy").to(rank.device), mesh)
    x = part_of(batch(rank.device), mesh)
    found = []
    with process_policy(backend):
        for recomputes in (False, True):
            torch.manual_seed(3)
            y = checkpoint(model, x, use_reentrant=False) if recomputes else model(x)
            torch.autograd.backward(y.square().mean())
            found.append([full(each.grad) for each in model.parameters() if each.grad is not None])
            model.zero_grad()
            if not recomputes:
                other = full(model(x))
                assert not torch.equal(full(y), other), "no noise"
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
    assert len(found[0]) == 8


@pytest.mark.feature("tensor parallel")
def test_noise_is_the_same_when_it_is_recomputed(two_ranks: Ranks, backend: str) -> None:
    before = two_ranks.counts.copy()
    two_ranks(noisy, backend)
    assert {"analog_weight", "analog_linear"} <= ran(two_ranks, before, backend)


# --- compiled ---------------------------------------------------------------------------------------------------------


def compiled(rank: Rank, kind: str) -> None:
    mesh = mesh_of(rank)
    plain = made(kind).to(rank.device)
    sharded = parallel(copy.deepcopy(plain), mesh)
    fast = torch.compile(sharded, fullgraph=True, backend="aot_eager")
    with scope.process_policy("torch"):
        for number in range(2):
            x = batch(rank.device, number=number)
            assert_close(full(step(fast, part_of(x, mesh))), full(step(plain, x)), f"loss {number}")
            assert_same_gradients(sharded, plain, f"batch {number}")
    assert_same_state(sharded, plain, "at the end")


@pytest.mark.feature("tensor parallel, compiled")
@pytest.mark.parametrize("kind", ["digital", "calibrated", "extremes", "learned_clip"])
def test_a_compiled_parallel_block(two_ranks: Ranks, kind: str) -> None:
    before = two_ranks.counts.copy()
    two_ranks(compiled, kind)
    assert {"rms_norm", "add_rms_norm", "analog_linear"} <= ran(two_ranks, before, "torch")


# --- refused ----------------------------------------------------------------------------------------------------------


def cut(rank: Rank) -> str:
    layer = AnalogLinear(48, 16, rpu_config=config(CONVERTERS, UNCALIBRATED)).to(rank.device)  # three tiles of 16
    triptych.name_layers(layer)
    parallelize_module(layer, mesh_of(rank), RowwiseParallel())
    with process_policy("torch"), pytest.raises(triptych.ArgumentError) as raised:
        layer(torch.ones(4, 24, device=rank.device))
    return str(raised.value)


@pytest.mark.feature("tensor parallel")
def test_tiles_are_not_cut(two_ranks: Ranks) -> None:
    for text in two_ranks(cut):
        assert (
            "is sharded along its 48 inputs over 2 ranks, 24 + 24, and the inputs are split into 3 tiles of 16" in text
        )
        assert "choose mapping.max_input_size 12" in text


# --- calibration from data ----------------------------------------------------------------------------------------------


def calibrated_from_data(rank: Rank, kind: str) -> None:
    """calibrate_input_ranges sets the ranges of a sharded model to those of the whole one."""
    mesh = mesh_of(rank)
    plain = made(kind).to(rank.device)
    sharded = parallel(copy.deepcopy(plain), mesh)
    batches = [batch(rank.device, number=number) for number in range(2)]
    with process_policy("torch"):
        calibrate_input_ranges(plain, "Max", [(x,) for x in batches])
        calibrate_input_ranges(sharded, "Max", [(part_of(x, mesh),) for x in batches])
    assert_same_state(sharded, plain, "calibrated")
    assert float(full(plain.feed.up.input_range)[0]) != 3.0  # type: ignore[operator, union-attr, arg-type, index]


@pytest.mark.feature("tensor parallel")
@pytest.mark.parametrize("kind", ["uncalibrated", "extremes"])
def test_a_sharded_model_is_calibrated_from_data(two_ranks: Ranks, kind: str) -> None:
    before = two_ranks.counts.copy()
    two_ranks(calibrated_from_data, kind)
    assert "analog_linear" in ran(two_ranks, before, "torch")
