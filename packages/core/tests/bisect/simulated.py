"""A bisection whose trials are computed instead of run: what a job would do is a function of what runs each call."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from triptych.bisect.bisection import Bisection
from triptych.bisect.policies import Side
from triptych.bisect.predicates import Ending, describe, judge, parse_predicates
from triptych.bisect.progress import Progress
from triptych.bisect.session import Identity, Run, Session
from triptych.bisect.trials import Request, Trials
from triptych.bisect.verdicts import Answer, Report
from triptych.policy import Policy, parse, parse_selectors

OPS = ("add_rms_norm", "rms_norm")
BACKENDS = ("bad", "torch")

Site = tuple[str, str, str, int]
Job = Callable[[dict[Site, str]], str | None]
"""What a job does, given which backend runs each call: the text of the exception that ends it, or None."""


def sites(layers: int = 3, steps: int = 50) -> list[Site]:
    return [
        (op, phase, f"blocks.{layer}.norm", step * layers + layer)
        for step in range(steps)
        for phase in ("forward", "backward")
        for layer in range(layers)
        for op in OPS
    ]


def fails_with(*together: Site, error: str = "ValueError: loss is nan") -> Job:
    """A job that fails when all of these calls run on the bad backend."""
    return lambda ran: error if all(ran.get(site) == "bad" for site in together) else None


@dataclass
class Simulation:
    """A job of these calls, bisected in a folder.

    Attributes:
        stops_at: the calls before which the failing job has ended; None: it fails at its end.
        replays: what the captured call of a site does when it is run alone.
        runs: how often the job has run.
    """

    folder: Path
    job: Job
    calls: Sequence[Site] = field(default_factory=sites)
    bad_only: Sequence[Site] = ()
    stops_at: Site | None = None
    replays: dict[tuple[str, str], str] = field(default_factory=dict)
    repeat: int = 1
    confidence: float | None = None
    jobs: int = 1
    interrupt_after: int | None = None
    fail_on: tuple[str, ...] = ()
    runs: int = 0

    def bisect(self, good: str = "torch", bad: str = "bad", *, resume: bool = False) -> Report:
        identity = Identity(("job",), "here", good, bad, self.fail_on or ("exit",), None, self.repeat, self.confidence)
        state = self.folder / "state"
        session = Session.resume(state, identity) if resume else Session.create(state, identity)
        console = Console(quiet=True)
        try:
            with Progress(console) as progress:
                trials = SimulatedTrials(self, session, good, progress)
                left = Side.parse(good, "--good", Policy(), BACKENDS, OPS)
                right = Side.parse(bad, "--bad", Policy(), BACKENDS, OPS)
                blank = Report(
                    Answer.UNRESOLVED,
                    ("job",),
                    good,
                    bad,
                    ("exit",),
                    self.repeat,
                    str(state),
                    confidence=self.confidence,
                )
                return Bisection(trials, left, right, blank, progress, self._replay).run()
        finally:
            session.close()

    def _replay(self, capture: Path, trials: Trials) -> str | None:
        op, phase, _ = capture.name.split(".")
        return self.replays.get((op, phase), "agrees")


class SimulatedTrials(Trials):
    def __init__(self, simulation: Simulation, session: Session, good: str, progress: Progress) -> None:
        self.simulation = simulation
        predicates = parse_predicates(simulation.fail_on, 1.0)
        super().__init__(
            session, ("job",), simulation.folder, good, predicates, 1.0, simulation.repeat, simulation.jobs,
            progress.began, progress.finished,
        )  # fmt: skip

    def _once(self, request: Request, folder: Path, number: int) -> Run:
        simulation = self.simulation
        simulation.runs += 1
        if simulation.interrupt_after is not None and simulation.runs > simulation.interrupt_after:
            raise KeyboardInterrupt
        rules = parse(request.policy, "TRIPTYCH_BACKEND", backends=BACKENDS, ops=OPS)
        policy = Policy().extended(rules)
        ran = {site: policy.rule_for(*site, 0).choice[0] for site in simulation.calls}
        error = simulation.job(ran)
        happened = list(ran)
        if error is not None and simulation.stops_at is not None:
            happened = happened[: happened.index(simulation.stops_at) + 1]
        if request.purpose == "bad":
            happened += simulation.bad_only
            ran |= dict.fromkeys(simulation.bad_only, "bad")
        if request.traced:
            _write_trace(folder / f"run-{number}.trace.jsonl", [(site, ran[site]) for site in happened])
        if request.captured:
            selectors = parse_selectors(request.captured, "TRIPTYCH_CAPTURE", ops=OPS)
            for site in happened:
                if any(each.matches(*site, 0) for each in selectors):
                    capture = folder / "capture" / f"{site[0]}.{site[1]}.{site[3]}"
                    capture.mkdir(parents=True)
                    (capture / "replay.py").touch()
        log = folder / f"run-{number}.log"
        text = error or ""
        log.write_text(f"Traceback (most recent call last):\n  ...\n{text}\n" if error and ":" in error else text)
        code = 0 if error is None else int(text.split()[-1]) if text.startswith("exit status") else 1
        ending = Ending(code, None, text == "timeout", log)
        first = request.purpose in ("good", "bad")
        verdict, signature = judge(
            self._predicates, ending, None if first else self.reference, None if first else self.usual
        )
        return Run(verdict, signature, describe(ending), 0.5, 0)


def _write_trace(path: Path, calls: list[tuple[Site, str]]) -> None:
    lines: list[dict[str, Any]] = [
        {"kind": "process", "schema": 1, "pid": 1, "rank": 0, "policy": "", "versions": {}, "backends": {}},
        {"kind": "decision", "pid": 1, "decision": 0},
    ]
    for (op, phase, layer, call), backend in calls:
        line = {"op": op, "phase": phase, "layer": layer, "call": call, "backend": backend}
        lines.append({"kind": "call", **line, "pid": 1, "rank": 0, "thread": 1, "decision": 0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
