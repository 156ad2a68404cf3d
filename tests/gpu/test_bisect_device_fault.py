"""Bisecting a real illegal memory access: a planted CUDA kernel that reads far out of bounds, on a device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

KERNEL = """
#include <cuda_runtime_api.h>
__global__ void read_far(const float* x, float* sink) { *sink = x[1ll << 42]; }
extern "C" int launch(const float* x, float* sink, void* stream) {
    read_far<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(x, sink);
    return static_cast<int>(cudaGetLastError());
}
"""

BACKEND = """
import ctypes, pathlib, torch
from triptych import registry
from triptych.backend import Backend

library = pathlib.Path(__file__).with_name("far.so")


class Far(Backend):
    def ops(self):
        return registry.ops.names()

    def implementation(self, op, phase):
        composite = registry.ops.get(op).phase(phase).composite
        if (op, phase) != ("add_rms_norm", "backward"):
            return composite
        launch = ctypes.CDLL(str(library)).launch

        def run(*args):
            outputs = composite(*args)
            sink = torch.empty(1, device=args[0].device)
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            assert launch(ctypes.c_void_p(args[0].data_ptr()), ctypes.c_void_p(sink.data_ptr()), stream) == 0
            return outputs

        return run


backend = Far("far", "far")
"""

JOB = """
import torch, triptych
from triptych.layers import AddRMSNorm, RMSNorm

torch.manual_seed(0)
first, second = RMSNorm(64, device="cuda"), AddRMSNorm(64, device="cuda")
triptych.name_layers(torch.nn.ModuleDict({"first": first, "second": second}))
for step in range(2):
    x = torch.randn(4, 8, 64, device="cuda", requires_grad=True)
    y, h = second(first(x), x)
    (y.sum() + h.sum()).backward()
print("loss", float(x.grad.sum()))
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with the job, and on the path of its children a distribution with the faulty backend."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc on PATH")
    (tmp_path / "far.cu").write_text(KERNEL)
    subprocess.run([nvcc, "-shared", "-Xcompiler", "-fPIC", "-o", "far.so", "far.cu"], cwd=tmp_path, check=True)
    (tmp_path / "far_backend.py").write_text(BACKEND)
    info = tmp_path / "far-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: far\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[triptych.backends]\nfar = far_backend:backend\n")
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def test_a_real_illegal_memory_access_is_bisected_to_its_phase_and_layer(planted: Path) -> None:
    assert torch.cuda.is_available()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(planted), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-m", "triptych", "bisect", "--good", "torch", "--bad", "far", "--json", "verdict.json"]
    done = subprocess.run(
        [*command, "--", sys.executable, "job.py"],
        cwd=planted,
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads((planted / "verdict.json").read_text())
    assert verdict["verdict"] == "isolated"
    (culprit,) = verdict["culprits"]
    assert (culprit["op"], culprit["phase"], culprit["layer"], culprit["backend"]) == (
        "add_rms_norm",
        "backward",
        "second",
        "far",
    )
    assert verdict["workaround"] == "far;add_rms_norm.backward=torch"
    assert any("illegal memory access" in (each["signature"] or "") for each in verdict["evidence"])
    assert (planted / verdict["capture"]).exists()
    fixed = subprocess.run(
        [sys.executable, "job.py"],
        cwd=planted,
        env={**environment, "TRIPTYCH_BACKEND": verdict["workaround"]},
        capture_output=True,
        text=True,
    )
    assert fixed.returncode == 0, fixed.stderr
