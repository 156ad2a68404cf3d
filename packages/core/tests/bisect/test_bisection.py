"""The course of a bisection on simulated jobs: verdicts, confirmation, workaround, trial counts, resuming."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from simulated import Simulation, Site, fails_with, sites

from triptych import registry
from triptych.bisect.present import lines
from triptych.bisect.rate import PROOF_RUNS, repeats_for
from triptych.bisect.verdicts import Answer

CULPRIT: Site = ("rms_norm", "backward", "blocks.1.norm", 100)
PARTNER: Site = ("add_rms_norm", "forward", "blocks.2.norm", 101)


def found(report) -> list[tuple[str, str, str | None, int | None]]:  # type: ignore[no-untyped-def]
    return [(site.op, site.phase, site.layer, site.call) for site in report.culprits]


@pytest.mark.parametrize("stops", [True, False])
def test_one_culprit_among_thousands_of_calls(tmp_path: Path, stops: bool) -> None:
    calls = sites(layers=5, steps=200)
    assert len(calls) == 4000
    generator = random.Random(3)
    for number, culprit in enumerate(generator.sample(calls, 5)):
        folder = tmp_path / str(number)
        simulation = Simulation(folder, fails_with(culprit), calls, stops_at=culprit if stops else None)
        report = simulation.bisect()
        assert report.verdict is Answer.ISOLATED
        assert found(report) == [culprit]
        assert report.trials == simulation.runs <= math.ceil(math.log2(len(calls))) + 6
        assert report.workaround == f"bad;{culprit[0]}.{culprit[1]}=torch"
        assert {each.purpose for each in report.evidence} == {"good", "bad", "search", "blame", "fix", "capture"}


def test_the_report_of_one_culprit(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, fails_with(CULPRIT), replays={CULPRIT[:2]: "differs"})
    report = simulation.bisect()
    value = json.loads(json.dumps(report.to_json()))
    capture = f"{tmp_path}/state/trials/{report.trials:03d}/capture/rms_norm.backward.100"
    assert value["schema"] == 1
    assert value["verdict"] == "isolated"
    assert value["culprits"] == [
        {
            "op": "rms_norm", "phase": "backward", "layer": "blocks.1.norm", "call": 100, "calls": 1, "backend": "bad",
            "elsewhere": False, "capture": capture, "replay": "differs", "rank": None, "ranks": [], "alike": None,
        }
    ]  # fmt: skip
    assert value["victims"] == value["suspects"] == []
    assert value["workaround"] == "bad;rms_norm.backward=torch"
    assert value["capture"] == capture
    assert value["signature"] == "ValueError: loss is nan"
    assert value["trials"] == len(value["evidence"]) == report.trials
    assert value["seconds"] == 0.5 * report.trials
    blame = [each for each in value["evidence"] if each["purpose"] == "blame"]
    assert blame[0]["policy"] == "torch;rms_norm.backward#100=bad"
    assert blame[0]["verdict"] == "fail"
    assert lines(report) == [
        "Verdict: isolated: the fault is found",
        "Failure: ValueError: loss is nan",
        "Culprit: rms_norm.backward in layer 'blocks.1.norm' call 100 on 'bad'; run alone it differs from the reference",
        "Workaround, proved to pass:",
        '  TRIPTYCH_BACKEND="bad;rms_norm.backward=torch" job',
        "The captured call, alone:",
        f"  triptych replay {capture}",
        f"{report.trials} trials in {report.seconds:.1f} s; everything they left is in {tmp_path}/state",
    ]


def test_a_call_among_many_that_fail_is_the_first_and_says_so(tmp_path: Path) -> None:
    every = [site for site in sites() if site[:3] == CULPRIT[:3]]

    def job(ran: dict[Site, str]) -> str | None:
        return "ValueError: x" if any(ran[site] == "bad" for site in every) else None

    report = Simulation(tmp_path, job).bisect()
    assert found(report) == [every[0]]
    assert report.culprits[0].elsewhere is True
    assert report.workaround == "bad;rms_norm.backward=torch"
    assert "rms_norm.backward fails at other calls too; this is the first that fails alone." in report.notes


def test_two_that_are_right_alone_and_wrong_together(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, fails_with(CULPRIT, PARTNER))
    report = simulation.bisect()
    assert report.verdict is Answer.ISOLATED
    assert sorted(found(report)) == sorted([CULPRIT, PARTNER])
    assert report.interaction
    assert not report.victims
    together = "They fail only together; swapping one of them out is enough. Each is right when it is run alone."
    assert report.notes == (together,)
    assert report.workaround == "bad;add_rms_norm.forward=torch"
    assert report.trials <= 2 * math.ceil(math.log2(len(sites()))) + 14


def test_the_member_that_is_right_on_its_inputs_is_the_victim(tmp_path: Path) -> None:
    replays = {CULPRIT[:2]: "agrees", PARTNER[:2]: "differs"}
    report = Simulation(tmp_path, fails_with(CULPRIT, PARTNER), replays=replays).bisect()
    assert found(report) == [PARTNER]
    assert [(site.op, site.phase) for site in report.victims] == [CULPRIT[:2]]
    assert report.interaction


def test_two_separate_faults_with_one_signature_are_both_found(tmp_path: Path) -> None:
    def job(ran: dict[Site, str]) -> str | None:
        return "ValueError: x" if "bad" in (ran[CULPRIT], ran[PARTNER]) else None

    report = Simulation(tmp_path, job, stops_at=PARTNER).bisect()
    assert sorted(found(report)) == sorted([CULPRIT, PARTNER])
    assert not report.interaction
    assert report.workaround == "bad;add_rms_norm.forward=torch;rms_norm.backward=torch"
    fix = [each for each in report.evidence if each.policy == report.workaround]
    assert [each.verdict for each in fix] == ["pass"]


def test_another_fault_behind_the_first_leaves_no_workaround(tmp_path: Path) -> None:
    def job(ran: dict[Site, str]) -> str | None:
        if ran[CULPRIT] == "bad":
            return "ValueError: x"
        return "KeyError: y" if ran[("add_rms_norm", "forward", "blocks.0.norm", 147)] == "bad" else None

    report = Simulation(tmp_path, job, stops_at=CULPRIT).bisect()
    assert report.verdict is Answer.ISOLATED
    assert found(report) == [CULPRIT]
    assert report.workaround is None
    assert (
        "With the culprits swapped out the command does not pass: other failure, KeyError: y. That is another fault; "
        "no workaround is proved."
    ) in report.notes


def test_a_failure_that_needs_half_the_calls_of_a_layer_is_the_layer(tmp_path: Path) -> None:
    layer = [site for site in sites() if site[:3] == CULPRIT[:3]]

    def job(ran: dict[Site, str]) -> str | None:
        return "MemoryError" if sum(ran[site] == "bad" for site in layer) > 25 else None

    report = Simulation(tmp_path, job).bisect()
    assert found(report) == [("rms_norm", "backward", "blocks.1.norm", None)]
    assert report.culprits[0].calls == 50
    assert report.workaround == "bad;rms_norm.backward=torch"


def test_calls_that_only_the_bad_run_makes_are_mentioned(tmp_path: Path) -> None:
    report = Simulation(tmp_path, fails_with(CULPRIT), bad_only=[("rms_norm", "forward", "x", 9000)]).bisect()
    assert any(note.startswith("Calls that happen only under the bad policy: 1.") for note in report.notes)


def test_a_trace_that_misleads_is_not_relied_on(tmp_path: Path) -> None:
    """The bad run ended, by its trace, long before the culprit was called: threads, or a trace that was cut short."""
    report = Simulation(tmp_path, fails_with(CULPRIT), stops_at=sites()[10]).bisect()
    assert found(report) == [CULPRIT]


# --- negative answers -------------------------------------------------------------------------------------------------


def test_not_reproduced(tmp_path: Path) -> None:
    report = Simulation(tmp_path, lambda ran: None).bisect()
    assert report.verdict is Answer.NOT_REPRODUCED
    assert report.trials == 2
    assert report.exit_code == 1
    assert report.notes == ("The bad policy does not fail. If it fails now and then, use --repeat.",)


def test_good_fails_with_a_signature_of_its_own(tmp_path: Path) -> None:
    report = Simulation(tmp_path, lambda ran: "KeyError: a" if ran[CULPRIT] == "bad" else "ValueError: b").bisect()
    assert report.verdict is Answer.GOOD_FAILS
    others = [name for name in registry.backends.names() if name not in ("composite", "torch")]
    assert report.notes == (
        "The good policy fails: ValueError: b. Choose a --good policy that passes. Others that could serve as --good: "
        f"{', '.join(['composite', *others])}.",
    )
    assert report.trials == 2


REFUSED = """\
triptych.errors.Refused: rms_norm.forward on 'bad' (TRIPTYCH_BACKEND rule 1, "bad")
  - No CUDA device was found.
  asked: rms_norm.forward(x=float32[2, 8] on cpu)"""


@pytest.mark.parametrize("fail_on", ["exit", "nonfinite", "signal", "match=Refused"])
@pytest.mark.parametrize("options", [{}, {"repeat": 5}, {"confidence": 0.95}])
def test_a_bad_policy_that_is_refused_isolates_nothing(tmp_path: Path, fail_on: str, options: dict[str, float]) -> None:
    job = fails_with(CULPRIT, error=REFUSED)
    report = Simulation(tmp_path, job, fail_on=(fail_on,), **options).bisect()  # type: ignore[arg-type]
    assert report.verdict is Answer.UNRESOLVED
    assert report.exit_code == 1
    assert report.trials == 2
    assert [each.runs for each in report.evidence if each.purpose == "bad"] == [1]
    bad = next(each.trial for each in report.evidence if each.purpose == "bad")
    assert lines(report)[:-1] == [
        "Verdict: unresolved: too few trials said anything",
        "Failure: Refused: rms_norm.forward on 'bad'",
        "The bad policy cannot run the job here: a call was refused, and nothing but the policy is at fault. Name a "
        "backend that can with --bad.",
        REFUSED.splitlines()[0].removeprefix("triptych.errors."),
        *REFUSED.splitlines()[1:],
        f"The whole log: {tmp_path}/state/trials/{bad:03d}/run-1.log",
    ]


def test_a_good_policy_that_is_refused_names_what_could_serve(tmp_path: Path) -> None:
    report = Simulation(tmp_path, lambda ran: REFUSED if ran[CULPRIT] == "torch" else "ValueError: b").bisect()
    assert report.verdict is Answer.UNRESOLVED
    assert report.notes[0].startswith("The good policy cannot run the job here")
    assert "with --good. Others that could serve as --good: composite" in report.notes[0]
    assert report.notes[1].startswith("Refused: rms_norm.forward on 'bad'")


def test_a_failure_without_a_traceback_shows_the_end_of_the_log(tmp_path: Path) -> None:
    text = "\n".join([*(f"line {n}" for n in range(9)), "python can't open file 'jbo.py'"])
    report = Simulation(tmp_path, lambda ran: text).bisect()
    assert report.verdict is Answer.NOT_A_BACKEND
    assert lines(report)[3:-1] == [
        f"The end of its log, {tmp_path}/state/trials/001/run-1.log:",
        *(f"  line {n}" for n in range(5, 9)),
        "  python can't open file 'jbo.py'",
    ]


def test_both_fail_alike(tmp_path: Path) -> None:
    report = Simulation(tmp_path, lambda ran: f"ValueError: {len(ran)}").bisect()
    assert report.verdict is Answer.NOT_A_BACKEND
    assert report.trials == 2


def test_no_op_is_called(tmp_path: Path) -> None:
    outcomes = iter([None, "ValueError: b"])
    report = Simulation(tmp_path, lambda ran: next(outcomes), calls=[]).bisect()
    assert report.verdict is Answer.NOT_A_BACKEND
    assert report.notes[0].startswith("The good run called no Triptych op")


def test_policies_that_differ_in_nothing_that_is_called(tmp_path: Path) -> None:
    outcomes = iter([None, "ValueError: b"])
    report = Simulation(tmp_path, lambda ran: next(outcomes)).bisect(bad="torch;rms_norm@head.*=bad")
    assert report.verdict is Answer.NOT_A_BACKEND
    assert report.notes[0].startswith("Both policies choose alike")


def test_swapping_every_call_makes_no_difference(tmp_path: Path) -> None:
    """What fails is not a call: the bad policy's text alone does it."""
    simulation = Simulation(tmp_path, lambda ran: None)

    def job(ran: dict[Site, str]) -> str | None:
        newest = max((tmp_path / "state" / "trials").iterdir())
        return "ImportError: x" if (newest / "policy.txt").read_text() == "bad\n" else None

    simulation.job = job
    report = simulation.bisect()
    assert report.verdict is Answer.NOT_A_BACKEND
    assert report.notes[0].startswith("The bad policy fails, but swapping every call that the good run made does not")


