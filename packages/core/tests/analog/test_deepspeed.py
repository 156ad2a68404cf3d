"""Weight clipping under DeepSpeed, which trains float32 copies of the weights: the copies must be clipped, and once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed; run `nox -s deepspeed`"
)
JOB = Path(__file__).with_name("deepspeed_job.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype", "processes"),
    [(1, "bfloat16", 1), (2, "bfloat16", 2), (2, "float32", 2), (3, "bfloat16", 2)],
)
def test_masters_are_clipped_once_a_step(stage: int, dtype: str, processes: int, tmp_path: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "TRIPTYCH_BACKEND": "composite"}
    arguments = [str(processes), str(tmp_path / "rendezvous")]
    jobs = [
        subprocess.Popen(
            [sys.executable, str(JOB), str(stage), dtype, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [job.communicate(timeout=300)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for job, output in zip(jobs, outputs, strict=True):
        assert job.returncode == 0 and "agreed" in output, output
