"""`triptych bisect` on jobs of two ranks, under real launchers: what goes wrong on rank 1 alone is pinned to rank 1.

The faulty backend strikes in one call of one layer on rank 1; rank 0 then waits in a collective, loses its connection,
or is ended by the launcher. Bad policies give the faulty backend few calls, so that a search takes few trials: each
starts a launcher and two processes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from triptych.run.process import run_trial
from triptych.run.ranks import first_failure, processes, ranks
from triptych.run.witness import records
from triptych.trace import read

BACKEND = '''
import os, signal, time
from triptych.backend import Backend
from triptych.composite import backend as composite

FAULT, WHERE = os.environ.get("PLANTED", ""), os.environ.get("PLANTED_ON", "1")

def due(x):
    """The step is the number of rows, the layer the number of columns: one call of one layer."""
    return x.shape == (2, 12) and (WHERE == "every" or os.environ.get("RANK") == WHERE)

def strike(x):
    if FAULT == "exception":
        raise RuntimeError(f"planted in {tuple(x.shape)}")
    if FAULT == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if FAULT == "exit":
        os._exit(7)
    if FAULT == "hang":
        time.sleep(600)

def forward(x, weight, *scalars):
    y, rstd = composite.implementation("rms_norm", "forward")(x, weight, *scalars)
    if due(x) and FAULT == "nan":
        y[0, 0] = float("nan")
    return y, rstd

def backward(dy, x, *rest):
    if due(x):
        strike(x)
    return composite.implementation("rms_norm", "backward")(dy, x, *rest)

class Planted(Backend):
    def __init__(self):
        super().__init__("planted", "planted")

    def ops(self):
        return ("rms_norm",)

    def implementation(self, op, phase):
        return {"forward": forward, "backward": backward}[phase]

backend = Planted()
'''

JOB = """
import os, pathlib, sys, time
import torch, triptych
import torch.distributed as dist
from triptych.layers import RMSNorm

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = RMSNorm(8), RMSNorm(12)

    def forward(self, x):
        return self.second(torch.nn.functional.pad(self.first(x), (0, 4)))

def train(meet):
    torch.manual_seed(0)
    model = Model()
    for step in range(1, 4):
        model(torch.randn(step, 8)).pow(2).sum().backward()
        for parameter in model.parameters():
            meet(parameter.grad)

met = 0

def patient(grad):
    # Waits for the other rank in a way that does not notice its death, as a collective of NCCL would.
    global met
    met += 1
    pathlib.Path(f"{sys.argv[1]}/{os.environ['RANK']}-{met}").touch()
    while not pathlib.Path(f"{sys.argv[1]}/{1 - int(os.environ['RANK'])}-{met}").exists():
        time.sleep(0.01)

torch.set_num_threads(1)
if len(sys.argv) > 1:
    train(patient)
else:
    dist.init_process_group("gloo")
    train(dist.all_reduce)
    dist.destroy_process_group()
"""

ALONE = """
import os, subprocess, sys, tempfile

with tempfile.TemporaryDirectory() as folder:
    program = [sys.executable, "job.py", folder]
    ranks = [subprocess.Popen(program, env={**os.environ, "RANK": str(n), "WORLD_SIZE": "2"}) for n in range(2)]
    sys.exit(any([rank.wait() for rank in ranks]))  # one after the other
