"""Watching the processes of a run: when each of them ended, and how, whoever started it.

The processes are those that a file of `triptych.ends` names. A descriptor of each says at once when it ends. Its exit
status belongs to its parent; until the parent has asked for it, we can read it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_PAUSE = 0.05
"""Seconds between two looks for processes that are new in the file."""


@dataclass(frozen=True)
class Sighting:
    """The end of a process, as seen from outside.

    Attributes:
        time: when it was seen, in seconds since 1970: milliseconds after it happened.
        status: the exit status, negative for a signal; None where its parent was faster than we were.
    """

    time: float
    status: int | None


class Witness:
    """Watches the processes that are named in a file while a `with` block lasts.

    Args:
        path: the file, which need not exist yet. None: nothing is watched.

    Attributes:
        sightings: by process number: those that have ended so far. Not to be read before `stop`.
    """

    def __init__(self, path: Path | None) -> None:
        self.sightings: dict[int, Sighting] = {}
        self._path = path
        self._offset = path.stat().st_size if path is not None and path.exists() else 0
        self._watched: dict[int, int] = {}
        self._poll = select.poll()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="triptych-witness", daemon=True)

    def __enter__(self) -> Witness:
        if self._path is not None and hasattr(os, "pidfd_open"):  # Linux
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> dict[int, Sighting]:
        """Look once more, and no more after that: what is ended from now on is not the run's own doing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched.clear()
        return self.sightings

    def _watch(self) -> None:
        while True:
            last = self._stop.is_set()
            self._meet()
            for descriptor, _ in self._poll.poll(0 if last else 1000 * _PAUSE):
                self._see(descriptor)
            if last:
                return

    def _meet(self) -> None:
        """Watch the processes that are new in the file."""
        assert self._path is not None
        data = _read(self._path, self._offset)
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in _lines(whole):
            if line.get("kind") != "began":
                continue
            try:
                descriptor = os.pidfd_open(line["pid"])
            except ProcessLookupError:  # it is gone already, and its parent has been told
                self.sightings.setdefault(line["pid"], Sighting(time.time(), None))
            except OSError:
                continue  # no more descriptors: this one is not watched
            else:
                self._watched[descriptor] = line["pid"]
                self._poll.register(descriptor, select.POLLIN)

    def _see(self, descriptor: int) -> None:
        pid = self._watched.pop(descriptor)
        self.sightings[pid] = Sighting(time.time(), _status(pid))
        self._poll.unregister(descriptor)
        os.close(descriptor)


def records(path: Path, start: int = 0) -> list[dict[str, Any]]:
    """The records in a file of `triptych.ends`, from byte `start` on; none where there is no file."""
    return _lines(_read(path, start))


def _status(pid: int) -> int | None:
    """The exit status of a process that has ended and was not waited for yet, from the last field of its stat."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if state == "Z":
            return os.waitstatus_to_exitcode(int(fields[48]))
    return None


def _read(path: Path, start: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except OSError:
        return b""


def _lines(data: bytes) -> list[dict[str, Any]]:
    """The records in whole lines; what is no record of ours is passed over: it is somebody else's program's file."""
    found = []
    for text in data.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("pid"), int):
                found.append(line)
    return found
