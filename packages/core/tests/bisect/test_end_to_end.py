"""`triptych bisect` on a real job with a faulty third-party backend: what is shown and left, and the other verdicts.

The faults by predicate are bisected in tests/test_shaky_bisect.py of the workspace, on a training job. Most bad policies
give the faulty backend few calls, so that a search takes few trials: each costs an import of torch. The fault is in the
third step (call 7 of its phase) of the second layer.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest
from workshop import Workshop

FORWARD = "torch;rms_norm.forward@blocks.1.*#4:8=planted"  # two calls: 4 and 7
BACKWARD = "torch;rms_norm.backward#7=planted"
AT_FAULT = ("rms_norm", "backward", "blocks.1.norm", 7)


def assert_isolated(workshop: Workshop, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert workshop.verdict["verdict"] == "isolated"
    assert {each["backend"] for each in workshop.verdict["culprits"]} == {"planted"}
    assert f'TRIPTYCH_BACKEND="{workshop.verdict["workaround"]}"' in done.stdout
    assert "Verdict: isolated" in done.stdout


@pytest.mark.slow
def test_an_exception_under_the_whole_backend(workshop: Workshop) -> None:
    done = workshop.bisect(bad="planted", PLANTED="exception")
    assert_isolated(workshop, done)
    assert workshop.culprits == [AT_FAULT]
    assert workshop.verdict["signature"] == "RuntimeError: planted in (N, N) at <address>"
    assert workshop.verdict["workaround"] == "planted;rms_norm.backward=torch"
    assert workshop.verdict["culprits"][0]["replay"] == "raises"
    assert workshop.verdict["trials"] <= 11
    assert "trial 1 good: pass" in done.stderr
    assert "candidates left" in done.stderr
    # The workaround is what was proved: the job passes with it, and the planted forward still runs.
    cured = workshop.run(workshop.verdict["workaround"], PLANTED="exception")
    assert cured.returncode == 0
    assert cured.stdout == "ran on ['planted', 'torch']\n"
    # The captured call stands alone.
    replayed = subprocess.run(
        [*workshop.command()[:3], "replay", workshop.verdict["capture"]],
        cwd=workshop.folder, env=workshop.environment(PLANTED="exception"), capture_output=True, text=True,
    )  # fmt: skip
    assert replayed.returncode == 1
    assert "it raised RuntimeError: planted in (3, 12)" in replayed.stdout
    state = json.loads((workshop.state / "session.json").read_text())
    assert state["bad"] == "planted"
    names = {path.name for path in workshop.folder.iterdir()} - {"__pycache__"}
    assert names == {"job.py", "planted_backend.py", "planted-1.0.dist-info", "verdict.json", ".triptych-bisect"}


@pytest.mark.slow
def test_a_wrong_value(workshop: Workshop) -> None:
    assert_isolated(
        workshop, workshop.bisect("--fail-on", "mismatch=1e-3", bad="torch;rms_norm.forward#7=planted", PLANTED="wrong")
    )
    assert workshop.culprits == [("rms_norm", "forward", "blocks.1.norm", 7)]
    assert workshop.verdict["signature"] == "mismatch rms_norm.forward"


@pytest.mark.slow
def test_a_script_decides_and_a_run_that_never_fails_is_not_reproduced(workshop: Workshop) -> None:
    check = workshop.folder / "check.sh"
    check.write_text('#!/bin/sh\necho "$BISECT_STATUS, $TRIPTYCH_BACKEND"\n! grep planted "$1"\n')
    check.chmod(0o755)
    done = workshop.bisect("--fail-on", "command=./check.sh", bad=FORWARD)
    assert_isolated(workshop, done)
    assert workshop.culprits == [("rms_norm", "forward", "blocks.1.norm", 4)]
    said = (workshop.state / "trials" / "002" / "run-1.script.log").read_text()
    assert said.startswith(f"exit status 0, {FORWARD}")
    done = workshop.bisect("--state", "other", bad="planted")
    assert done.returncode == 1
    assert workshop.verdict["verdict"] == "not-reproduced"
    assert workshop.verdict["trials"] == 2


@pytest.mark.slow
def test_a_reason_outside_the_backends(workshop: Workshop) -> None:
    done = workshop.bisect(bad="planted", JOB="outside")
    assert done.returncode == 1
    assert workshop.verdict["verdict"] == "not-a-backend"
    assert workshop.verdict["signature"] == "ValueError: loss is N"


@pytest.mark.slow
def test_ctrl_c_ends_the_trial_and_resume_goes_on(workshop: Workshop) -> None:
    """Interrupted while the bad run hangs, on a thread of its own."""
    options = ("--bad", BACKWARD, "--fail-on", "timeout", "--timeout", "300", "--jobs", "2")
    running = subprocess.Popen(
        workshop.command(*options), cwd=workshop.folder, env=workshop.environment(PLANTED="hang"),
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    trials = workshop.state / "trials"
    deadline = time.monotonic() + 120
    while not (trials / "002" / "run-1.trace.jsonl").exists() or not (trials / "001" / "trial.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "triptych: interrupted; the running trial was ended" in said
    assert (
        "  triptych bisect --resume --bad 'torch;rms_norm.backward#7=planted' --fail-on timeout --timeout 300.0" in said
    )
    assert [path.name for path in trials.iterdir()] == ["001"]
    assert not _processes_in(workshop)

    first = (trials / "001" / "trial.json").stat().st_mtime_ns
    refused = workshop.bisect(*options[2:], bad=BACKWARD)
    assert refused.returncode == 2
    assert "holds a bisection already. Continue it with --resume" in refused.stderr
    again = workshop.bisect("--resume", *options[2:], bad=BACKWARD)
    assert again.returncode == 1
    assert workshop.verdict["verdict"] == "not-reproduced"  # nothing is planted this time
    assert (trials / "001" / "trial.json").stat().st_mtime_ns == first


def _processes_in(workshop: Workshop) -> list[str]:
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(workshop.folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
