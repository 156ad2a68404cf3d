"""Trials: how a command's end is told, and that its whole tree ends with it, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from triptych.errors import UsageError
from triptych.run import process
from triptych.run.process import MARK, run_trial, signal_name

PYTHON = sys.executable


def run(code: str, tmp_path: Path, timeout: float | None = 60, grace: float = 2.0) -> object:
    return run_trial([PYTHON, "-c", code], dict(os.environ), timeout, tmp_path / "log.txt", grace=grace)


def gone(pid: int) -> bool:
    """Whether a process has ended; an orphan may stay a zombie until whoever adopted it looks."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def numbers(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()]


def test_exit_status_output_and_time(tmp_path: Path) -> None:
    outcome = run("import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(7)", tmp_path)
    assert (outcome.code, outcome.signal, outcome.timed_out) == (7, None, False)
    assert outcome.tail == "out\nerr\n"
    assert outcome.log.read_text() == outcome.tail
    assert 0 < outcome.seconds < 30
    assert outcome.leftovers == 0
    assert str(outcome).startswith("exit status 7 after ")


def test_the_end_by_a_signal(tmp_path: Path) -> None:
    outcome = run("import os; os.abort()", tmp_path)
    assert (outcome.code, outcome.signal, outcome.timed_out) == (None, signal.SIGABRT, False)
    assert str(outcome).startswith("ended by SIGABRT after ")


def test_the_tail_is_the_end_of_the_log(tmp_path: Path) -> None:
    outcome = run("import sys; sys.stdout.buffer.write(b'a' * 100000 + bytes([255]) + b'z')", tmp_path)
    assert len(outcome.tail) == 16384
    assert outcome.tail.endswith("a\N{REPLACEMENT CHARACTER}z")
    assert (tmp_path / "log.txt").stat().st_size == 100002


def test_it_has_no_standard_input_and_the_given_environment_and_directory(tmp_path: Path) -> None:
    code = "import os, sys; print(repr(sys.stdin.read()), os.getcwd(), os.environ.get('OWN'), os.environ.get('HOME'))"
    command = [PYTHON, "-c", code]
    outcome = run_trial(command, {"OWN": "1"}, 60, tmp_path / "log.txt", cwd=tmp_path)
    assert outcome.tail == f"'' {tmp_path} 1 None\n"


TREE = """
import os, subprocess, sys, time
sleep = "import time; time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", sleep])
own_session = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
if os.fork() == 0:
    orphan = os.fork()
    if orphan == 0:
        os.setsid()
        time.sleep(300)
    print(orphan, flush=True)
    os._exit(0)
os.wait()
print(child.pid, own_session.pid, flush=True)
"""


@pytest.mark.parametrize(
    ("end", "timed_out", "leftovers"),
    [("sys.exit(0)", False, 3), ("os.kill(os.getpid(), 9)", False, 3), ("time.sleep(300)", True, 4)],
)
def test_the_whole_tree_ends_and_only_it(tmp_path: Path, end: str, timed_out: bool, leftovers: int) -> None:
    bystander = subprocess.Popen([PYTHON, "-c", "import time; time.sleep(300)"])
    try:
        outcome = run(TREE + end, tmp_path, timeout=3.0 if timed_out else 60)
        pids = numbers(outcome.log)
        assert len(pids) == 3
        assert all(gone(pid) for pid in pids)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert outcome.timed_out is timed_out
    assert outcome.leftovers == leftovers
    if timed_out:
        assert outcome.signal == signal.SIGTERM
        assert 3.0 <= outcome.seconds < 10


def test_what_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(300)"
    began = time.monotonic()
    outcome = run(code, tmp_path, timeout=2.0, grace=0.3)
    assert outcome.tail == "ready\n"
    assert (outcome.timed_out, outcome.signal) == (True, signal.SIGKILL)
    assert time.monotonic() - began < 20


def test_what_handles_sigterm_may_end_by_itself(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(3)));"
        "print('ready', flush=True); time.sleep(300)"
    )
    outcome = run(code, tmp_path, timeout=2.0)
    assert outcome.tail == "ready\nbye\n"
    assert (outcome.timed_out, outcome.code) == (True, 3)


def test_an_interrupt_ends_the_tree_and_passes_on(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"

    def interrupt() -> None:
        wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run("import os, time; print(os.getpid(), flush=True); time.sleep(300)", tmp_path)
    assert all(gone(pid) for pid in numbers(log))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_mark_of_a_trial_is_its_own(tmp_path: Path) -> None:
    marks = {run(f"import os; print(os.environ[{MARK!r}])", tmp_path).tail for _ in range(2)}
    assert len(marks) == 2
    assert MARK not in os.environ


def test_what_cannot_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^'no-such-program' could not be started: No such file or directory\."):
        run_trial(["no-such-program"], dict(os.environ), 1, tmp_path / "log.txt")
    with pytest.raises(UsageError, match=r"log\.txt cannot be written: No such file or directory\."):
        run_trial(["true"], dict(os.environ), 1, tmp_path / "missing" / "log.txt")


def test_names_of_signals() -> None:
    assert signal_name(11) == "SIGSEGV"
    assert signal_name(41) == "signal 41"


def test_what_outlives_sigkill_is_given_up_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_send", lambda processes, number: None)  # as if the kernel held them
    monkeypatch.setattr(process, "KILLED", 0.3)
    code = (
        "import os, subprocess, sys, time; sleep = 'import time; time.sleep(60)';"
        "print(os.getpid(), subprocess.Popen([sys.executable, '-c', sleep]).pid, flush=True);"
        "time.sleep(60)"
    )
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "subprocess .* is still running", ResourceWarning)
        outcome = run(code, tmp_path, timeout=2.0, grace=0.1)
    pids = numbers(outcome.log)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert time.monotonic() - began < 20
    assert outcome.stuck == tuple(sorted(pids))
    assert (outcome.timed_out, outcome.code, outcome.signal, outcome.leftovers) == (True, None, signal.SIGKILL, 2)
    listed = ", ".join(map(str, sorted(pids)))
    assert str(outcome).endswith(f" s; outlived SIGKILL: {listed}")
    (record,) = caplog.records
    assert record.getMessage() == (
        f"Process {listed} outlived SIGKILL for 0.3 seconds and was left behind: the kernel holds it, mostly in a "
        "device's driver. Later runs on that device may fail because of it; restart the machine."
    )


def test_a_leader_that_cannot_be_reaped_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        assert timeout is not None, "nothing bounds the wait"
        raise subprocess.TimeoutExpired("it", timeout)

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "subprocess .* is still running", ResourceWarning)
        patch.setattr(subprocess.Popen, "wait", held)
        outcome = run("import os; print(os.getpid())", tmp_path)
    assert outcome.stuck == tuple(numbers(outcome.log))
    assert (outcome.code, outcome.signal, outcome.leftovers) == (None, signal.SIGKILL, 0)
