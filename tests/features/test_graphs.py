"""CUDA graphs: a whole training step is captured and replayed, and a layer is captured by make_graphed_callables."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from subjects import DETERMINISTIC, SUBJECTS, assert_close, batch, build, counts, ran_on, step
from torch import Tensor, nn

from triptych.scope import process_policy

pytestmark = pytest.mark.gpu

STEPS = 3


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss = step(model, x)
    optimizer.step()
    return loss


def warmed(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Two steps on a side stream, as capture demands."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            training_step(model, optimizer, x)
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.feature("CUDA graph of a training step")
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_captured_training_step_is_the_eager_one(name: str, backend: str) -> None:
    eager, x = build(name, "cuda"), batch("cuda")
    captured = copy.deepcopy(eager)
    ours, theirs = optimizer_of(captured), optimizer_of(eager)
    with process_policy(backend):
        warmed(captured, ours, x)
        warmed(eager, theirs, x)
        graph = torch.cuda.CUDAGraph()
        with ran_on(backend, name), torch.cuda.graph(graph):
            loss = training_step(captured, ours, x)
    before = counts()
    for number in range(STEPS):
        x.copy_(batch("cuda", number=number + 1))
        graph.replay()
        with process_policy(backend):
            expected = training_step(eager, theirs, x)
        assert_close(loss, expected)
        for path, value in eager.state_dict().items():
            assert_close(captured.state_dict()[path].double(), value.double(), path)
    # Only the eager steps pass through dispatch: a replay launches what was captured.
    ran = counts() - before
    assert {each for _, _, each in ran} == {backend}
    forwards = {op: calls for (op, phase, _), calls in ran.items() if phase == "forward"}
    assert all(calls % STEPS == 0 for calls in forwards.values()), forwards


@pytest.mark.feature("CUDA graph of a training step")
def test_a_captured_step_draws_new_noise_at_each_replay(backend: str) -> None:
    name = "analog_noise"
    model, x = build(name, "cuda"), batch("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with process_policy(backend):
        warmed(model, optimizer, x)
        graph = torch.cuda.CUDAGraph()
        with ran_on(backend, name), torch.cuda.graph(graph):
            loss = training_step(model, optimizer, x)

    def replayed(seed: int) -> list[tuple[Tensor, ...]]:
        torch.cuda.manual_seed(seed)
        found = []
        for _ in range(STEPS):
            graph.replay()
            found.append((loss.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)))
        return found

    first, again, other = replayed(1), replayed(1), replayed(2)
    assert all(bool(torch.isfinite(each).all()) for results in first for each in results)
    for one, two in itertools.pairwise(first):
        assert not torch.equal(one[0], two[0])
    for one, two in zip(first, again, strict=True):
        assert all(torch.equal(mine, yours) for mine, yours in zip(one, two, strict=True))
    assert not torch.equal(first[0][0], other[0][0])


@pytest.mark.feature("make_graphed_callables")
@pytest.mark.parametrize("name", SUBJECTS)
def test_graphed_callables_train(name: str, backend: str) -> None:
    eager, x = build(name, "cuda"), batch("cuda").requires_grad_()
    captured = copy.deepcopy(eager)
    state = copy.deepcopy(eager.state_dict())
    with process_policy(backend), ran_on(backend, name):
        graphed: Any = torch.cuda.make_graphed_callables(captured, (x,))
    captured.load_state_dict(state)  # its warm-up calibrated
    before = counts()
    losses = []
    for number in range(STEPS):
        with torch.no_grad():
            x.copy_(batch("cuda", number=number + 1))
        x.grad = None
        captured.zero_grad()  # gradients lie where the graph writes them: they are replaced, not added to
        eager.zero_grad()
        losses.append(step(graphed, x))
        assert x.grad is not None and bool(torch.isfinite(x.grad).all())
        if SUBJECTS[name].random:
            continue
        gradient = x.grad.clone()
        x.grad = None
        with process_policy(backend):
            assert_close(losses[-1], step(eager, x))
        assert_close(gradient, x.grad)
        for (path, one), two in zip(captured.named_parameters(), eager.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None), path
            if one.grad is not None and two.grad is not None:
                assert_close(one.grad, two.grad, path)
    if SUBJECTS[name].random:
        assert counts() == before
        assert not any(torch.equal(one, two) for one, two in itertools.pairwise(losses))
