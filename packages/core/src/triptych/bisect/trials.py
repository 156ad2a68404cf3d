"""Running trials: the command under a policy, as often as asked, its verdict kept in the session."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil

from triptych.bisect.endings import Ending, describe, is_refusal
from triptych.bisect.predicates import Predicate, Verdict, check_variable, judge
from triptych.bisect.session import Run, Session, Trial
from triptych.checks import read_findings
from triptych.run.process import MARK, Outcome, run_trial, tail
from triptych.run.ranks import Process, first_failure, processes, ranks
from triptych.run.witness import records

T = TypeVar("T")

OURS = tuple(f"TRIPTYCH_{name}" for name in ("BACKEND", "TRACE", "FINDINGS", "ENDS", "CAPTURE", "CHECK"))
"""Variables that a trial sets; what the user's environment says in them would be overwritten by every trial."""

_SUMMARY = 1 << 20
"""Bytes of the end of a log in which a launcher's summary is looked for."""


@dataclass(frozen=True)
class Request:
    """A trial to run.

    Attributes:
        purpose: see `Trial`.
        policy: what TRIPTYCH_BACKEND says.
        traced: whether its runs write a trace.
        captured: selectors of the calls to capture; "" for none.
        failures: it ends after so many runs that failed; more than 1 to learn how often it fails.
        runs: how often it runs at most, and only as long as each run says something; None for what is asked of every
            trial.
        again: distinguishes repetitions that must not be answered from memory.
    """

    purpose: str
    policy: str
    traced: bool = False
    captured: str = ""
    failures: int = 1
    runs: int | None = None
    again: int = 0

    @property
    def key(self) -> str:
        """The same for requests that one trial can answer."""
        return "\n".join((self.policy, "traced" if self.traced else "", self.captured, str(self.again or "")))


