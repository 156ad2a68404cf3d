"""The start of a bisection: the bad policy must fail, the good one pass, and something must be there to swap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """

    verdict: Answer
    text: str
    signature: str | None = None


def unproved(good: Trial, bad: Trial) -> Negative | None:
    """What is wrong with the start, from the trials of both policies; None when it holds."""
    for name, trial in (("good", good), ("bad", bad)):
        if trial.verdict is Verdict.TIMEOUT:
            advice = "Allow more with --timeout" + (
                ", or search for it with --fail-on timeout." if name == "bad" else "."
            )
            return Negative(Answer.UNRESOLVED, f"The {name} policy ran out of time. {advice}")
        if trial.verdict is Verdict.UNRESOLVED:
            return Negative(Answer.UNRESOLVED, f"The {name} policy's run says nothing ({trial.signature}).")
    if good.verdict is Verdict.FAIL:
        return _good_fails(good, bad)
    if bad.verdict is not Verdict.FAIL:
        ended = f" Its run ended so: {bad.runs[0].ending}." if bad.runs[0].ending != "exit status 0" else ""
        times = f" in {len(bad.runs)} runs" if len(bad.runs) > 1 else ""
        hint = " If it fails now and then, use --repeat." if len(bad.runs) == 1 else ""
        return Negative(Answer.NOT_REPRODUCED, f"The bad policy does not fail{times}.{ended}{hint}")
    return None


def _good_fails(good: Trial, bad: Trial) -> Negative:
    how = f"The good policy fails: {good.signature}."
    if good.runs[0].verdict is not Verdict.FAIL:
        how = f"The good policy fails now and then (in run {len(good.runs)}): {good.signature}."
    if bad.verdict is Verdict.FAIL and bad.signature == good.signature:
        text = "The bad policy fails in the same way: the cause lies outside what the policies choose."
        return Negative(Answer.NOT_A_BACKEND, f"{how} {text}", bad.signature)
    return Negative(Answer.GOOD_FAILS, f"{how} Choose a --good policy that passes.", good.signature)


def nothing_to_swap(calls: Sequence[CallRecord]) -> str:
    """Why no call can be swapped, given those that the good run made."""
    if calls:
        return "Both policies choose alike for every call that the good run made: the cause lies outside them."
    return (
        "The good run called no Triptych op: the cause lies outside them. If it should have, check that the "
        "command runs a program that uses triptych in this environment."
    )
