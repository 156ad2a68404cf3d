"""train_accelerate.py and train_text.py under `accelerate launch`: two processes, data parallel and ZeRO-2."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

missing = [name for name in ("accelerate", "deepspeed", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}; run `nox -s accelerate`"),
    pytest.mark.slow,
]
ROOT = Path(__file__).parents[1]
SMALL = ("--steps", "6", "--batch", "4", "--length", "16", "--dim", "32", "--heads", "2", "--device", "cpu")


def launched(config: str, script: str, *arguments: str, out: Path, **environment: str) -> tuple[str, list[float]]:
    """What a script printed, and its training losses."""
    launcher = ("-m", "accelerate.commands.launch", "--config_file", f"examples/configs/{config}.yaml")
    job = ("--main_process_port", "0", f"examples/{script}", *arguments, "--out", str(out))
    env = {**os.environ, "COLUMNS": "200", "TRIPTYCH_BACKEND": "composite", **environment}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, *launcher, *job], cwd=ROOT, env=env, **streams) as process:
        try:
            printed, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.terminate()  # then it ends its ranks; killed, it would leave them
            raise
    assert process.returncode == 0, printed
    return printed, json.loads(out.read_text())["history"]["train"]


def test_zero2_trains_the_analog_model_as_ddp_does(tmp_path: Path) -> None:
    ddp = launched("accelerate_ddp", "train_accelerate.py", *SMALL, out=tmp_path / "ddp", ACCELERATE_USE_CPU="true")
    zero2 = launched(
        "accelerate_deepspeed_zero2", "train_accelerate.py", *SMALL, out=tmp_path / "zero2", DS_ACCELERATOR="cpu"
    )
    for (printed, _), wrapper in ((ddp, "DistributedDataParallel"), (zero2, "DeepSpeedEngine")):
        assert f"wrapped in      {wrapper}, on 2 ranks" in printed
        # Two blocks of four analog layers, six steps.
        assert re.search(r"│ analog_linear +│ backward │ composite │ 48 +│ 0-1 ", printed), printed
        assert set(re.findall(r"│ (?:forward|backward) +│ (\w+)", printed)) == {"composite"}
    # Same weights, text and noise. A rounding may move an input to the next of 254 levels; what that does to a mean of
    # 64 bytes' losses is far below a level.
    assert zero2[1] == pytest.approx(ddp[1], rel=1 / 254 / 8)
    assert len(ddp[1]) == 6 and min(ddp[1][-2:]) < ddp[1][0] - 0.5


def test_accelerate_starts_the_ranks_of_train_text(tmp_path: Path) -> None:
    options = (*SMALL, "--parallel", "ddp")
    printed, losses = launched(
        "accelerate_ddp", "train_text.py", *options, out=tmp_path / "out", ACCELERATE_USE_CPU="true"
    )
    assert re.search(r"│ add_rms_norm +│ backward │ composite │ 12 +│ 0-1 ", printed), printed
    assert len(losses) == 6