def test_time_out_of_a_start_run_says_what_to_do(tmp_path: Path) -> None:
    report = Simulation(tmp_path, lambda ran: "timeout" if ran[CULPRIT] == "bad" else None).bisect()
    assert report.verdict is Answer.UNRESOLVED
    assert report.notes == (
        "The bad policy ran out of time. Allow more with --timeout, or search for it with --fail-on timeout.",
    )


def test_a_hang_is_found_with_the_timeout_predicate(tmp_path: Path) -> None:
    job = fails_with(CULPRIT, error="timeout")
    report = Simulation(tmp_path, job, fail_on=("timeout",), stops_at=CULPRIT).bisect()
    assert found(report) == [CULPRIT]
    assert report.signature == "timeout"


def test_trials_that_skip_leave_suspects(tmp_path: Path) -> None:
    def job(ran: dict[Site, str]) -> str | None:
        swapped = sum(backend == "bad" for backend in ran.values())
        return "ValueError: x" if swapped == len(ran) else "exit status 125" if swapped else None

    report = Simulation(tmp_path, job).bisect()
    assert report.verdict is Answer.UNRESOLVED
    assert report.suspects
    assert report.exit_code == 1


# --- flaky failures ---------------------------------------------------------------------------------------------------


def flaky(every: int, culprit: Site) -> object:
    """A job that fails in every `every`-th run in which the culprit runs on the bad backend, first in the first."""
    seen = iter(range(100_000))

    def job(ran: dict[Site, str]) -> str | None:
        return "ValueError: x" if ran[culprit] == "bad" and next(seen) % every == 0 else None

    return job