class Trials:
    """Runs trials of one command.

    Args:
        session: where they are kept.
        command, directory: what to run, and where.
        good: the good policy, against which mismatches are checked.
        predicates: what counts as the failure.
        timeout: seconds for one run; None for no limit.
        repeat: how often a trial runs before it counts as passed; changes when that is derived from the first trials.
        jobs: how many runs may go on at a time.
        began, finished: told about each trial that really runs.

    Attributes:
        reference: the signature that is searched for; None until it is proved.
        usual: how the good run ended; None until it did.
    """

    def __init__(
        self,
        session: Session,
        command: Sequence[str],
        directory: Path,
        good: str,
        predicates: Sequence[Predicate],
        timeout: float | None,
        repeat: int,
        jobs: int,
        began: Callable[[Request], None],
        finished: Callable[[Trial], None],
    ) -> None:
        self.session = session
        self.repeat = repeat
        self.jobs = jobs
        self.reference: str | None = None
        self.usual: str | None = None
        self._command = tuple(command)
        self._directory = directory
        self._predicates = tuple(predicates)
        self._script = next((each.script for each in predicates if each.script), ())
        self._check = check_variable(predicates, good)
        self.timeout = timeout
        self._began = began
        self._finished = finished
        self._stop = threading.Event()

    def run(self, request: Request) -> Trial:
        """The result of a trial: remembered, or run now. KeyboardInterrupt ends its processes and drops it."""
        return self.run_all([request])[0]

    def run_all(self, requests: Sequence[Request]) -> list[Trial]:
        """The results of several trials, run side by side as far as `jobs` allows."""
        waiting = {request.key: request for request in requests if self.session.known(request.key) is None}
        if self.jobs == 1 or self.repeat > 1:  # repeats run side by side already
            for request in waiting.values():
                self._run(request)
        else:
            self._side_by_side([partial(self._run, request) for request in waiting.values()])
        found = [self.session.known(request.key) for request in requests]
        return [trial for trial in found if trial is not None]

    def environment(self) -> dict[str, str]:
        """The user's environment without the variables that trials set."""
        return {name: value for name, value in os.environ.items() if name not in OURS}

    def _run(self, request: Request) -> Trial:
        self._began(request)
        number, folder = self.session.begin(request.policy)
        try:
            trial = self._trial(request, number, folder)
        except BaseException:
            self.session.abandon(number)
            raise
        self.session.finish(trial)
        self._finished(trial)
        return trial

    def _trial(self, request: Request, number: int, folder: Path) -> Trial:
        wanted = 1 if request.captured or request.again else request.runs or self.repeat
        failed_runs = 0
        runs: list[Run] = []
        while len(runs) < wanted:
            at_once = min(self.jobs, wanted - len(runs))
            numbers = range(len(runs) + 1, len(runs) + 1 + at_once)
            if at_once == 1:
                results = [self._once(request, folder, numbers[0])]
            else:
                results = self._side_by_side([partial(self._once, request, folder, n) for n in numbers])
            for result in results:
                runs.append(result)
                failed_runs += result.verdict is Verdict.FAIL
                says_nothing = result.verdict not in (Verdict.PASS, Verdict.FAIL)
                hopeless = says_nothing and (request.runs is not None or is_refusal(result.ending))
                if failed_runs == request.failures or hopeless:
                    wanted = len(runs)
                    break
        failed = [run for run in runs if run.verdict is Verdict.FAIL]
        odd = [run for run in runs if run.verdict is not Verdict.PASS]
        decisive = (failed or odd or runs)[0]
        return Trial(
            number, request.purpose, request.key, request.policy, decisive.verdict, decisive.signature, tuple(runs)
        )

    def _once(self, request: Request, folder: Path, number: int) -> Run:
        if self._stop.is_set():
            raise KeyboardInterrupt
        findings, ends = folder / f"run-{number}.findings.jsonl", folder / f"run-{number}.ends.jsonl"
        environment = {**self.environment(), "TRIPTYCH_BACKEND": request.policy, "TRIPTYCH_ENDS": str(ends)}
        if request.traced:
            environment["TRIPTYCH_TRACE"] = str(folder / f"run-{number}.trace.jsonl")
        if request.captured:
            environment["TRIPTYCH_CAPTURE"] = f"{folder / 'capture'}|{request.captured}"
        if self._check:
            environment |= {"TRIPTYCH_CHECK": self._check, "TRIPTYCH_FINDINGS": str(findings)}
        log = folder / f"run-{number}.log"
        outcome = run_trial(self._command, environment, self.timeout, log, cwd=self._directory, ends=ends)
        found = read_findings(findings)
        members = _ranks(outcome, ends)
        failed = None if outcome.code == 0 and not outcome.timed_out else first_failure(members)
        signatures = tuple(each.signature for each in found)
        ending = Ending(outcome.code, outcome.signal, outcome.timed_out, log, signatures, failed=failed)
        if self._script:
            ending = replace(ending, script=self._judged_by_script(ending, request.policy))
        if self._stop.is_set():
            raise KeyboardInterrupt
        first = request.purpose in ("good", "bad")
        verdict, signature = judge(
            self._predicates, ending, None if first else self.reference, None if first else self.usual
        )
        rank = None if failed is None else failed.rank
        if members and signature in signatures:
            rank = found[signatures.index(signature)].rank
        if verdict is Verdict.PASS:
            rank = None
        return Run(verdict, signature, describe(ending), outcome.seconds, outcome.leftovers, rank)

    def _judged_by_script(self, ending: Ending, policy: str) -> int:
        """The exit status of the script of command=SCRIPT, negative for a signal. It gets the log as its argument."""
        told = {"TRIPTYCH_BACKEND": policy, "BISECT_LOG": str(ending.log), "BISECT_STATUS": describe(ending)}
        log = ending.log.with_suffix(".script.log")
        command = (*self._script, str(ending.log))
        outcome = run_trial(command, {**self.environment(), **told}, self.timeout, log, cwd=self._directory)
        if outcome.timed_out or outcome.code is None:
            return -(outcome.signal or 9)
        return outcome.code

    def _side_by_side(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """The results of several calls, each on a thread of its own; an interrupt ends the runs of all of them."""
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(call) for call in calls]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self._stop.set()
                for future in futures:
                    future.cancel()
                while not all(future.done() for future in futures):
                    _end_trials()
                    wait(futures, timeout=0.2)
                raise


def _ranks(outcome: Outcome, ends: Path) -> tuple[Process, ...]:
    """The ranks of a run; none when its job has one process."""
    return ranks(processes(records(ends), outcome.sightings, tail(outcome.log, _SUMMARY)))


def _end_trials() -> None:
    """Kill the commands that our threads wait for; each thread then ends what is left of its command's tree."""
    own = os.environ.get(MARK)
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.environ().get(MARK, own) != own:
                child.kill()