"""

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "job.py")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
              "--dynamo_backend", "no", "--main_process_port", "0", "job.py")  # fmt: skip
BACKWARD = "torch;rms_norm.backward@second#2:4=planted"
FORWARD = "torch;rms_norm.forward@second#2:4=planted"  # one call: number 3, in step 2


class Yard:
    """A folder with the job and the planted backend."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "planted_backend.py").write_text(BACKEND)
        (folder / "job.py").write_text(JOB)
        (folder / "alone.py").write_text(ALONE)
        info = folder / "planted-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[triptych.backends]\nplanted = planted_backend:backend\n")

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")}
        paths = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(self.folder), kept.get("PYTHONPATH")))),
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", ""))),
        }
        return {**kept, **paths, "OMP_NUM_THREADS": "1", **variables}

    def bisect(
        self, *options: str, bad: str, command: tuple[str, ...] = TORCHRUN, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "triptych", "bisect", "--json", "verdict.json", "--bad", bad, *options]
        return subprocess.run(
            [*program, "--", *command],
            cwd=self.folder,
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=900,
        )

    def patience(self, *command: str) -> str:
        """A time limit for runs of a command: three times what one takes now, with what else goes on here."""
        began = time.monotonic()
        environment = self.environment(TRIPTYCH_BACKEND="torch")
        subprocess.run(command, cwd=self.folder, env=environment, check=True, capture_output=True, timeout=120)
        return str(round(max(10.0, 3 * (time.monotonic() - began)), 1))

    @property
    def verdict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "verdict.json").read_text())
        return found

    def left(self) -> list[str]:
        """What still runs in the folder."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    return Yard(tmp_path)


def assert_isolated(yard: Yard, done: subprocess.CompletedProcess[str], phase: str, rank: int | None) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = yard.verdict
    assert verdict["verdict"] == "isolated"
    (culprit,) = verdict["culprits"]
    found = {name: culprit[name] for name in ("op", "phase", "layer", "call", "rank", "backend")}
    assert found == {
        "op": "rms_norm",
        "phase": phase,
        "layer": "second",
        "call": 3,
        "rank": rank,
        "backend": "planted",
    }
    assert verdict["workaround"] is not None and "%" not in verdict["workaround"]
    assert not yard.left()
    return verdict


def ran_planted_on(yard: Yard, trial: int, *ranks: int) -> bool:
    """Whether the traced trial ran the planted backend on these ranks, and on no other."""
    calls = read(yard.folder / f".triptych-bisect/trials/{trial:03d}/run-1.trace.jsonl").calls
    return {call.rank for call in calls} == {0, 1} and {c.rank for c in calls if c.backend == "planted"} == set(ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "signature", "launcher"),
    [
        ("exception", "RuntimeError: planted in (N, N)", TORCHRUN),
        ("signal", "memory fault", ("torchrun", *TORCHRUN[3:])),
        pytest.param(
            "exception", "RuntimeError: planted in (N, N)", ACCELERATE,
            marks=pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate; run `nox -s accelerate`"),
            id="accelerate",
        ),
    ],
)  # fmt: skip
def test_a_rank_that_dies(yard: Yard, fault: str, signature: str, launcher: tuple[str, ...]) -> None:
    """Rank 0 says that a peer has closed the connection; the launcher ends it, and itself with 1 whatever happened."""
    done = yard.bisect(bad=BACKWARD, command=launcher, PLANTED=fault)
    verdict = assert_isolated(yard, done, "backward", 1)
    assert verdict["signature"] == signature
    assert verdict["trials"] == 7
    assert [each["rank"] for each in verdict["evidence"] if each["verdict"] == "fail"] == [1, 1, 1]
    assert ran_planted_on(yard, 1)
    assert 1 in {call.rank for call in read(yard.folder / ".triptych-bisect/trials/002/run-1.trace.jsonl").calls}
    assert verdict["capture"].endswith("rms_norm.backward.3.rank1")
    assert verdict["workaround"] == f"{BACKWARD};rms_norm.backward=torch"
    assert "rms_norm.backward in layer 'second' call 3 of rank 1 on 'planted'" in done.stdout


@pytest.mark.slow
def test_ranks_that_die_alike(yard: Yard) -> None:
    done = yard.bisect(bad=BACKWARD, PLANTED="exception", PLANTED_ON="every")
    verdict = assert_isolated(yard, done, "backward", None)
    assert verdict["culprits"][0]["ranks"] == [0, 1]
    assert verdict["culprits"][0]["alike"] is True
    assert verdict["trials"] == 7


@pytest.mark.slow
def test_nan_on_one_rank(yard: Yard) -> None:
    """The check raises on rank 1; without it, the reduction would carry the NaN to rank 0."""
    done = yard.bisect("--fail-on", "nonfinite", bad=FORWARD, PLANTED="nan")
    verdict = assert_isolated(yard, done, "forward", 1)
    assert verdict["signature"] == "nonfinite rms_norm.forward"
    assert verdict["trials"] == 7


@pytest.mark.slow
def test_a_hang_on_one_rank(yard: Yard) -> None:
    seconds = yard.patience(*TORCHRUN)
    done = yard.bisect("--fail-on", "timeout", "--timeout", seconds, bad=BACKWARD, PLANTED="hang")
    verdict = assert_isolated(yard, done, "backward", 1)
    assert verdict["signature"] == "timeout"
    assert verdict["trials"] == 7
    assert (
        "When the time was up, rank 1 was in rms_norm.backward call 3 in layer 'second', or had just left it. Others "
        "had gone on to rank 0: rms_norm.backward call 2 in layer 'first'."
    ) in verdict["notes"]


@pytest.mark.slow
def test_a_rank_that_dies_while_nobody_looks(yard: Yard) -> None:
    """The other rank, and what started both, wait until the time is up: that is the failure of rank 1, and no hang."""
    command = (sys.executable, "alone.py")
    seconds = yard.patience(*command)
    done = yard.bisect("--timeout", seconds, bad=BACKWARD, command=command, PLANTED="exit")
    verdict = assert_isolated(yard, done, "backward", 1)
    assert verdict["signature"] == "exit status 7"
    assert verdict["trials"] == 7
    assert min(each["seconds"] for each in verdict["evidence"] if each["verdict"] == "fail") >= float(seconds)


@pytest.mark.slow
def test_the_tree_of_a_hung_launcher_ends_and_only_it(yard: Yard) -> None:
    """torchrun starts its workers in sessions of their own."""
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], cwd=yard.folder)
    ends = yard.folder / "ends.jsonl"
    policy = BACKWARD.replace("#2:4", "#3%1")
    environment = yard.environment(PLANTED="hang", TRIPTYCH_BACKEND=policy, TRIPTYCH_ENDS=str(ends))
    try:
        outcome = run_trial(
            TORCHRUN, environment, float(yard.patience(*TORCHRUN)), yard.folder / "log", cwd=yard.folder, ends=ends
        )
        assert outcome.timed_out
        assert outcome.leftovers == 3, outcome.tail
        found = processes(records(ends), outcome.sightings)
        assert {each.rank for each in ranks(found)} == {0, 1}
        assert first_failure(found) is None
        assert [command for command in yard.left() if "time.sleep(300)" not in command] == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
