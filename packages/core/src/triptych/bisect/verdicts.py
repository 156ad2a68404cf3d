"""The result of a bisection as data: what `--json` writes. Schema 1.

    {"schema": 1, "verdict", "culprits": [...], "victims": [...], "interaction", "trials", "seconds", "workaround",
     "capture", "signature", "evidence": [...], "suspects": [...], "notes": [...], "failure_rate", "state",
     "command", "good", "bad", "fail_on", "repeat"}

Fields are only ever added within a schema; a reader ignores those it does not know.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

SCHEMA = 1


class Answer(StrEnum):
    """What a bisection concludes."""

    ISOLATED = "isolated"
    """The culprits are known: they fail when only they are swapped in."""
    NOT_REPRODUCED = "not-reproduced"
    """The bad policy does not fail."""
    GOOD_FAILS = "good-fails"
    """The good policy fails too, in a way of its own, or now and then."""
    NOT_A_BACKEND = "not-a-backend"
    """Both policies fail alike, or nothing that can be swapped makes a difference."""
    FLAKY = "flaky"
    """The bad policy fails now and then, too rarely for the repeats that were allowed."""
    UNRESOLVED = "unresolved"
    """Too many trials said nothing about the failure."""


@dataclass(frozen=True)
class Site:
    """A culprit, a victim or a suspect.

    Attributes:
        op, phase: which.
        layer: its module path, "" when it has no name, None when the phase as a whole is meant.
        call: its number among the calls of its op and phase in its process; None when all calls of the layer or phase
            are meant.
        calls: how many traced calls that is, on all the ranks that are meant.
        backend: what ran it in the bad run; what the bad policy chooses, if that is not known.
        elsewhere: whether the failure also occurs without this call, at others; None when that is not known.
        capture: the folder of the captured call, or None.
        replay: what running the captured call alone showed: it "agrees" with the reference or "differs", it "raises",
            "crashes" or "hangs"; None when there is no capture.
        rank: the one rank that is meant; None when several are, or the job has one process.
        ranks: all that are meant; empty when the job has one process.
        alike: whether they are several because each fails alone, as far as two of them were tried: every rank is at
            fault, not one. None when the job has one process.
    """

    op: str
    phase: str
    layer: str | None
    call: int | None
    calls: int
    backend: str
    elsewhere: bool | None = None
    capture: str | None = None
    replay: str | None = None
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    alike: bool | None = None

    def __str__(self) -> str:
        text = f"{self.op}.{self.phase}"
        if self.layer:
            text += f" in layer {self.layer!r}"
        text += f" call {self.call}" if self.call is not None else f" ({self.calls} calls together)"
        if self.ranks:
            text += " of every rank" if self.alike else f" of rank {', '.join(map(str, self.ranks))}"
        return f"{text} on {self.backend!r}"


@dataclass(frozen=True)
class Evidence:
    """One trial.

    Attributes:
        trial: its number, and the name of its folder in the state directory.
        purpose: "good" and "bad" (the start), "search", "blame" (only the culprits swapped in), "fix" (only they
            swapped out), "capture", "again" (the bad policy once more).
        policy: TRIPTYCH_BACKEND.
        verdict: "pass", "fail", "other failure", "unresolved" or "timeout".
        signature: of the failure; None for "pass".
        seconds: of all its runs.
        runs: how often the command ran.
        failures: how often it failed.
        confidence: with --repeat, for a trial that passed: how likely it would have failed at least once if its policy
            had the failure, given the rate seen at the start; else None.
        rank: the rank that failed first; None when none did, or the job has one process.
    """

    trial: int
    purpose: str
    policy: str
    verdict: str
    signature: str | None
    seconds: float
    runs: int
    failures: int
    confidence: float | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Report:
    """The result of a bisection.

    Attributes:
        verdict: see `Answer`.
        culprits: what is at fault. Several with `interaction` fail only together; several without are separate faults
            with one signature.
        victims: members of a failing combination that compute rightly from what they are given.
        interaction: whether the culprits, or culprits and victims, fail only together.
        workaround: a policy that was proved to pass; None when none was found.
        signature: the failure.
        evidence: every trial, in order.
        suspects: where the cause must lie when it was not isolated.
        notes: whole sentences that a reader should know.
        failure_rate: the share of the bad runs at the start (and of those that were repeated since) that failed.
        state: the directory with everything that the trials left.
        command, good, bad, fail_on, confidence: what was asked.
        repeat: how often a trial had to pass; with `confidence`, what was derived from it.
    """

    verdict: Answer
    command: tuple[str, ...]
    good: str
    bad: str
    fail_on: tuple[str, ...]
    repeat: int
    state: str
    culprits: tuple[Site, ...] = ()
    victims: tuple[Site, ...] = ()
    interaction: bool = False
    workaround: str | None = None
    signature: str | None = None
    evidence: tuple[Evidence, ...] = ()
    suspects: tuple[Site, ...] = ()
    notes: tuple[str, ...] = ()
    failure_rate: float | None = None
    confidence: float | None = None

    @property
    def capture(self) -> str | None:
        """The folder of the first captured call of a culprit or, where there is none, of a victim."""
        return next((site.capture for site in (*self.culprits, *self.victims) if site.capture), None)

    @property
    def trials(self) -> int:
        """How many trials ran; one may have run its command several times."""
        return len(self.evidence)

    @property
    def seconds(self) -> float:
        """The time of all their runs, added up: more than has passed where several ran side by side."""
        return round(sum(each.seconds for each in self.evidence), 2)

    @property
    def exit_code(self) -> int:
        """0 when the answer was found, 1 when it is negative."""
        return 0 if self.verdict is Answer.ISOLATED else 1

    def noted(self, *notes: str) -> Report:
        """This report with further notes."""
        return replace(self, notes=(*self.notes, *notes))

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` writes."""
        own = asdict(self)
        first = ("verdict", "culprits", "victims", "interaction")
        return {
            "schema": SCHEMA,
            **{name: own.pop(name) for name in first},
            "trials": self.trials,
            "seconds": self.seconds,
            "workaround": own.pop("workaround"),
            "capture": self.capture,
            **own,
        }

    @property
    def shell_command(self) -> str:
        """The command as one would type it."""
        return shlex.join(self.command)
