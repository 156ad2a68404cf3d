"""torch.distributed.pipelining: a model that is cut into stages keeps its operators whole and trains as before."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from ranks import Rank, Ranks
from subjects import SUBJECTS, assert_close, batch, build, counts, ran_on
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    pipeline,
)
from twins import pairs

from triptych.testing import under

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
MICRO = 4
WARNINGS = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning"
)  # PyTorch's own, where it copies what it traced


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def cut(model: nn.Module, x: Tensor) -> Any:
    """The model traced for one microbatch and cut before its second block."""
    return pipeline(model, (x,), split_spec={"1": SplitPoint.BEGINNING})


def triptych_nodes(stage: nn.Module) -> list[str]:
    """The names of Triptych's operators in the graphs of a stage and of the modules inside it."""
    graphs = [
        graph for module in stage.modules() if isinstance(graph := getattr(module, "graph", None), torch.fx.Graph)
    ]
    targets = [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return [target.split(".")[1] for target in targets if target.startswith("triptych.")]


# --- stages on ranks --------------------------------------------------------------------------------------------------


def stage_of(rank: Rank, model: nn.Sequential, x: Tensor, traced: bool) -> Any:
    """This rank's stage: of a traced model, or the rank's block as it is."""
    if traced:
        return cut(model, x).build_stage(rank.number, torch.device(rank.device))
    # Without output_args a stage learns what it returns by a training forward, on memory that nobody wrote.
    y = x.clone().requires_grad_()
    given = x if rank.number == 0 else y
    device = torch.device(rank.device)
    return PipelineStage(model[rank.number], rank.number, rank.world, device, input_args=(given,), output_args=(y,))


def train(rank: Rank, name: str, backend: str, schedule: str, traced: bool) -> None:
    model, twin = build(name, rank.device), build(name, rank.device)
    micro = 2 if backend == "triton" else MICRO
    length = 2 if backend == "triton" else 6
    stage = stage_of(rank, model, batch(rank.device, rows=2, length=length), traced)
    pipe = SCHEDULES[schedule](stage, micro, loss_fn=loss_of)
    first = torch.optim.SGD(stage.submod.parameters(), 0.2)
    second = torch.optim.SGD(twin.parameters(), 0.2)
    ran: Counter[tuple[str, str, str]] = Counter()
    for number in range(1 if backend == "triton" else 2):
        x, target = (batch(rank.device, 2 * micro, length, number=each) for each in (number, number + 10))
        losses: list[Tensor] = []
        with under(backend):
            before = counts()
            if rank.number == 0:
                pipe.step(x)
            else:
                pipe.step(target=target, losses=losses)
            ran += counts() - before
            expected = []
            for part, wanted in zip(x.chunk(micro), target.chunk(micro), strict=True):
                expected.append(loss_of(twin(part), wanted))
                expected[-1].backward()
            for parameter in twin.parameters():  # a schedule scales gradients, not losses
                if parameter.grad is not None:
                    parameter.grad /= micro
        if rank.number == 1:
            assert_close(torch.stack(losses).detach(), torch.stack(expected).detach(), "losses")
        mine = {each.removeprefix("_orig_mod."): value for each, value in stage.submod.named_parameters()}
        prefix = "" if traced else f"{rank.number}."
        theirs = {path: value for path, value in twin.named_parameters() if path.startswith(f"{rank.number}.")}
        assert {prefix + path for path in mine} == set(theirs)
        for path, value in mine.items():
            other = theirs[prefix + path]
            assert value.grad is not None and other.grad is not None, path
            assert_close(value.grad, other.grad, f"gradient of {path} in step {number}")
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        for path, value in mine.items():
            assert_close(value.detach(), theirs[prefix + path].detach(), path)
    buffers = dict(twin.named_buffers())
    for path, value in stage.submod.named_buffers():
        assert torch.equal(value, buffers[prefix + path]), path
    ops, backends = {op for op, _, _ in ran}, {each for _, _, each in ran}
    assert ops >= set(SUBJECTS[name].ops) and backends == {backend}, f"ran {dict(ran)}"


@WARNINGS
@pytest.mark.feature("pipelining")
@pytest.mark.parametrize(("name", "backend"), pairs())
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_train_like_the_model_in_one_piece(two_ranks: Ranks, name: str, backend: str, schedule: str) -> None:
    if backend == "triton" and schedule == "GPipe" and name.startswith("analog"):
        pytest.skip("its interpreter is slow; 1F1B runs it")
    two_ranks(train, name, backend, schedule, traced=True)


@pytest.mark.feature("pipelining by hand")
@pytest.mark.parametrize(("name", "backend"), pairs(interpreted=("rms_norm", "add_rms_norm")))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_made_by_hand(two_ranks: Ranks, name: str, backend: str, schedule: str) -> None:
    two_ranks(train, name, backend, schedule, traced=False)


# --- in one process ---------------------------------------------------------------------------------------------------


def in_turn(stages: list[Any], x: Tensor) -> Tensor:
    for stage in stages:
        x = stage(x)
    return x


def cut_in_one_process(name: str, device: str, x: Tensor) -> list[Any]:
    pipe = cut(build(name, device), x)
    return [pipe.get_stage_module(number) for number in range(pipe.num_stages)]


@WARNINGS
@pytest.mark.feature("pipelining")
@pytest.mark.parametrize(("name", "backend"), pairs(interpreted=("rms_norm", "add_rms_norm")))
def test_stages_hold_the_operators_whole_and_give_the_bits_of_the_unsplit_model(
    name: str, backend: str, device: str
) -> None:
    x = batch(device, rows=2)
    stages, model = cut_in_one_process(name, device, x), build(name, device)
    for stage in stages:
        assert set(triptych_nodes(stage)) >= set(SUBJECTS[name].ops)
    with under(backend), ran_on(backend, name):
        start, entry = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = model(start)
        expected.square().sum().backward()
        found = in_turn(stages, entry)
        found.square().sum().backward()
    assert torch.equal(found, expected) and entry.grad is not None and start.grad is not None
    assert torch.equal(entry.grad, start.grad)
    gradients = {path: each.grad for stage in stages for path, each in stage.named_parameters()}
    for path, each in model.named_parameters():
        mine = gradients.pop(path)
        assert each.grad is not None and mine is not None and torch.equal(mine, each.grad), path
    assert not gradients


@WARNINGS
@pytest.mark.feature("pipelining")
@pytest.mark.parametrize(("forward", "backward"), [("torch", "cuda"), ("composite", "torch"), ("cuda", "composite")])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_each_phase_on_its_own_backend(name: str, forward: str, backward: str, device: str) -> None:
    x = batch(device, rows=2)
    stages = cut_in_one_process(name, device, x)
    before = counts()
    with under(f"{forward};{name}.backward={backward}"):
        in_turn(stages, x).square().sum().backward()
    assert counts() - before == {(name, "forward", forward): 2, (name, "backward", backward): 2}


@WARNINGS
@pytest.mark.feature("pipelining")
@pytest.mark.parametrize("backend", ["composite", "torch", "cuda"])
def test_noise_is_drawn_anew_in_each_forward_and_is_that_of_the_seed(backend: str, device: str) -> None:
    name = "analog_noise"
    x = batch(device, rows=2)
    stages, model = cut_in_one_process(name, device, x), build(name, device)
    with under(backend), ran_on(backend, name):
        torch.manual_seed(3)
        first, second = in_turn(stages, x), in_turn(stages, x)
        torch.manual_seed(3)
        expected = model(x)
        expected.square().sum().backward()
        first.square().sum().backward()
    assert torch.equal(first, expected) and not torch.equal(first, second)
    gradients = {path: each.grad for stage in stages for path, each in stage.named_parameters()}
    for path, each in model.named_parameters():
        assert each.grad is not None and gradients[path] is not None
        assert torch.equal(gradients[path], each.grad), path  # type: ignore[arg-type]


@pytest.mark.feature("backward on a thread of its own")
@pytest.mark.parametrize(("name", "backend"), pairs(*SUBJECTS, interpreted=("rms_norm", "add_rms_norm")))
def test_backward_started_on_a_fresh_thread(name: str, backend: str, device: str) -> None:
    """Whose first kernel is ours: on a GPU the thread has no current context."""
    model, twin = build(name, device, blocks=1), build(name, device, blocks=1)
    x = batch(device, rows=2)
    dy = batch(device, rows=2, number=1)
    failures: list[BaseException] = []

    def run(y: Tensor) -> None:
        try:
            torch.autograd.backward(y, dy)
        except BaseException as error:
            failures.append(error)

    with under(backend), ran_on(backend, name):
        torch.manual_seed(0)
        thread = threading.Thread(target=run, args=(model(x),))
        thread.start()
        thread.join()
        torch.manual_seed(0)
        torch.autograd.backward(twin(x), dy)
    assert not failures, failures
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)
