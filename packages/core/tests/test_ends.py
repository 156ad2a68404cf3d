"""How processes end: what they say themselves, what is seen of them from outside, and which rank failed first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from triptych.run.process import run_trial
from triptych.run.ranks import Process, Raised, first_failure, processes, ranks
from triptych.run.witness import Sighting, Witness, records

PYTHON = sys.executable


def run(tmp_path: Path, code: str, timeout: float = 60, **variables: str) -> tuple[Process, ...]:
    """The processes of a program, as a trial sees them."""
    program, ends, log = tmp_path / "program.py", tmp_path / "ends.jsonl", tmp_path / "log"
    program.write_text(textwrap.dedent(code))
    environment = {**os.environ, "TRIPTYCH_ENDS": str(ends), "OMP_NUM_THREADS": "1", **variables}
    outcome = run_trial([PYTHON, str(program)], environment, timeout, log, ends=ends)
    return processes(records(ends), outcome.sightings, outcome.tail)


def kinds(tmp_path: Path) -> list[str]:
    return [line["kind"] for line in records(tmp_path / "ends.jsonl")]


# --- what a process says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said", "end"),
    [
        ("pass", ["began", "ended"], "ended with 0"),
        ("import sys; sys.exit(3)", ["began", "ended"], "ended with 3"),
        ("raise ValueError('loss is nan\\nat step 3')", ["began", "raised", "ended"], "raised ValueError: loss is nan"),
        ("import os; os._exit(7)", ["began"], "ended with 7"),
        ("import os; os.kill(os.getpid(), 11)", ["began"], "was ended by SIGSEGV"),
    ],
)
def test_each_end_is_told_or_seen(tmp_path: Path, code: str, said: list[str], end: str) -> None:
    (process,) = run(tmp_path, f"import triptych\n{code}")
    assert kinds(tmp_path) == said
    assert process.end == end
    assert process.rank is None
    assert process.failed is (end != "ended with 0")
    assert process.ended is not None
    assert process.began < process.ended <= time.time()
    assert ranks([process]) == ()
    assert first_failure([process]) is None


def test_the_hooks_of_others_still_run(tmp_path: Path) -> None:
    code = """
        import sys, threading
        sys.excepthook = lambda *args: print("before", args[0].__name__)
        threading.excepthook = lambda args: print("thread before", args.exc_type.__name__)
        import triptych
        inner = sys.excepthook
        sys.excepthook = lambda *args: (print("after"), inner(*args))
        thread = threading.Thread(target=lambda: 1 / 0, name="loader")
        thread.start()
        thread.join()
        raise KeyError("x")
    """
    (process,) = run(tmp_path, code)
    assert (tmp_path / "log").read_text() == "thread before ZeroDivisionError\nafter\nbefore KeyError\n"
    assert process.raised == Raised("builtins.KeyError", "'x'")
    assert process.in_threads == (("loader", Raised("builtins.ZeroDivisionError", "division by zero")),)


def test_an_exception_whose_text_fails_is_told_too(tmp_path: Path) -> None:
    code = """
        import triptych
        class Odd(Exception):
            def __str__(self):
                raise RuntimeError
        raise Odd
    """
    (process,) = run(tmp_path, code)
    assert process.raised == Raised("__main__.Odd", "(its text cannot be had: RuntimeError)")


CHILDREN = """
    import multiprocessing, os, sys
    import triptych

    def work(how):
        os.environ["RANK"] = "1"
        if how == "raise":
            raise ValueError("in a child")
        if how == "exit":
            sys.exit(3)
        if how == "signal":
            os.kill(os.getpid(), 6)

    def spawned(rank):
        os.environ["RANK"] = str(rank)
        raise ValueError("in a child")

    if __name__ == "__main__":
        how, method = sys.argv[1:] if len(sys.argv) > 1 else ("{how}", "{method}")
        if how == "spawn":
            import torch.multiprocessing

            torch.multiprocessing.spawn(spawned, nprocs=1)
        child = multiprocessing.get_context(method).Process(target=work, args=(how,))
        child.start()
        child.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(
    ("how", "end"),
    [("raise", "raised ValueError: in a child"), ("exit", "ended"), ("signal", "was ended by SIGABRT"), ("", "ended")],
)
def test_children_of_multiprocessing_tell_it_too(tmp_path: Path, how: str, end: str, method: str) -> None:
    """They run neither excepthook nor atexit. Their parent waits for them, and may be faster than we are."""
    parent, child = run(tmp_path, CHILDREN.replace("{how}", how).replace("{method}", method))
    assert child.parent == parent.pid
    assert child.ended is not None
    if how == "signal":
        assert child.end in (end, "ended without a word: by a signal, or by os._exit")
        assert child.failed
    else:
        assert child.end.startswith(end)
        assert child.said
        assert child.rank == 1
    assert child.raised == (Raised("builtins.ValueError", "in a child") if how == "raise" else None)
    assert parent.raised is None


def test_children_of_torch_multiprocessing_tell_what_they_raised(tmp_path: Path) -> None:
    """Its spawn handles the exception and exits with 1."""
    found = run(tmp_path, CHILDREN.replace("{how}", "spawn").replace("{method}", ""))
    (child,) = [each for each in found if each.rank == 0]
    assert child.raised == Raised("builtins.ValueError", "in a child")


def test_the_rank_is_that_of_the_process_group_once_there_is_one(tmp_path: Path) -> None:
    code = """
        import os, torch, triptych
        import torch.distributed as dist
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        triptych.rms_norm(torch.ones(2, 8))
        dist.destroy_process_group()
        os._exit(0)
    """
    (process,) = run(tmp_path, code)
    assert kinds(tmp_path) == ["began", "rank"]
    assert process.rank == 0