def test_a_flaky_failure_without_repeats_is_called_flaky(tmp_path: Path) -> None:
    report = Simulation(tmp_path, flaky(3, CULPRIT)).bisect()  # type: ignore[arg-type]
    assert report.verdict is Answer.FLAKY
    assert report.failure_rate is not None
    assert 0 < report.failure_rate < 1
    assert "--repeat" in report.notes[0]
    assert "95 % confidence" in report.notes[0]


def test_repeats_find_a_flaky_culprit_and_state_their_confidence(tmp_path: Path) -> None:
    report = Simulation(tmp_path, flaky(2, CULPRIT), repeat=6).bisect()  # type: ignore[arg-type]
    assert found(report) == [CULPRIT]
    assert report.failure_rate == 0.5
    confidences = {each.confidence for each in report.evidence if each.verdict == "pass" and each.purpose == "search"}
    assert confidences == {round(1 - (1 - 3 / 7) ** 6, 4)}
    assert any("failed in 3 of 6 runs" in note for note in report.notes)


def test_too_few_repeats_are_said_to_be_too_few(tmp_path: Path) -> None:
    report = Simulation(tmp_path, flaky(3, CULPRIT), repeat=2).bisect()  # type: ignore[arg-type]
    assert any("--repeat" in note and "gives" in note for note in report.notes)


