"""Running one command as if we were not there: its input and output are ours, signals reach it, its end is ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from triptych.errors import UsageError

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Exit:
    """How a command ended: its exit status, or the signal that ended it."""

    code: int | None
    signal: int | None

    @property
    def status(self) -> int:
        """The exit status a shell would give: 128 + n for signal n."""
        if self.code is not None:
            return self.code
        assert self.signal is not None
        return 128 + self.signal


def run_command(command: Sequence[str], env: Mapping[str, str]) -> Exit:
    """Run `command` with our standard streams, in our process group, and wait for its end.

    SIGTERM and SIGHUP that reach us are passed on. So is SIGINT, unless it is from the keyboard, which sends it to the
    command as well.

    Raises:
        UsageError: the command could not be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with _forwarding() as start:
        try:
            process = start(command, env)
        except OSError as cause:
            raise UsageError(f"{command[0]!r} could not be started: {cause.strerror}. Check the command.") from cause
        status = process.wait()
    return Exit(status, None) if status >= 0 else Exit(None, -status)


Start = Callable[[Sequence[str], Mapping[str, str]], "subprocess.Popen[bytes]"]


@contextmanager
def _forwarding() -> Iterator[Start]:
    """Yield a function that starts a process to which signals are passed on, those included that came before it."""
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and _in_foreground():
            return
        if not children:
            early.append(number)
        for child in children:
            child.send_signal(number)

    def start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        children.append(subprocess.Popen(list(command), env=dict(env)))
        for number in early:
            children[0].send_signal(number)
        return children[0]

    # What is ignored stays ignored: nohup ignores SIGHUP, and so will the command.
    before = {each: signal.getsignal(each) for each in FORWARDED}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, forward)
    try:
        yield start
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether our process group is the one that the terminal's keys interrupt."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
