"""Rules with `%`: the rank that counts is the one of the moment of the call, in forward, backward and compiled code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from spies import ran

import triptych
from triptych import layers

RULES = "torch;rms_norm%1=composite;rms_norm.backward%2:=composite"
BACKENDS = {0: ("torch", "torch"), 1: ("composite", "composite"), 2: ("torch", "composite"), 5: ("torch", "composite")}
"""What forward and backward run on, by rank."""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """No process group is left behind."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def join(rank: int) -> None:
    """Be this rank of a group whose other members do not exist: collectives are faked."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)


def step(layer: torch.nn.Module) -> tuple[str, str]:
    """What one step runs on: forward and backward."""
    with ran() as seen:
        layer(torch.ones(2, 8, requires_grad=True)).sum().backward()
    found = {phase: backend for _, phase, backend in seen}
    return found["forward"], found["backward"]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_selection_made_before_the_process_group_is_not_kept(group: None, compiled: bool) -> None:
    layer: torch.nn.Module = layers.RMSNorm(8)
    with triptych.use(RULES):
        if compiled:
            torch._dynamo.reset()
            layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert [step(layer), step(layer)] == [BACKENDS[0]] * 2
        for rank in (1, 2, 0, 5):
            join(rank)
            assert step(layer) == BACKENDS[rank]
            dist.destroy_process_group()
        assert step(layer) == BACKENDS[0]


def test_the_launchers_rank_counts_until_there_is_a_group(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layers.RMSNorm(8)
    with triptych.use(RULES):
        monkeypatch.setenv("RANK", "1")
        assert step(layer) == BACKENDS[1]
        join(2)
        assert step(layer) == BACKENDS[2]


def test_other_groups_do_not_count(group: None) -> None:
    layer = layers.RMSNorm(8)
    join(5)
    mine = dist.new_group([4, 5])
    assert dist.get_rank(mine) == 1
    with triptych.use(RULES):
        assert step(layer) == BACKENDS[5]


@pytest.mark.parametrize("variable", ["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_variables_of_other_launchers_are_not_read(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(variable, "1")
    with triptych.use(RULES):
        assert step(layers.RMSNorm(8)) == BACKENDS[0]


def test_a_rank_that_does_not_exist_selects_nothing() -> None:
    with triptych.use("torch;%7=composite"):
        assert step(layers.RMSNorm(8)) == ("torch", "torch")