def test_a_good_policy_that_fails_now_and_then_fails(tmp_path: Path) -> None:
    runs = iter([None, None, "ValueError: g", *["KeyError: b"] * 9])
    report = Simulation(tmp_path, lambda ran: next(runs), repeat=3).bisect()
    assert report.verdict is Answer.GOOD_FAILS
    assert report.notes[0].startswith("The good policy fails now and then (in run 3): ValueError: g.")


def test_a_confidence_decides_how_often_a_trial_must_pass(tmp_path: Path) -> None:
    """One run in three fails: three failures in seven runs, so that a run is taken to fail with 3 / 8."""
    simulation = Simulation(tmp_path, flaky(3, CULPRIT), confidence=0.99)  # type: ignore[arg-type]
    report = simulation.bisect()
    assert report.verdict is Answer.ISOLATED
    assert found(report) == [CULPRIT]
    evidence = {each.purpose: each for each in report.evidence}
    assert (evidence["bad"].failures, evidence["bad"].runs) == (3, 7)
    assert report.repeat == repeats_for(0.99, 3 / 8) == 10
    passed = [each for each in report.evidence if each.verdict == "pass" and each.purpose != "capture"]
    assert len(passed) > 5
    assert {each.runs for each in passed} == {10}
    assert all(each.confidence is not None and each.confidence >= 0.99 for each in passed)
    assert report.to_json()["confidence"] == 0.99
    assert "The bad policy failed in 3 of 7 runs; a trial that passed 10 times had no failure with 99% confidence." in (
        report.notes
    )
    runs = simulation.runs
    assert simulation.bisect(resume=True).to_json() == report.to_json()
    assert simulation.runs == runs


