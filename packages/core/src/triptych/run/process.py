"""One trial: a command in a session of its own, its output in a file, and nothing of it left behind afterwards."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from triptych.errors import UsageError
from triptych.run.witness import Sighting, Witness

MARK = "_TRIPTYCH_TRIAL"
"""Set to a fresh value in each trial's environment, so that a process that left the session is still known."""

GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL."""

KILLED = 30.0
"""Seconds that a process may take to end after SIGKILL: the kernel frees its memory first, on the GPU too."""

TAIL_BYTES = 16384
"""How much of the end of the log an outcome carries."""


_log = logging.getLogger("triptych.run")


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        code: the exit status, or None when a signal ended the command.
        signal: the number of the signal that ended it, else None.
        timed_out: whether it was ended because its time was up; `signal` is then the one that we sent.
        seconds: wall-clock time from start to the end of the command itself.
        tail: the last 16 KiB of its output, standard error included; undecodable bytes are replaced.
        log: the file that holds all of its output.
        leftovers: how many processes of its tree were still there when the command itself had ended, or timed out.
        stuck: the numbers of those that outlived SIGKILL: the kernel holds them, mostly in a device's driver. Nothing
            that we can do ends them. When the command itself is among them, `signal` is the SIGKILL that it was sent.
        sightings: the ends of the processes that were watched, as far as they came before anything was ended by us.
    """

    code: int | None
    signal: int | None
    timed_out: bool
    seconds: float
    tail: str
    log: Path
    leftovers: int
    stuck: tuple[int, ...] = ()
    sightings: Mapping[int, Sighting] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.timed_out:
            text = f"timed out after {self.seconds:.1f} s"
        elif self.signal is not None:
            text = f"ended by {signal_name(self.signal)} after {self.seconds:.1f} s"
        else:
            text = f"exit status {self.code} after {self.seconds:.1f} s"
        return f"{text}; outlived SIGKILL: {', '.join(map(str, self.stuck))}" if self.stuck else text


def run_trial(
    command: Sequence[str],
    env: Mapping[str, str],
    timeout: float | None,
    log_path: Path,
    *,
    cwd: Path | None = None,
    grace: float = GRACE,
    ends: Path | None = None,
) -> Outcome:
    """Run `command` to its end, or until `timeout`, and end every process that it left.

    The command gets a session of its own and no standard input; standard output and error go to `log_path`, which is
    replaced. Its process tree is everything it started, directly or not: also what was orphaned or made a session of
    its own. That tree, and nothing else, gets SIGTERM and after `grace` seconds SIGKILL: when the time is up, when the
    command has ended and left something, and when this function is left by an exception (KeyboardInterrupt). What
    SIGKILL does not end within 30 seconds is given up, logged and reported.

    Args:
        command: program and arguments; the program is looked up in env's PATH.
        env: the whole environment of the command (add to `os.environ` yourself).
        timeout: seconds, or None for no limit.
        log_path: where its output goes. Its folder must exist.
        cwd: the working directory; None keeps ours.
        grace: seconds between SIGTERM and SIGKILL.
        ends: the file that TRIPTYCH_ENDS names in `env`; the processes that it names are watched. None for none.

    Raises:
        UsageError: the command could not be started, or the log not opened.
    """
    mark = uuid.uuid4().hex
    try:
        log = log_path.open("wb")
    except OSError as cause:
        raise UsageError(
            f"The log {log_path} cannot be written: {cause.strerror}. Name a file in an existing folder."
        ) from cause
    with log, Witness(ends) as witness:
        began = time.monotonic()
        try:
            process = subprocess.Popen(
                list(command),
                env={**env, MARK: mark},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as cause:
            raise UsageError(f"{command[0]!r} could not be started: {cause.strerror}. Check the command.") from cause
        try:
            ended = _wait(process.pid, None if timeout is None else began + timeout)
            seconds = time.monotonic() - began
        finally:
            sightings = witness.stop()
            leftovers, stuck = _end_tree(process.pid, mark, grace)
            status = _reap(process, stuck)
            if status is None:
                stuck = tuple(sorted({*stuck, process.pid}))
                status = -signal.SIGKILL
            if stuck:
                _log.warning(
                    "Process %s outlived SIGKILL for %g seconds and was left behind: the kernel holds it, mostly in a "
                    "device's driver. Later runs on that device may fail because of it; restart the machine.",
                    ", ".join(map(str, stuck)),
                    KILLED,
                )
    return Outcome(
        code=status if status >= 0 else None,
        signal=-status if status < 0 else None,
        timed_out=not ended,
        seconds=seconds,
        tail=tail(log_path),
        log=log_path,
        leftovers=leftovers,
        stuck=stuck,
        sightings=sightings,
    )


def tail(path: Path, size: int = TAIL_BYTES) -> str:
    """The last `size` bytes of a text file; undecodable bytes are replaced."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read().decode("utf-8", "replace")


def signal_name(number: int) -> str:
    """`SIGABRT` for 6; `signal 40` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _wait(pid: int, deadline: float | None) -> bool:
    """Wait for the end of our child `pid`; False when the deadline came first.

    The child is left a zombie: its number, which is also its session's, cannot be given to anybody else while we look
    for what it left.
    """
    pause = 0.001
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        rest = pause if deadline is None else min(pause, deadline - time.monotonic())
        if rest <= 0:
            return False
        time.sleep(rest)
        pause = min(2 * pause, 0.05)
    return True


def _end_tree(leader: int, mark: str, grace: float) -> tuple[int, tuple[int, ...]]:
    """End everything that belongs to the trial. Leaves the leader to be reaped.

    Returns:
        How many processes that were, and the numbers of those that outlived SIGKILL.
    """
    found = _alive(_tree(leader, mark))
    count = len(found)
    deadline = time.monotonic() + grace
    _send(found, signal.SIGTERM)
    while found and time.monotonic() < deadline:
        time.sleep(0.02)
        found = _alive(found)
    deadline = time.monotonic() + KILLED
    pause = 0.01
    # Looked up afresh: what ended last may have started something in the meantime.
    while (found := _alive(_tree(leader, mark))) and time.monotonic() < deadline:
        _send(found, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    return count, tuple(sorted(each.pid for each in found))


def _reap(process: subprocess.Popen[bytes], stuck: tuple[int, ...]) -> int | None:
    """The exit status of the leader; None when it cannot be had.

    A leader that looks ended can still be held by one thread of it that is stuck: then it is never reaped.
    """
    try:
        return process.wait(0 if process.pid in stuck else KILLED)
    except subprocess.TimeoutExpired:
        return None


def _tree(leader: int, mark: str) -> list[psutil.Process]:
    """The trial's processes: the leader's session, its descendants, and whoever carries the mark."""
    members: dict[int, psutil.Process] = {}
    try:
        root = psutil.Process(leader)
        members = {each.pid: each for each in (root, *root.children(recursive=True))}
    except psutil.NoSuchProcess:
        pass
    for process in psutil.process_iter():
        if process.pid not in members and _belongs(process, leader, mark):
            members[process.pid] = process
    return list(members.values())


def _belongs(process: psutil.Process, leader: int, mark: str) -> bool:
    try:
        return os.getsid(process.pid) == leader or process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False  # it has ended, or is somebody else's and so not ours to end


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    alive = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except psutil.NoSuchProcess:
            continue
    return alive


def _send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)  # psutil checks first that the number still belongs to this very process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
