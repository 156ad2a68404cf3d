"""What a bisection knows, on disk, in one directory: so that it can be interrupted and continued.

    <state>/session.json            schema 1: the command, both policies and the options; written once
    <state>/finished.json           schema 1: the verdict; missing until there is one
    <state>/lock                    held while a bisection works in this directory
    <state>/trials/007/trial.json   schema 1: a finished trial; a folder without it was interrupted
    <state>/trials/007/policy.txt   the text that TRIPTYCH_BACKEND had
    <state>/trials/007/run-1.log    output of its first run, and likewise run-1.trace.jsonl, run-1.findings.jsonl and
                                    run-1.ends.jsonl
    <state>/trials/007/capture/     what a capture trial captured

Every file is written beside its place and moved there: a reader never sees half of one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from triptych.bisect.predicates import Verdict
from triptych.errors import UsageError

SCHEMA = 1
DEFAULT = Path(".triptych-bisect")


@dataclass(frozen=True)
class Run:
    """One run of the command within a trial.

    Attributes:
        verdict, signature: see `triptych.bisect.predicates.judge`.
        ending: how it ended, as a signature, whatever was searched for.
        seconds: wall-clock time.
        leftovers: processes that it left behind, which were ended.
        rank: the rank that failed first, or that made the finding; None when none did, or the job has one process.
    """

    verdict: Verdict
    signature: str | None
    ending: str
    seconds: float
    leftovers: int
    rank: int | None = None


@dataclass(frozen=True)
class Trial:
    """A finished trial: one policy, run once or, for flaky failures, several times.

    Attributes:
        number: from 1, in the order in which trials began.
        purpose: "good", "bad", "search", "fix", "capture" or "again" (the bad policy once more).
        key: what the trial is found by when its result is needed again.
        policy: what TRIPTYCH_BACKEND said.
        verdict, signature: FAIL if any run failed, PASS if all passed, else those of the first run that did neither.
        runs: in order; none follows the first that fails, but where the bad policy shows how often it does.
    """

    number: int
    purpose: str
    key: str
    policy: str
    verdict: Verdict
    signature: str | None
    runs: tuple[Run, ...]

    @property
    def seconds(self) -> float:
        """Wall-clock time of its runs together."""
        return sum(run.seconds for run in self.runs)

    @property
    def decisive(self) -> int:
        """The number of the run that its verdict rests on, from 1."""
        return next((n for n, run in enumerate(self.runs, 1) if run.verdict is self.verdict), 1)

    @property
    def rank(self) -> int | None:
        """The rank that failed in that run."""
        return self.runs[self.decisive - 1].rank

    @property
    def failure(self) -> str | None:
        """The signature and, in a job of several ranks, whose it is."""
        return self.signature if self.rank is None else f"rank {self.rank}: {self.signature}"

    @property
    def failures(self) -> int:
        """How many of its runs failed."""
        return sum(run.verdict is Verdict.FAIL for run in self.runs)


@dataclass(frozen=True)
class Identity:
    """What a bisection is about. A state directory belongs to one."""

    command: tuple[str, ...]
    directory: str
    good: str
    bad: str
    fail_on: tuple[str, ...]
    timeout: float | None
    repeat: int
    confidence: float | None = None


class Session:
    """The state directory of a running bisection. Use `create` or `resume`."""

    def __init__(self, path: Path, lock: TextIO) -> None:
        self.path = path
        self._lock_file = lock
        self._lock = threading.Lock()
        self._trials: dict[str, Trial] = {}
        self._next = 1

    @classmethod
    def create(cls, path: Path, identity: Identity) -> Session:
        """A new state directory. UsageError when there is one already, or something else in its place."""
        if (path / "finished.json").exists():
            verdict = _read(path / "finished.json").get("verdict")
            raise UsageError(
                f"{path} holds a bisection that is finished; its verdict is {verdict}. Remove the directory, or choose "
                f"another one with --state."
            )
        if (path / "session.json").exists():
            raise UsageError(
                f"{path} holds a bisection already. Continue it with --resume, remove the directory, or choose another "
                f"one with --state."
            )
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"{path} exists and is not the state of a bisection. Choose another place with --state.")
        try:
            (path / "trials").mkdir(parents=True)
        except OSError as cause:
            raise UsageError(
                f"The state directory {path} cannot be made: {cause.strerror}. Choose one with --state."
            ) from cause
        session = cls(path, _locked(path))
        _write(path / "session.json", {"schema": SCHEMA, **asdict(identity)})
        return session

    @classmethod
    def resume(cls, path: Path, identity: Identity) -> Session:
        """The state directory of an earlier, unfinished or finished, bisection of the same command and options."""
        if not (path / "session.json").exists():
            raise UsageError(f"There is no bisection to resume in {path}. Leave out --resume, or name it with --state.")
        stored = _read(path / "session.json")
        wanted = {"schema": SCHEMA, **json.loads(json.dumps(asdict(identity)))}
        differing = [name for name in wanted if stored.get(name) != wanted[name]]
        if differing:
            lines = [f"  {name}: stored {_shown(stored.get(name))}, asked {_shown(wanted[name])}" for name in differing]
            raise UsageError(
                "\n".join(
                    [
                        f"{path} holds another bisection. Repeat its options, or choose another place with --state:",
                        *lines,
                    ]
                )
            )
        session = cls(path, _locked(path))
        try:
            for folder in sorted((path / "trials").iterdir()):
                if (folder / "trial.json").exists():
                    session._add(_trial(_read(folder / "trial.json")))
                else:
                    shutil.rmtree(folder)
        except BaseException:
            session.close()
            raise
        return session

    def close(self) -> None:
        """Let go of the directory."""
        self._lock_file.close()

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The finished trials, by number."""
        return tuple(sorted(self._trials.values(), key=lambda trial: trial.number))

    def known(self, key: str) -> Trial | None:
        """The finished trial with this key."""
        return self._trials.get(key)

    def begin(self, policy: str) -> tuple[int, Path]:
        """Number and folder of a trial that is about to run."""
        with self._lock:
            number = self._next
            self._next += 1
        folder = self.folder(number)
        folder.mkdir()
        (folder / "policy.txt").write_text(policy + "\n", encoding="utf-8", errors="surrogateescape")
        return number, folder

    def folder(self, number: int) -> Path:
        """The folder of a trial."""
        return self.path / "trials" / f"{number:03d}"

    def finish(self, trial: Trial) -> None:
        """Keep a trial's result."""
        _write(self.folder(trial.number) / "trial.json", {"schema": SCHEMA, **asdict(trial)})
        with self._lock:
            self._add(trial)

    def conclude(self, verdict: str) -> None:
        """Keep the verdict: the bisection is finished."""
        _write(self.path / "finished.json", {"schema": SCHEMA, "verdict": verdict})

    def abandon(self, number: int) -> None:
        """Drop a trial that was interrupted."""
        shutil.rmtree(self.folder(number), ignore_errors=True)

    def _add(self, trial: Trial) -> None:
        self._trials[trial.key] = trial
        self._next = max(self._next, trial.number + 1)


def _trial(stored: dict[str, Any]) -> Trial:
    stored.pop("schema")
    runs = tuple(Run(**{**run, "verdict": Verdict(run["verdict"])}) for run in stored.pop("runs"))
    return Trial(**{**stored, "verdict": Verdict(stored["verdict"]), "runs": runs})


def _locked(path: Path) -> TextIO:
    file = (path / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UsageError(f"Another bisection is at work in {path}. Wait for it, or choose another --state.") from None
    return file


def _write(path: Path, value: Mapping[str, Any]) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise UsageError(f"{path} cannot be read: {cause}. Remove the directory and start afresh.") from cause
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise UsageError(f"{path} was written by another version of triptych. Remove the directory and start afresh.")
    return value


def _shown(value: object) -> str:
    return shlex.join(map(str, value)) if isinstance(value, list) else str(value)
