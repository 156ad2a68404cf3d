"""Activation checkpointing: what is computed a second time for backward is what was computed first, noise included."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import Rank, Ranks
from subjects import SUBJECTS, batch, build, counts, ran_on
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from twins import pairs, train_alike

from triptych.scope import process_policy

INTERPRETED = ("rms_norm", "add_rms_norm", "analog_noise")


class Checkpointed(nn.Module):
    """A block, computed again in backward."""

    def __init__(self, block: nn.Module, **how: Any) -> None:
        super().__init__()
        self.block, self.how = block, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how.get("use_reentrant") and not x.requires_grad:
            x = x.detach().requires_grad_()  # that kind gives no gradients otherwise
        out: Tensor = checkpoint(self.block, x, **self.how)
        return out


def wrapped(model: nn.Sequential, **how: Any) -> nn.Sequential:
    return nn.Sequential(*(Checkpointed(block, **how) for block in model))


def gradients(model: nn.Module, x: Tensor, forwards: int = 1) -> list[Tensor]:
    """Output, gradients and ranges after one backward, drawn from one seed."""
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    outputs = torch.stack([model(x) for _ in range(forwards)])
    outputs.square().sum().backward()
    found = [outputs.detach(), x.grad, *(each.grad for each in model.parameters())]
    state = [each.detach() for each in model.state_dict().values()]
    return [each for each in (*found, *state) if each is not None]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert not bool(mine.isnan().any()) and torch.equal(mine, theirs)


def check(name: str, backend: str, device: str, model: Callable[[nn.Sequential], nn.Module]) -> None:
    blocks = 1 if backend == "triton" else 2
    x = batch(device, rows=2)
    with process_policy(backend), ran_on(backend, name):
        plain = gradients(build(name, device, blocks), x)
        again = gradients(model(build(name, device, blocks)), x)
    assert_same_bits(again, plain)


@pytest.mark.feature("activation checkpointing")
@pytest.mark.parametrize(("name", "backend"), pairs(*SUBJECTS, interpreted=INTERPRETED))
@pytest.mark.parametrize("reentrant", [False, True])
def test_both_kinds(name: str, backend: str, device: str, reentrant: bool) -> None:
    check(name, backend, device, partial(wrapped, use_reentrant=reentrant))


@pytest.mark.feature("activation checkpointing")
@pytest.mark.parametrize("reentrant", [False, True])
def test_other_noise_without_the_state_of_the_generator(device: str, reentrant: bool) -> None:
    """The user's choice; that it shows is what tells that the other tests can fail."""
    x = batch(device, rows=2)
    with process_policy("torch"), ran_on("torch", "analog_noise"):
        plain = gradients(build("analog_noise", device), x)
        again = gradients(wrapped(build("analog_noise", device), use_reentrant=reentrant, preserve_rng_state=False), x)
    assert torch.equal(again[0], plain[0])
    assert any(not torch.equal(mine, theirs) for mine, theirs in zip(again, plain, strict=True))


@pytest.mark.feature("activation checkpointing")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_batch_is_counted_once(device: str, reentrant: bool, backend: str) -> None:
    name = "analog_calibrating"
    if backend == "triton" and device == "cpu":
        pytest.skip("its interpreter takes too long, and calibration is the same on each backend")
    with process_policy(backend), ran_on(backend, name):
        model = wrapped(build(name, device), use_reentrant=reentrant)
        gradients(model, batch(device, rows=2))
        assert model[0].block.up.input_range_update_idx.tolist() == [1, 1]  # type: ignore[union-attr]


# --- selective checkpointing ------------------------------------------------------------------------------------------


def keep_ours(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    ours = op.namespace == "triptych"
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.feature("selective checkpointing")
@pytest.mark.parametrize(("name", "backend"), pairs(*SUBJECTS, interpreted=INTERPRETED))
def test_our_operators_in_the_list_of_what_is_saved(name: str, backend: str, device: str) -> None:
    contexts = partial(create_selective_checkpoint_contexts, keep_ours)
    check(name, backend, device, partial(wrapped, use_reentrant=False, context_fn=contexts))


@pytest.mark.feature("selective checkpointing")
@pytest.mark.parametrize("saved", [False, True])
def test_what_is_saved_is_not_run_again(device: str, saved: bool) -> None:
    ours = [torch.ops.triptych.rms_norm.default] if saved else [torch.ops.aten.mm.default]
    model = wrapped(
        build("rms_norm", device),
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, ours),
    )
    before = counts()
    with process_policy("torch"):
        gradients(model, batch(device))
    ran = counts() - before
    assert ran == {("rms_norm", "forward", "torch"): 2 if saved else 4, ("rms_norm", "backward", "torch"): 2}


# --- wrappers, hooks, sharding ----------------------------------------------------------------------------------------


def with_wrappers(model: nn.Sequential) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda module: module in list(model))
    return model


@pytest.mark.feature("activation checkpointing")
@pytest.mark.parametrize(("name", "backend"), pairs(*SUBJECTS, interpreted=("rms_norm",)))
def test_wrapped_blocks(name: str, backend: str, device: str) -> None:
    check(name, backend, device, with_wrappers)


class Offloaded(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            out: Tensor = self.model(x)
        return out


@pytest.mark.feature("saved tensors in main memory")
@pytest.mark.parametrize(("name", "backend"), pairs(*SUBJECTS, interpreted=INTERPRETED))
def test_offloaded_activations(name: str, backend: str, device: str) -> None:
    check(name, backend, device, Offloaded)


def shard(rank: Rank, name: str, backend: str, reentrant: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    model = wrapped(build(name, rank.device), use_reentrant=reentrant)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    twin = wrapped(build(name, rank.device), use_reentrant=reentrant)
    train_alike(rank, backend, name, model, twin, steps=3)


@pytest.mark.feature("activation checkpointing and FSDP2")
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "analog_calibrating", "analog_clipped"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_of_a_sharded_model(two_ranks: Ranks, name: str, reentrant: bool) -> None:
    two_ranks(shard, name, "torch", reentrant)
