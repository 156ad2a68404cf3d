"""The ranks of a run: how each of them ended, and which of them failed first.

One rank that dies takes the others with it: they lose their connections, or wait for it until their launcher or a time
limit ends them. Whoever failed first failed by itself; the log and the exit status of the launcher are about the rest.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from triptych.run.process import signal_name
from triptych.run.witness import Sighting

_LATE = 0.1
"""Seconds that a lost connection is taken to be later than it is: it is reported within a millisecond of the death
that caused it, which is seen a few milliseconds late. A launcher takes longer to end the others."""

_BY_LAUNCHER = (-signal.SIGTERM, -signal.SIGKILL)
"""How a launcher ends the others."""

PEER_LOST = re.compile(
    r"closed by peer|reset by peer|ncclRemoteError|remote process exited|Broken pipe|Socket (?:is )?closed"
    r"|DistNetworkError|recvValue failed|sendBytes failed|recvBytes failed|NCCL communicator (?:was|has been) aborted"
)
"""What a rank says whose partner has gone."""

_MOST = 160
"""Characters of an exception's text in a line for a reader."""

_SUMMARY = re.compile(r"^\s*exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)", re.MULTILINE)
"""What torchrun, and accelerate with it, say of each process that failed."""


@dataclass(frozen=True)
class Raised:
    """An exception that nobody caught: its type with its module, and its text."""

    type: str
    message: str

    @property
    def name(self) -> str:
        """Its type without the module."""
        return self.type.rpartition(".")[2]


@dataclass(frozen=True)
class Process:
    """One process of a run that used Triptych.

    Attributes:
        pid, parent: process numbers.
        rank: its rank; None where it had none, as a launcher.
        began: when, in seconds since 1970.
        raised: what ended its main thread, if an exception did.
        in_threads: names of other threads that ended by an exception, and what that was.
        ended: when it ended or, if that was earlier, raised; None when it had not ended.
        said: whether it ended by itself, having run its last handlers: not by a signal or os._exit.
        status: its exit status, negative for a signal; None when it is not known.
    """

    pid: int
    parent: int
    rank: int | None
    began: float
    raised: Raised | None = None
    in_threads: tuple[tuple[str, Raised], ...] = ()
    ended: float | None = None
    said: bool = False
    status: int | None = None

    @property
    def failed(self) -> bool:
        """Whether it has ended otherwise than it should."""
        if self.raised is not None or self.status:
            return True
        return self.ended is not None and self.status is None and not self.said

    @property
    def lost_a_peer(self) -> bool:
        """Whether it says itself that another process was gone before it."""
        return self.raised is not None and PEER_LOST.search(f"{self.raised.type}: {self.raised.message}") is not None

    @property
    def end(self) -> str:
        """How it ended, for a reader."""
        if self.raised is not None:
            first = self.raised.message.split("\n", 1)[0][:_MOST]
            return f"raised {self.raised.name}: {first}" if first else f"raised {self.raised.name}"
        if self.status is not None:
            return f"was ended by {signal_name(-self.status)}" if self.status < 0 else f"ended with {self.status}"
        if self.said:
            return "ended by itself"
        return "had not ended" if self.ended is None else "ended without a word: by a signal, or by os._exit"

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "pid": self.pid,
            "code": self.status if self.status is not None and self.status >= 0 else None,
            "signal": -self.status if self.status is not None and self.status < 0 else None,
            "raised": None if self.raised is None else {"type": self.raised.type, "message": self.raised.message},
            "end": self.end,
        }


def processes(
    lines: Iterable[Mapping[str, Any]], sightings: Mapping[int, Sighting], log: str = ""
) -> tuple[Process, ...]:
    """The processes of a run, in the order in which they began.

    Args:
        lines: what they said, see `triptych.ends`.
        sightings: what was seen of their ends.
        log: what the run printed: a launcher's summary in it tells the status of what nobody saw.
    """
    said: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        if line.get("kind") == "began" or line["pid"] in said:
            said.setdefault(line["pid"], []).append(line)
    summary = {int(pid): int(status) for status, pid in _SUMMARY.findall(log)}
    return tuple(_process(pid, own, sightings.get(pid), summary.get(pid)) for pid, own in said.items())


def ranks(found: Iterable[Process]) -> tuple[Process, ...]:
    """Those that are ranks of a job of several: not launchers, and not the helpers that a rank forked or spawned.

    Empty for a job of one process.
    """
    known = {each.pid: each for each in found}

    def is_helper(each: Process) -> bool:
        parent = known.get(each.parent)
        return parent is not None and parent.rank == each.rank

    own = tuple(each for each in known.values() if each.rank is not None and not is_helper(each))
    return own if len({each.rank for each in own}) > 1 else ()


def first_failure(found: Iterable[Process]) -> Process | None:
    """The rank that failed first; None when none did, or the job has one process."""
    failed = [each for each in ranks(found) if each.failed]
    if any(each.ended is None and each.status not in _BY_LAUNCHER for each in failed):
        failed = [each for each in failed if not each.lost_a_peer]  # nobody saw when, but they were not the first
    return min(failed, key=_moment, default=None)


def _moment(each: Process) -> float:
    """When it failed, in seconds; infinite where nobody saw it."""
    return inf if each.ended is None else each.ended + (_LATE if each.lost_a_peer else 0.0)


def _process(pid: int, lines: list[Mapping[str, Any]], seen: Sighting | None, status: int | None) -> Process:
    """One process, from its own lines, what was seen of it, and what its launcher said."""
    began = lines[0]
    exceptions = [line for line in lines if line.get("kind") == "raised"]
    last = [line["time"] for line in lines if line.get("kind") == "ended"]
    main = next((line for line in exceptions if line.get("thread") is None), None)
    times = [line["time"] for line in ([main] if main else [])] + last + ([seen.time] if seen else [])
    if seen is not None and seen.status is not None:
        status = seen.status
    return Process(
        pid,
        began["parent"],
        next((line["rank"] for line in reversed(lines) if line["rank"] is not None), None),
        began["time"],
        None if main is None else Raised(main["type"], main["message"]),
        tuple((each["thread"], Raised(each["type"], each["message"])) for each in exceptions if each.get("thread")),
        min(times, default=None),
        bool(last),
        status,
    )
