"""How processes end: one line when a process that uses Triptych begins, one when it raises, one when it ends.

`TRIPTYCH_ENDS=FILE` switches it on, for `triptych run` and `triptych bisect`, which watch the processes that the file
names (`triptych.run.witness`): of several ranks, the first one that failed is the one to look at, and what the others
say afterwards is about its absence. Nothing is done per call. Four kinds of lines, schema 1:

    {"kind": "began", "schema": 1, "pid", "parent", "rank", "time"}
    {"kind": "rank", "pid", "rank", "time"}                     what is known of its rank has changed
    {"kind": "raised", "pid", "rank", "time", "thread", "type", "message"}     nobody caught it; thread: null for main
    {"kind": "ended", "pid", "rank", "time"}                    it ended by itself: returned, raised or called sys.exit

`time` is in seconds since 1970; `rank` is null where neither a process group nor RANK says it. A process that a signal
or os._exit ends writes no last line. Within a schema, fields and kinds are only added; readers pass over what they do
not know.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from triptych.errors import EnvironmentVariableError
from triptych.jsonlines import Appender

VARIABLE = "TRIPTYCH_ENDS"
SCHEMA = 1

_MOST = 2000
"""Characters of an exception's message that are kept."""

_recorder: Recorder | None = None


def known_rank() -> int | None:
    """This process's rank: of the default process group, else of the launcher's RANK, else None."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    text = os.environ.get("RANK", "")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def among_several() -> bool:
    """Whether this process is one rank of several, as its process group or its launcher says."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return known_rank() is not None and os.environ.get("WORLD_SIZE", "1").strip() not in ("", "0", "1")


def record_if_asked(environ: Mapping[str, str]) -> None:
    """Start recording when `environ` asks for it. Called when triptych is imported.

    A file that cannot be written is an error of the first call, as with the other variables, not of an import.
    """
    path = environ.get(VARIABLE)
    if path:
        with contextlib.suppress(EnvironmentVariableError, OSError):
            _start(Path(os.path.abspath(path)))


def at_work(path: Path) -> None:
    """The first op is about to run: its process group, if it has one, is there by now.

    Raises:
        EnvironmentVariableError: the file cannot be written.
    """
    _start(path).say_rank()


def _start(path: Path) -> Recorder:
    global _recorder
    if _recorder is None or _recorder.path != path:
        _recorder = Recorder(path)
    return _recorder


class Recorder:
    """Writes the lines of this process and of those that it forks.

    Args:
        path: the file to append to.

    Raises:
        EnvironmentVariableError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._out = Appender(path, VARIABLE)
        self._rank: int | None = None
        self._hook, sys.excepthook = sys.excepthook, self._raised
        self._thread_hook, threading.excepthook = threading.excepthook, self._raised_in_thread
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        # A child that multiprocessing forks forgets its parent's finalisers, and then calls what was registered so.
        multiprocessing.util.register_after_fork(self, Recorder._await_end)

    def say_rank(self) -> None:
        """Tell the rank, if it is not the one that was told."""
        before, now = self._rank, self._current_rank()
        if now != before:
            self._say("rank")

    def _begin(self) -> None:
        self._say("began", schema=SCHEMA, parent=os.getppid())
        self._await_end()

    def _await_end(self) -> None:
        """Have `_ended` called at the end: a finaliser of multiprocessing, which unlike atexit its children run too.

        They run it while what ends them is being handled, and have no excepthook.
        """
        multiprocessing.util.Finalize(None, self._ended, exitpriority=-100)

    def _ended(self) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and error.code:
            error = error.__context__  # torch.multiprocessing.spawn exits with 1 where it has handled an exception
        if error is not None and not isinstance(error, SystemExit):
            self._say_raised(None, error)
        self._say("ended")

    def _raised(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._say_raised(None, error)
        self._hook(kind, error, trace)

    def _raised_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            self._say_raised("?" if args.thread is None else args.thread.name, args.exc_value)
        self._thread_hook(args)

    def _say_raised(self, thread: str | None, error: BaseException) -> None:
        try:
            message = str(error)
        except Exception as cause:
            message = f"(its text cannot be had: {type(cause).__name__})"
        kind = type(error)
        self._say("raised", thread=thread, type=f"{kind.__module__}.{kind.__qualname__}", message=message[:_MOST])

    def _say(self, kind: str, **fields: Any) -> None:
        """Append a line; the end of a program must not fail because of its record."""
        line = {"kind": kind, "pid": os.getpid(), "rank": self._current_rank(), "time": time.time(), **fields}
        with contextlib.suppress(EnvironmentVariableError, UnicodeError):
            self._out.line(line)

    def _current_rank(self) -> int | None:
        """The rank, also after its process group was destroyed."""
        found = known_rank()
        if found is not None:
            self._rank = found
        return self._rank
