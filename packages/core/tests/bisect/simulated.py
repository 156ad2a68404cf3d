"""A bisection whose trials are computed instead of run: what a job would do is a function of what runs each call."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from triptych.bisect.bisection import Bisection
from triptych.bisect.endings import Ending, describe
from triptych.bisect.policies import Side
from triptych.bisect.predicates import judge, parse_predicates
from triptych.bisect.progress import Progress
from triptych.bisect.session import Identity, Run, Session
from triptych.bisect.trials import Request, Trials
from triptych.bisect.verdicts import Answer, Report
from triptych.policy import Policy, parse, parse_selectors
from triptych.run.ranks import Process, Raised

OPS = ("add_rms_norm", "rms_norm")
BACKENDS = ("bad", "torch")

Site = tuple[str, str, str, int]
Job = Callable[[dict[Site, str]], str | None]
"""What a job does, given which backend runs each call: the text of the exception that ends it, or None."""
RankedSite = tuple[str, str, str, int, int]
RankedJob = Callable[[dict[RankedSite, str]], tuple[int | None, str] | None]
"""The same of a job of several ranks: which of them ends it, and how; None as the rank where all wait for ever."""


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


def on_rank(site: Site, *ranks: int, error: str = "ValueError: loss is nan") -> RankedJob:
    """A job that fails on the first of these ranks, when the call runs on the bad backend on it."""
    return lambda ran: next(((rank, error) for rank in ranks if ran.get((*site, rank)) == "bad"), None)


@dataclass
class Simulation:
    """A job of these calls, bisected in a folder.

    Attributes:
        job: what it does; a job of several ranks where `ranked_job` is given instead.
        ranks: how many ranks make these calls.
        stuck: a rank, and the last call that it makes when the job fails.
        stops_at: the calls before which the failing job has ended; None: it fails at its end.
        replays: what the captured call of a site does when it is run alone.
        runs: how often the job has run.
    """

    folder: Path
    job: Job = lambda ran: None
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
    ranks: int = 1
    ranked_job: RankedJob = lambda ran: None
    stuck: tuple[int, Site] | None = None

    def ends(self, policy: Policy) -> tuple[dict[RankedSite, str], int | None, str | None]:
        """What runs each call on each rank, which rank ends the job, if one does, and how."""
        ran = {
            (*site, rank): policy.rule_for(*site, rank).choice[0] for site in self.calls for rank in range(self.ranks)
        }
        if self.ranks == 1:
            return ran, None, self.job({site[:4]: backend for site, backend in ran.items()})
        rank, error = self.ranked_job(ran) or (None, None)
        return ran, rank, error

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
        op, phase, *_ = capture.name.split(".")
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
        ran, rank, error = simulation.ends(Policy().extended(rules))
        happened = list(ran)
        if error is not None and simulation.stops_at is not None:
            last = (*simulation.stops_at, simulation.ranks - 1)
            happened = happened[: happened.index(last) + 1]
        if error is not None and simulation.stuck is not None:
            rank_stuck, last_call = simulation.stuck
            end = happened.index((*last_call, rank_stuck))
            happened = [site for n, site in enumerate(happened) if site[4] != rank_stuck or n <= end]
        if request.purpose == "bad":
            happened += [(*site, 0) for site in simulation.bad_only]
            ran |= {(*site, 0): "bad" for site in simulation.bad_only}
        if request.traced:
            _write_trace(folder / f"run-{number}.trace.jsonl", [(site, ran[site]) for site in happened])
        if request.captured:
            selectors = parse_selectors(request.captured, "TRIPTYCH_CAPTURE", ops=OPS)
            for site in happened:
                if any(each.matches(*site) for each in selectors):
                    name = f"{site[0]}.{site[1]}.{site[3]}" + f".rank{site[4]}" * (simulation.ranks > 1)
                    capture = folder / "capture" / name
                    capture.mkdir(parents=True)
                    (capture / "replay.py").touch()
        log = folder / f"run-{number}.log"
        text = error or ""
        log.write_text(f"Traceback (most recent call last):\n  ...\n{text}\n" if error and ":" in error else text)
        code = 0 if error is None else int(text.split()[-1]) if text.startswith("exit status") else 1
        failed = None
        if rank is not None:  # the others and the launcher have something to say too
            failed = Process(
                9, 1, rank, 0.0, Raised(f"builtins.{text.split(':')[0]}", text.partition(": ")[2]), ended=1.0
            )
            log.write_text("[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: closed by peer\n")
        ending = Ending(code, None, text == "timeout", log, failed=failed)
        first = request.purpose in ("good", "bad")
        verdict, signature = judge(
            self._predicates, ending, None if first else self.reference, None if first else self.usual
        )
        return Run(verdict, signature, describe(ending), 0.5, 0, rank)


def _write_trace(path: Path, calls: list[tuple[RankedSite, str]]) -> None:
    lines: list[dict[str, Any]] = []
    for rank in sorted({site[4] for site, _ in calls} or {0}):
        process = {"schema": 1, "pid": rank + 1, "rank": rank, "policy": "", "versions": {}, "backends": {}}
        lines += [{"kind": "process", **process}, {"kind": "decision", "pid": rank + 1, "decision": 0}]
    for (op, phase, layer, call, rank), backend in calls:
        line = {"op": op, "phase": phase, "layer": layer, "call": call, "backend": backend}
        lines.append({"kind": "call", **line, "pid": rank + 1, "rank": rank, "thread": 1, "decision": 0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
