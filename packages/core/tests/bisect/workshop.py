"""A job and a faulty backend, small enough to be run a dozen times in a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BACKEND = '''
import os, time
from triptych.backend import Backend
from triptych.composite import backend as composite

FAULT = os.environ.get("PLANTED", "")

def due(x):
    """The step is the number of rows, the layer the number of columns: one call of one layer."""
    return x.shape == (3, 12)

def strike(x):
    if FAULT == "exception":
        raise RuntimeError(f"planted in {tuple(x.shape)} at {id(x):#x}")
    if FAULT == "hang":
        time.sleep(600)

def forward(x, weight, *scalars):
    y, rstd = composite.implementation("rms_norm", "forward")(x, weight, *scalars)
    if due(x) and FAULT == "wrong":
        y *= 1.25
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
import os, sys
import torch, triptych
from triptych.layers import RMSNorm

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = RMSNorm(width, eps=1e-6)

    def forward(self, x):
        return x + self.norm(x)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width) for width in (8, 12, 16))

    def forward(self, x):
        for block in self.blocks:
            x = torch.nn.functional.pad(x, (0, block.norm.normalized_shape[0] - x.shape[-1]))
            x = block(x)
        return x

torch.manual_seed(0)
torch.set_num_threads(1)
model = Model()
for step in range(1, 5):
    model(torch.randn(step, 8)).pow(2).sum().backward()
ran = {row.backend for row in triptych.report().rows}
print("ran on", sorted(ran))
mode = os.environ.get("JOB", "")
if mode == "outside":
    raise ValueError("loss is 17.25")
"""


class Workshop:
    """A folder with the job, the planted backend, and a way to bisect the one for the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "planted_backend.py").write_text(BACKEND)
        (folder / "job.py").write_text(JOB)
        info = folder / "planted-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[triptych.backends]\nplanted = planted_backend:backend\n")

    @property
    def state(self) -> Path:
        return self.folder / ".triptych-bisect"

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")}
        return {**kept, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1", **variables}

    def command(self, *options: str) -> list[str]:
        program = [sys.executable, "-m", "triptych", "bisect", "--json", "verdict.json"]
        return [*program, *options, "--", sys.executable, "job.py"]

    def bisect(self, *options: str, bad: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Bisect the job under the torch and a bad policy; environment variables choose what goes wrong."""
        return subprocess.run(
            self.command("--bad", bad, *options),
            cwd=self.folder,
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=280,
        )

    @property
    def verdict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "verdict.json").read_text())
        return found

    @property
    def culprits(self) -> list[tuple[str, str, str, int]]:
        return [(each["op"], each["phase"], each["layer"], each["call"]) for each in self.verdict["culprits"]]

    def run(self, policy: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """The job alone, under a policy."""
        return subprocess.run(
            [sys.executable, "job.py"],
            cwd=self.folder,
            env=self.environment(TRIPTYCH_BACKEND=policy, **variables),
            capture_output=True,
            text=True,
            timeout=60,
        )
