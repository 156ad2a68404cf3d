"""The trace: one JSON line for each phase of each call, written before the phase is launched.

`TRIPTYCH_TRACE=FILE` switches it on. Lines are appended: several processes may share the file, and a process that dies
has written everything up to and including the call that killed it.

Three kinds of lines, schema 1:

    {"kind": "process", "schema": 1, "pid", "rank", "policy", "versions": {name: version}, "backends": {name: origin}}
    {"kind": "decision", "pid", "decision": n, ...the record of the decision, as in `triptych explain`}
    {"kind": "call", "op", "phase", "layer", "call", "backend", "pid", "rank", "thread", "decision": n}

A process writes its header before its first other line, a decision before the first call that it decided. All ranks of
a job write to one file: lines of several processes do not mix, those of one process stand in the order of its calls.
`rank` is that of the moment: a process that calls an op before its process group is there, with no RANK to say who it
is, is rank 0 until then. How processes ended is recorded in a file of its own (`triptych.ends`).

The schema's number changes with any field or kind, also one that is added: what wrote a trace is what reads it.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from triptych import registry, scope
from triptych.errors import UsageError
from triptych.intercept import Invocation, Proceed
from triptych.jsonlines import Appender, read_lines
from triptych.opspec import Tensors
from triptych.select import Decision

SCHEMA = 1

_LIMIT = 4096
"""Decisions a process remembers having written; more often than not there are a few dozen."""


# --- writing ----------------------------------------------------------------------------------------------------------


class Tracer:
    """The interceptor that writes the trace.

    Args:
        path: the file to append to.
        policy: the policy of the process, for the header.
    """

    def __init__(self, path: Path, policy: str) -> None:
        self._policy = policy
        self._out = Appender(path, "TRIPTYCH_TRACE")
        self._begin()

    def close(self) -> None:
        self._out.close()

    def __call__(self, invocation: Invocation, proceed: Proceed) -> Tensors:
        if os.getpid() != self._pid:
            self._begin()  # we are a forked child: a process of its own, with call numbers of its own
        decision = invocation.decision
        self._out.line(
            {
                "kind": "call",
                "op": invocation.op,
                "phase": invocation.phase,
                "layer": invocation.layer,
                "call": invocation.index,
                "backend": decision.chosen,
                "pid": self._pid,
                "rank": scope.rank(),
                "thread": threading.get_native_id(),
                "decision": self._number(decision),
            }
        )
        return proceed()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._next_number = itertools.count().__next__
        self._written: dict[int, tuple[int, Decision]] = {}
        header = {"kind": "process", "schema": SCHEMA, "pid": self._pid, "rank": scope.rank(), "policy": self._policy}
        backends = {name: registry.backends.origin(name) for name in registry.backends.names()}
        self._out.line({**header, "versions": versions(), "backends": backends})

    def _number(self, decision: Decision) -> int:
        """The number under which this decision was written; writes it first if it was not.

        Decisions are found by identity, which is cheap; keeping them in the table keeps their identity theirs. Two
        threads may write one decision twice, under two numbers: both are right.
        """
        known = self._written.get(id(decision))
        if known is not None:
            return known[0]
        number = self._next_number()
        self._out.line({"kind": "decision", "pid": self._pid, "decision": number, **decision.to_json()})
        if len(self._written) >= _LIMIT:
            self._written.clear()
        self._written[id(decision)] = (number, decision)
        return number


def versions() -> dict[str, str | None]:
    """Versions of what decides how a kernel behaves: Python, torch, CUDA, triton, triptych; None where missing."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for distribution in ("triton", "triptych"):
        try:
            found[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found[distribution] = None
    return found


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessRecord:
    """The header of one process.

    Attributes:
        pid, rank: which it was.
        policy: the rules in force when it began.
        versions: see `versions`.
        backends: name and origin (distribution and version) of every backend there was.
    """

    pid: int
    rank: int
    policy: str
    versions: dict[str, str | None]
    backends: dict[str, str]


@dataclass(frozen=True)
class CallRecord:
    """One phase of one call, about to be launched.

    Attributes:
        op, phase, layer: what was called; `layer` is "" when it has no name.
        call: its number among the calls of this op and phase in its process, from 0.
        backend: what ran it.
        pid, rank, thread: where; `thread` is the native number.
        decision: why: the record that `triptych explain --json` shows.
    """

    op: str
    phase: str
    layer: str
    call: int
    backend: str
    pid: int
    rank: int
    thread: int
    decision: dict[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Trace:
    """What a trace file holds, in the order in which it was written."""

    processes: tuple[ProcessRecord, ...]
    calls: tuple[CallRecord, ...]


@dataclass(frozen=True)
class Total:
    """How many calls of one phase of one op ran on one backend, in how many processes.

    Attributes:
        ranks: pairs (rank, calls), where the trace has several ranks; those that made none included.
    """

    op: str
    phase: str
    backend: str
    calls: int
    processes: int
    ranks: tuple[tuple[int, int], ...] = ()

    @property
    def differs(self) -> bool:
        """Whether some rank made more of these calls than another."""
        return len({calls for _, calls in self.ranks}) > 1


def read(path: Path, start: int = 0) -> Trace:
    """The records in a trace file.

    A last line that was cut short, by a full disk or the end of its process, is left out.

    Args:
        path: the file.
        start: the byte at which to begin: a file's size before a run, to read what that run added.

    Raises:
        UsageError: the file cannot be read, or a line in it is not a record of schema 1.
    """
    processes: list[ProcessRecord] = []
    calls: list[CallRecord] = []
    decisions: dict[tuple[int, int], dict[str, Any]] = {}
    makers: dict[str, Callable[[dict[str, Any]], None]] = {
        "process": lambda line: processes.append(_process(line)),
        "decision": lambda line: decisions.update({(line.pop("pid"), line.pop("decision")): line}),
        "call": lambda line: calls.append(CallRecord(**{**line, "decision": decisions[line["pid"], line["decision"]]})),
    }
    for number, line in read_lines(path, start):
        try:
            makers[line.pop("kind")](line)
        except (KeyError, TypeError, AttributeError) as cause:
            raise UsageError(
                f"{path} line {number} is not a record of a trace of schema {SCHEMA} "
                f"({type(cause).__name__}: {cause}). "
                f"Write traces and read them with one version of triptych."
            ) from cause
    return Trace(tuple(processes), tuple(calls))


def totals(trace: Trace) -> tuple[Total, ...]:
    """The calls by op, phase and backend, sorted."""
    counts = Counter((call.op, call.phase, call.backend) for call in trace.calls)
    pids = {(call.op, call.phase, call.backend, call.pid) for call in trace.calls}
    processes = Counter(each[:3] for each in pids)
    ranked = Counter((call.op, call.phase, call.backend, call.rank) for call in trace.calls)
    ranks = sorted({call.rank for call in trace.calls} | {process.rank for process in trace.processes})
    several = ranks if len(ranks) > 1 else []
    return tuple(
        Total(*each, counts[each], processes[each], tuple((rank, ranked[*each, rank]) for rank in several))
        for each in sorted(counts)
    )


def _process(line: dict[str, Any]) -> ProcessRecord:
    if line.pop("schema") != SCHEMA:
        raise TypeError("another schema")
    return ProcessRecord(**line)
