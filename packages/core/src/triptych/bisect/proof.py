"""The start of a bisection: the bad policy must fail, the good one pass, and something must be there to swap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from triptych.bisect.endings import is_refusal
from triptych.bisect.predicates import Verdict
from triptych.bisect.session import Trial
from triptych.bisect.verdicts import Answer
from triptych.trace import CallRecord


@dataclass(frozen=True)
class Negative:
    """Why there is nothing to search for.

    Attributes:
        verdict: of the bisection.
        text: whole sentences.
        signature: the failure, where it is known.
        trial: whose run shows why; None when there is nothing to show.
    """

    verdict: Answer
    text: str
    signature: str | None = None
    trial: Trial | None = None


def unproved(good: Trial, bad: Trial, others: Sequence[str] = ()) -> Negative | None:
    """What is wrong with the start, from the trials of both policies; None when it holds.

    Args:
        good, bad: the trials.
        others: backends that neither policy names: what --good could say instead.
    """
    for name, trial in (("good", good), ("bad", bad)):
        if trial.verdict is Verdict.TIMEOUT:
            advice = "Allow more with --timeout" + (
                ", or search for it with --fail-on timeout." if name == "bad" else "."
            )
            return Negative(Answer.UNRESOLVED, f"The {name} policy ran out of time. {advice}")
        if trial.verdict is Verdict.UNRESOLVED:
            if is_refusal(trial.signature or ""):
                return _refused(name, trial, others)
            text = f"The {name} policy's run says nothing ({trial.signature})."
            return Negative(Answer.UNRESOLVED, text, trial=trial)
    if good.verdict is Verdict.FAIL:
        return _good_fails(good, bad, others)
    if bad.verdict is not Verdict.FAIL:
        run = bad.runs[0]
        whose = "" if run.rank is None else f"rank {run.rank}: "
        ended = f" Its run ended so: {whose}{run.ending}." if run.ending != "exit status 0" else ""
        times = f" in {len(bad.runs)} runs" if len(bad.runs) > 1 else ""
        hint = " If it fails now and then, use --repeat." if len(bad.runs) == 1 else ""
        return Negative(Answer.NOT_REPRODUCED, f"The bad policy does not fail{times}.{ended}{hint}", trial=bad)
    return None


def alternatives(installed: Iterable[str], named: Iterable[str]) -> tuple[str, ...]:
    """The installed backends that no policy names, the reference first: it implements every op."""
    taken = set(named)
    return tuple(sorted((each for each in installed if each not in taken), key=lambda each: each != "composite"))


def _refused(name: str, trial: Trial, others: Sequence[str]) -> Negative:
    text = (
        f"The {name} policy cannot run the job here: a call was refused, and nothing but the policy is at fault. "
        f"Name a backend that can with --{name}."
    )
    if name == "good":
        text += _could_serve(others)
    return Negative(Answer.UNRESOLVED, text, trial.signature, trial)


def _could_serve(others: Sequence[str]) -> str:
    return f" Others that could serve as --good: {', '.join(others)}." if others else ""


def _good_fails(good: Trial, bad: Trial, others: Sequence[str]) -> Negative:
    how = f"The good policy fails: {good.failure}."
    if good.runs[0].verdict is not Verdict.FAIL:
        how = f"The good policy fails now and then (in run {len(good.runs)}): {good.failure}."
    if bad.verdict is Verdict.FAIL and bad.signature == good.signature:
        text = "The bad policy fails in the same way: the cause lies outside what the policies choose."
        return Negative(Answer.NOT_A_BACKEND, f"{how} {text}", bad.signature, good)
    text = f"{how} Choose a --good policy that passes.{_could_serve(others)}"
    return Negative(Answer.GOOD_FAILS, text, good.signature, good)


def nothing_to_swap(calls: Sequence[CallRecord]) -> str:
    """Why no call can be swapped, given those that the good run made."""
    if calls:
        return "Both policies choose alike for every call that the good run made: the cause lies outside them."
    return (
        "The good run called no Triptych op: the cause lies outside them. If it should have, check that the "
        "command runs a program that uses triptych in this environment."
    )
