"""Bisections of simulated jobs of several ranks: which rank, in how many trials, and what is said about the others."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from simulated import RankedSite, Simulation, Site, fails_with, on_rank, sites

from triptych.bisect.present import lines
from triptych.bisect.verdicts import Answer, Report

CALLS = sites(layers=3, steps=5)
CULPRIT: Site = ("rms_norm", "backward", "blocks.1.norm", 10)
PARTNER: Site = ("add_rms_norm", "forward", "blocks.2.norm", 11)
SEARCH = math.ceil(math.log2(len(CALLS)))
AROUND = 2 + 2 + 1
"""Trials besides the search: the start, the fix of the call and of its phase, the capture."""


def found(report: Report) -> list[tuple[Site, tuple[int, ...]]]:
    return [((site.op, site.phase, site.layer or "", site.call or 0), site.ranks) for site in report.culprits]


@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (8, 5), (64, 0), (64, 37), (64, 63)])
def test_a_fault_on_one_rank_costs_one_trial_more_than_without_ranks(tmp_path: Path, ranks: int, rank: int) -> None:
    """The rank that failed is tried alone, which is the trial that blames, and then one other."""
    alone = Simulation(tmp_path / "one", fails_with(CULPRIT), CALLS).bisect()
    simulation = Simulation(
        tmp_path / "many", calls=CALLS, ranks=ranks, ranked_job=on_rank(CULPRIT, rank), stops_at=CULPRIT
    )
    report = simulation.bisect()
    assert report.verdict is Answer.ISOLATED
    assert found(report) == [(CULPRIT, (rank,))]
    (culprit,) = report.culprits
    assert (culprit.rank, culprit.alike, culprit.elsewhere, culprit.calls) == (rank, False, False, 1)
    assert report.trials <= alone.trials + 1
    assert report.trials == simulation.runs <= SEARCH + AROUND + 2
    blame = [each for each in report.evidence if each.purpose == "blame"]
    assert [(each.policy, each.rank) for each in blame] == [(f"torch;rms_norm.backward#10%{rank}=bad", rank)]
    # Every rank runs the workaround: what is equal on all of them stays equal.
    assert report.workaround == "bad;rms_norm.backward=torch"
    assert culprit.capture is not None
    assert culprit.capture.endswith(f"rms_norm.backward.10.rank{rank}")
    assert f"call 10 of rank {rank} on 'bad'" in "\n".join(lines(report))
    value = json.loads(json.dumps(report.to_json()))
    assert (value["culprits"][0]["rank"], value["culprits"][0]["ranks"]) == (rank, [rank])
    assert {each["rank"] for each in value["evidence"] if each["verdict"] == "fail"} == {rank}


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_fail_alike_are_every_rank(tmp_path: Path, ranks: int, first: int) -> None:
    """Which of them fails first is chance."""
    order = (*range(first, ranks), *range(first))
    alone = Simulation(tmp_path / "one", fails_with(CULPRIT), CALLS).bisect()
    report = Simulation(tmp_path / "many", calls=CALLS, ranks=ranks, ranked_job=on_rank(CULPRIT, *order)).bisect()
    assert found(report) == [(CULPRIT, tuple(range(ranks)))]
    (culprit,) = report.culprits
    assert (culprit.rank, culprit.alike, culprit.elsewhere, culprit.calls) == (None, True, False, ranks)
    assert report.trials <= alone.trials + 1
    assert "call 10 of every rank on 'bad'" in "\n".join(lines(report))
    note = "Every rank is at fault, not one: it fails where it is swapped in on rank 0 alone, and on another one alone."
    assert report.notes[0] == note
    # One rank alone is swapped in for the capture, so that no other one ends the job before it.
    (capture,) = [each for each in report.evidence if each.purpose == "capture"]
    assert capture.policy == "torch;rms_norm.backward#10%0=bad"
    assert culprit.capture is not None
    assert culprit.capture.endswith(".10.rank0")


def test_a_suspect_that_is_only_a_victim_costs_a_search_of_the_ranks(tmp_path: Path) -> None:
    """Rank 5 is at fault, and what it computes ends rank 2."""

    def job(ran: dict[RankedSite, str]) -> tuple[int, str] | None:
        return (2, "ValueError: loss is nan") if ran[(*CULPRIT, 5)] == "bad" else None

    report = Simulation(tmp_path, calls=CALLS, ranks=8, ranked_job=job).bisect()
    assert found(report) == [(CULPRIT, (5,))]
    assert report.trials <= SEARCH + AROUND + 2 + math.ceil(math.log2(8)) + 1


def test_a_hang_on_one_rank_is_found_by_where_the_ranks_stood(tmp_path: Path) -> None:
    """Nobody fails: the time is up. Rank 3 has made no call after the culprit."""
    after = CALLS[CALLS.index(CULPRIT) + 3]

    def job(ran: dict[RankedSite, str]) -> tuple[None, str] | None:
        return (None, "timeout") if ran[(*CULPRIT, 3)] == "bad" else None

    report = Simulation(
        tmp_path, calls=CALLS, ranks=4, ranked_job=job, fail_on=("timeout",), stops_at=after, stuck=(3, CULPRIT)
    ).bisect()
    assert found(report) == [(CULPRIT, (3,))]
    assert report.signature == "timeout"
    assert report.notes[0] == (
        "When the time was up, rank 3 was in rms_norm.backward call 10 in layer 'blocks.1.norm', or had just left it. "
        "Others had gone on to rank 0, 1, 2: add_rms_norm.forward call 12 in layer 'blocks.0.norm'."
    )
    assert report.trials <= SEARCH + AROUND + 2


def test_two_ranks_that_fail_only_together(tmp_path: Path) -> None:
    """The same call on two ranks of four, such as two halves of one reduction."""

    def job(ran: dict[RankedSite, str]) -> tuple[int, str] | None:
        return (0, "ValueError: x") if {ran[(*CULPRIT, 1)], ran[(*CULPRIT, 2)]} == {"bad"} else None

    report = Simulation(tmp_path, calls=CALLS, ranks=4, ranked_job=job).bisect()
    assert found(report) == [(CULPRIT, (1,)), (CULPRIT, (2,))]
    assert report.interaction
    assert [site.capture.rpartition(".")[2] for site in report.culprits if site.capture] == ["rank1", "rank2"]
    assert report.workaround == "bad;rms_norm.backward=torch"


def test_one_call_on_one_rank_and_another_on_another(tmp_path: Path) -> None:
    def job(ran: dict[RankedSite, str]) -> tuple[int, str] | None:
        return (1, "ValueError: x") if {ran[(*PARTNER, 0)], ran[(*CULPRIT, 1)]} == {"bad"} else None

    report = Simulation(tmp_path, calls=CALLS, ranks=2, ranked_job=job, replays={PARTNER[:2]: "differs"}).bisect()
    assert [((each.op, each.phase), each.ranks) for each in report.culprits] == [(PARTNER[:2], (0,))]
    assert [((each.op, each.phase), each.ranks) for each in report.victims] == [(CULPRIT[:2], (1,))]
    assert report.interaction


def test_what_every_rank_must_take_part_in_is_the_call_on_all_of_them(tmp_path: Path) -> None:
    def job(ran: dict[RankedSite, str]) -> tuple[int, str] | None:
        return (0, "ValueError: x") if {ran[(*CULPRIT, rank)] for rank in range(8)} == {"bad"} else None

    report = Simulation(tmp_path, calls=CALLS, ranks=8, ranked_job=job).bisect()
    assert found(report) == [(CULPRIT, tuple(range(8)))]
    assert report.culprits[0].alike is False
    assert "of rank 0, 1, 2, 3, 4, 5, 6, 7 on" in str(report.culprits[0])


def test_a_drift_on_one_rank_is_its_layer_on_that_rank(tmp_path: Path) -> None:
    layer = [site for site in sites() if site[:3] == CULPRIT[:3]]

    def job(ran: dict[RankedSite, str]) -> tuple[int, str] | None:
        return (1, "MemoryError: x") if sum(ran[(*site, 1)] == "bad" for site in layer) > 25 else None

    report = Simulation(tmp_path, calls=sites(), ranks=2, ranked_job=job).bisect()
    (culprit,) = report.culprits
    assert (culprit.layer, culprit.call, culprit.rank, culprit.calls) == (CULPRIT[2], None, 1, len(layer))


def test_a_policy_that_differs_on_one_rank_only(tmp_path: Path) -> None:
    """There is nothing to swap on the others, and no rank that does not exist is named."""
    simulation = Simulation(tmp_path, calls=CALLS, ranks=4, ranked_job=on_rank(CULPRIT, 2))
    report = simulation.bisect(bad="torch;%2=bad")
    assert found(report) == [(CULPRIT, (2,))]
    assert report.culprits[0].rank == 2
    named = {text.partition("=")[0] for each in report.evidence for text in each.policy.split("%")[1:]}
    assert named == {"2"}


def test_a_good_policy_that_fails_says_on_which_rank(tmp_path: Path) -> None:
    report = Simulation(tmp_path, calls=CALLS, ranks=2, ranked_job=lambda ran: (1, "ValueError: b")).bisect()
    assert report.verdict is Answer.NOT_A_BACKEND
    assert report.notes[0].startswith("The good policy fails: rank 1: ValueError: b. The bad policy fails in the same")


def test_an_interrupted_bisection_remembers_the_rank(tmp_path: Path) -> None:
    whole = Simulation(tmp_path / "whole", calls=CALLS, ranks=8, ranked_job=on_rank(CULPRIT, 5)).bisect()
    simulation = Simulation(tmp_path / "parts", calls=CALLS, ranks=8, ranked_job=on_rank(CULPRIT, 5), interrupt_after=6)
    with pytest.raises(KeyboardInterrupt):
        simulation.bisect()
    simulation.interrupt_after = None
    report = simulation.bisect(resume=True)
    assert [(each.policy, each.rank) for each in report.evidence] == [
        (each.policy, each.rank) for each in whole.evidence
    ]