def test_nothing_is_recorded_unasked_and_a_file_that_cannot_be_written_stops_the_first_call(tmp_path: Path) -> None:
    code = """
        import sys, threading, torch, triptych
        assert sys.excepthook is sys.__excepthook__
        assert threading.excepthook is threading.__excepthook__
        try:
            triptych.rms_norm(torch.ones(2, 8))
        except triptych.EnvironmentVariableError as error:
            print(error)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(code))
    for path, said in (("", ""), ("/missing/ends", "TRIPTYCH_ENDS is '/missing/ends': No such file or directory.")):
        environment = {**os.environ, "TRIPTYCH_ENDS": path, "TRIPTYCH_BACKEND": "composite"}
        done = subprocess.run(
            [PYTHON, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(said)
        assert bool(done.stdout) is bool(said)


# --- what is seen -----------------------------------------------------------------------------------------------------


def test_the_status_of_somebody_elses_child_is_seen_while_it_is_a_zombie(tmp_path: Path) -> None:
    """The parent sleeps and does not look; the order of the ends is that in which they happened."""
    code = """
        import os, signal, time
        import triptych
        first = os.fork()
        if first == 0:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGBUS)
        if os.fork() == 0:
            os._exit(9)
        time.sleep(300)
    """
    parent, *children = run(tmp_path, code, timeout=6)
    assert parent.ended is None
    assert parent.end == "had not ended"
    assert not parent.failed
    assert sorted(each.end for each in children) == ["ended with 9", "was ended by SIGBUS"]
    assert min(children, key=lambda each: each.ended or 0).status == 9


def test_a_witness_sees_what_is_gone_before_it_looked(tmp_path: Path) -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    ends = tmp_path / "ends"
    with Witness(ends) as witness:
        ends.write_text(f'{{"kind":"began","schema":1,"pid":{done.pid},"parent":1,"rank":0,"time":1.0}}\nnot ours\n')
        time.sleep(0.2)
    assert witness.sightings[done.pid].status is None
    (process,) = processes(records(ends), witness.sightings)
    assert process.failed
    assert process.end == "ended without a word: by a signal, or by os._exit"


# --- which rank failed first ------------------------------------------------------------------------------------------

PEER = Raised("builtins.RuntimeError", "[pair.cc:553] Connection closed by peer [127.0.0.1]:41858.")
VALUE = Raised("builtins.ValueError", "loss is nan")


def rank(number: int, **how: Any) -> Process:
    return Process(**{"pid": 100 + number, "parent": 1, "rank": number, "began": 0.0, **how})


@pytest.mark.parametrize(
    ("case", "first"),
    [
        # An exception; the other loses its connection, and the launcher ends it.
        ([rank(0, raised=PEER, ended=1.01, status=-15), rank(1, raised=VALUE, ended=1.0)], 1),
        # A signal, seen a little later than the other noticed it.
        ([rank(0, raised=PEER, ended=1.0), rank(1, status=-11, ended=1.02)], 1),
        # The launcher ends the others a moment later.
        ([rank(0, status=-15, ended=1.2), rank(1, status=-11, ended=1.0), rank(2, status=-9, ended=3.0)], 1),
        ([rank(0, raised=VALUE, ended=1.0), rank(1, status=-15, ended=1.05)], 0),
        # os._exit, whose status nobody could read.
        ([rank(0, raised=PEER, ended=1.0), rank(1, ended=1.03)], 1),
        # Killed by the kernel, for memory; the watchdog of the other aborts it later.
        ([rank(0, status=-6, ended=9.0), rank(1, status=-9, ended=1.0)], 1),
        # Only connections were lost: the first who noticed.
        ([rank(0, raised=PEER, ended=2.0), rank(1, raised=PEER, ended=1.0)], 1),
        # One returned early, the other still waits.
        ([rank(0), rank(1, said=True, status=0, ended=1.0)], None),
        ([rank(0), rank(1, said=True, ended=1.0)], None),
        # Nobody was watched: a launcher's summary says how, but not when.
        ([rank(0, raised=PEER, ended=1.0, status=-15), rank(1, status=-11)], 1),
        # All are well, or none is a rank.
        ([rank(0, status=0, ended=1.0), rank(1, status=0, ended=1.0)], None),
        ([rank(0, raised=VALUE, ended=1.0)], None),
    ],
)
def test_which_rank_failed_first(case: list[Process], first: int | None) -> None:
    for order in (case, case[::-1]):
        found = first_failure(order)
        assert (None if found is None else found.rank) == first


def test_launchers_and_helpers_are_no_ranks() -> None:
    launcher = rank(0, pid=50, rank=None, raised=Raised("torch.ProcessRaisedException", "x"), ended=0.5)
    loader = rank(1, pid=201, parent=101, status=-9, ended=0.6)
    members = [rank(0, parent=50), rank(1, parent=50, raised=VALUE, ended=0.7)]
    assert ranks([launcher, *members, loader]) == tuple(members)
    found = first_failure([launcher, *members, loader])
    assert found is members[1]


SUMMARY = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 100)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -11 (pid: 101)  (SIGSEGV)
"""


def test_a_launchers_summary_tells_what_was_not_seen() -> None:
    lines = [
        {"kind": "began", "schema": 1, "pid": pid, "parent": 1, "rank": pid - 100, "time": 0.0} for pid in (100, 101)
    ]
    seen = {100: Sighting(1.2, None), 101: Sighting(1.0, None)}
    zero, one = processes([*lines, {"kind": "later", "pid": 100, "rank": None}], seen, SUMMARY)
    assert (zero.status, one.status) == (-signal.SIGTERM, -signal.SIGSEGV)
    assert first_failure([zero, one]) is one