@pytest.mark.parametrize(("confidence", "allowed"), [(0.95, 22), (0.999, 3)])
def test_how_often_a_confidence_misses(tmp_path: Path, confidence: float, allowed: int) -> None:
    """A failure at random, in 2 of 5 runs. An answer is right unless a trial with the culprit passed by luck.

    There are three of those or so in a search among 16 calls: 60 bisections with 5 % each give 9 answers that are not
    the culprit alone, and past 22 with a probability of 1e-4; with 0.1 % each 0.2, and past 3 with 5e-5.
    """
    generator = random.Random(7)
    calls = sites(layers=2, steps=2)
    culprit = calls[5]
    missed = 0
    for number in range(60):

        def job(ran: dict[Site, str]) -> str | None:
            return "ValueError: x" if ran[culprit] == "bad" and generator.random() < 0.4 else None

        report = Simulation(tmp_path / str(number), job, calls, confidence=confidence).bisect()
        missed += found(report) != [culprit]
        if report.verdict is Answer.ISOLATED:  # luck makes an answer too large, never a wrong one
            assert culprit[:2] in {site[:2] for site in found(report)}
    assert missed <= allowed


def test_a_failure_that_never_passes_takes_few_repeats(tmp_path: Path) -> None:
    report = Simulation(tmp_path, fails_with(CULPRIT), confidence=0.95).bisect()
    assert found(report) == [CULPRIT]
    assert report.failure_rate == 1.0
    assert report.repeat == repeats_for(0.95, 3 / 4) == 3


def test_a_confidence_gives_up_on_what_does_not_fail(tmp_path: Path) -> None:
    report = Simulation(tmp_path, lambda ran: None, confidence=0.95).bisect()
    assert report.verdict is Answer.NOT_REPRODUCED
    assert report.notes == (f"The bad policy does not fail in {PROOF_RUNS} runs.",)
    assert report.evidence[0].runs == PROOF_RUNS


def test_a_confidence_does_not_wait_for_a_run_that_says_nothing(tmp_path: Path) -> None:
    report = Simulation(tmp_path, lambda ran: "timeout" if ran[CULPRIT] == "bad" else None, confidence=0.95).bisect()
    assert report.verdict is Answer.UNRESOLVED
    assert report.evidence[0].runs == 1


def test_how_many_repeats() -> None:
    assert repeats_for(0.95, 0.5) == 5
    assert repeats_for(0.99, 0.5) == 7
    assert repeats_for(0.95, 0.1) == 29


# --- jobs and resuming ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [2, 3, 8])
def test_running_ahead_changes_nothing_but_the_number_of_trials(tmp_path: Path, jobs: int) -> None:
    for number, job in enumerate((fails_with(CULPRIT), fails_with(CULPRIT, PARTNER))):
        serial = Simulation(tmp_path / f"{number}-1", job).bisect()
        parallel = Simulation(tmp_path / f"{number}-{jobs}", job, jobs=jobs).bisect()
        assert found(parallel) == found(serial)
        assert parallel.workaround == serial.workaround
        assert parallel.interaction == serial.interaction
        assert {each.policy for each in serial.evidence} <= {each.policy for each in parallel.evidence}


@pytest.mark.parametrize("after", [0, 1, 2, 5, 9, 13])
def test_an_interrupted_bisection_goes_on_where_it_was(tmp_path: Path, after: int) -> None:
    whole = Simulation(tmp_path / "whole", fails_with(CULPRIT)).bisect()
    simulation = Simulation(tmp_path / "parts", fails_with(CULPRIT), interrupt_after=after)
    with pytest.raises(KeyboardInterrupt):
        simulation.bisect()
    assert simulation.runs == after + 1
    simulation.interrupt_after = None
    report = simulation.bisect(resume=True)
    assert simulation.runs == whole.trials + 1
    assert found(report) == found(whole)
    assert [(each.trial, each.policy, each.verdict) for each in report.evidence] == [
        (each.trial, each.policy, each.verdict) for each in whole.evidence
    ]


def test_a_finished_bisection_resumes_to_its_answer_without_running_anything(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, fails_with(CULPRIT))
    first = simulation.bisect()
    runs = simulation.runs
    assert simulation.bisect(resume=True).to_json() == first.to_json()
    assert simulation.runs == runs
