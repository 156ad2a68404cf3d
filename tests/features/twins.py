"""A model that ranks train together beside its twin, which every rank trains alone on the batches of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from ranks import Rank
from subjects import BACKENDS, DETERMINISTIC, SUBJECTS, assert_close, batch, build, counts, step
from torch import Tensor, nn

from triptych.analog import named_analog_layers
from triptych.scope import process_policy

ROWS = 2
"""Of each rank's part of a microbatch."""

EACH_OP = ("rms_norm", "add_rms_norm", "analog_calibrating", "analog_clipped")
"""Subjects that run every op together."""


def pairs(*names: str, interpreted: tuple[str, ...] = EACH_OP) -> list[tuple[str, str]]:
    """Subjects, each on every backend; but on triton, whose interpreter takes seconds a step, only some of them."""
    chosen = names or DETERMINISTIC
    return [(name, each) for each in BACKENDS for name in chosen if each != "triton" or name in interpreted]


def made(rank: Rank, name: str, backend: str) -> nn.Sequential:
    """A subject's model: of two blocks, where they are not interpreted."""
    return build(name, rank.device, blocks=1 if _interpreted(rank, backend) else 2)


def _interpreted(rank: Rank, backend: str) -> bool:
    return backend == "triton" and rank.device == "cpu"


def full(tensor: Tensor) -> Tensor:
    """A tensor, whole: a DTensor is gathered."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def mean_over_ranks(value: Tensor) -> Tensor:
    total = value.detach().float().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def clean(name: str) -> str:
    """A Parameter's path without what wrappers put into it."""
    return name.replace("module.", "").replace("_checkpoint_wrapped_module.", "")


def train_alike(
    rank: Rank,
    backend: str,
    name: str,
    model: nn.Module,
    twin: nn.Module,
    steps: int = 3,
    micro: int = 1,
    collecting: Callable[[bool], AbstractContextManager[Any]] = lambda last: nullcontext(),
) -> None:
    """Train both with SGD for some steps; assert that losses, gradients and state are the same after each.

    The twin calibrates from whole batches, and is then given the ranks' bits, and their parts of the batch one by one:
    a value that lies between two levels of a converter would go one way here and the other there.

    Args:
        name: of the subject, every op of which the ranks' model must run on `backend` in some step, and nothing else.
        micro: how many microbatches make a step.
        collecting: for each microbatch, the block to run it in; told whether it is the step's last.
    """
    first, second = torch.optim.SGD(model.parameters(), 0.2), torch.optim.SGD(twin.parameters(), 0.2)
    ran: Counter[tuple[str, str, str]] = Counter()
    length = 2 if _interpreted(rank, backend) else 6
    for number in range(1 if _interpreted(rank, backend) else steps):
        parts = batch(rank.device, ROWS * rank.world * micro, length, number).chunk(micro)
        loss = expected = torch.zeros((), device=rank.device)
        with process_policy(backend):
            for place, part in enumerate(parts):
                before = counts()
                with collecting(place == micro - 1):
                    loss = loss + step(model, part.chunk(rank.world)[rank.number])
                ran += counts() - before
                expected = expected + _beside(model, twin, part, rank.world)
        for parameter in twin.parameters():
            if parameter.grad is not None:
                parameter.grad /= rank.world
        assert_close(mean_over_ranks(loss), expected, f"loss of step {number}")
        assert_gradients_alike(model, twin, f"in step {number}")
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        assert_state_alike(model, twin, f"after step {number}")
        twin.load_state_dict(state_of(model))
    ops, backends = {op for op, _, _ in ran}, {each for _, _, each in ran}
    assert ops >= set(SUBJECTS[name].ops) and backends == {backend}, f"ran {dict(ran)}"


def _beside(model: nn.Module, twin: nn.Module, part: Tensor, world: int) -> Tensor:
    """The twin's mean loss over the ranks' parts of a microbatch that the model has just done."""
    layers = [layer for _, layer in named_analog_layers(twin)]
    before = [layer.rpu_config for layer in layers]
    if any(each.pre_post.input_range.init_from_data > 0 for each in before):
        with torch.no_grad():
            twin(part)
    assert_state_alike(model, twin, "after forward")
    twin.load_state_dict(state_of(model))
    for layer, each in zip(layers, before, strict=True):
        layer.rpu_config = each.replaced("pre_post.input_range.init_from_data", 0)
    losses = [step(twin, mine) for mine in part.chunk(world)]
    for layer, each in zip(layers, before, strict=True):
        layer.rpu_config = each
    return torch.stack(losses).mean()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict, whole, by the paths that the model has without wrappers."""
    return {clean(name): full(each).clone() for name, each in model.state_dict().items()}


def assert_gradients_alike(model: nn.Module, twin: nn.Module, when: str = "") -> None:
    """Assert that both have the same gradients, for the same Parameters."""
    found = {clean(name): each.grad for name, each in model.named_parameters()}
    expected = {name: each.grad for name, each in twin.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        mine = found[name]
        assert (mine is None) == (gradient is None), f"gradient of {name} {when}"
        if mine is not None and gradient is not None:
            assert_close(full(mine), gradient, f"gradient of {name} {when}")


def assert_state_alike(model: nn.Module, twin: nn.Module, when: str = "") -> None:
    """Assert that the state_dicts are the same."""
    found = state_of(model)
    expected = twin.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.is_floating_point():
            assert_close(found[name], value, f"{name} {when}")
        else:
            assert torch.equal(found[name], value), f"{name} {when}: {found[name]}, expected {value}"


def assert_same_everywhere(tensors: Iterable[Tensor]) -> None:
    """Assert that every rank has the same bits."""
    for tensor in tensors:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.detach().contiguous())
        assert all(torch.equal(part, parts[0]) for part in parts), parts
