"""The groups of processes themselves: what a rank raises, dies of or waits for fails the test that asked for it."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, Ranks, RanksFailed
from subjects import batch, build, ran_on, step

from triptych.scope import process_policy


def add(rank: Rank, number: float) -> float:
    total = torch.full((1,), number * (rank.number + 1), device=rank.device)
    dist.all_reduce(total)
    return float(total)


def fail_on_one(rank: Rank) -> None:
    if rank.number == 1:
        raise ValueError("no")
    dist.barrier()


def die_on_one(rank: Rank) -> None:
    if rank.number == 1:
        os._exit(3)
    dist.barrier()


def train(rank: Rank, name: str, backend: str) -> float:
    with process_policy(backend), ran_on(backend, name):
        return float(step(build(name, rank.device), batch(rank.device)))


def test_results_come_by_rank_and_a_failed_call_does_not_spoil_the_next(sharing_ranks: Ranks) -> None:
    assert sharing_ranks(add, 2.0) == [6.0, 6.0]
    with pytest.raises(RanksFailed, match="ValueError: no"):
        sharing_ranks(fail_on_one)
    assert sharing_ranks(add, 1.0) == [3.0, 3.0]
    with pytest.raises(RanksFailed, match=r"rank 1:\n  it died: status 3"):
        sharing_ranks(die_on_one)
    assert sharing_ranks(add, 1.0) == [3.0, 3.0]


@pytest.mark.parametrize("name", ["rms_norm", "analog"])
def test_what_ran_on_the_ranks_is_counted(sharing_ranks: Ranks, name: str, backend: str) -> None:
    before = sharing_ranks.counts.copy()
    first, second = sharing_ranks(train, name, backend)
    assert first == second
    ran = sharing_ranks.counts - before
    assert {each for _, _, each in ran} == {backend}
