"""Sync, checks and captures on a device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import triptych
from triptych import capture, scope, tools, trace

pytestmark = pytest.mark.gpu

ASSERTING = """
import torch, triptych
from triptych import registry
from triptych.backend import Backend
from triptych.errors import CheckFailed

class Asserting(Backend):
    def ops(self):
        return ("rms_norm",)

    def implementation(self, op, phase):
        composite = registry.ops.get(op).phase(phase).composite

        def run(*args):
            if phase == "backward":
                torch.zeros(3, device="cuda")[torch.tensor([10], device="cuda")]
            return composite(*args)

        return run

layer = triptych.layers.RMSNorm(8, device="cuda")
layer.layer_name = "blocks.0"
with registry.backends.added("asserting", Asserting("asserting")), triptych.use("asserting"):
    try:
        layer(torch.ones(2, 8, device="cuda")).sum().backward()
    except CheckFailed as error:
        print(error.signature, "|", error)
"""


def test_a_real_device_error_is_raised_at_the_call_that_made_it() -> None:
    env = {**os.environ, "TRIPTYCH_SYNC": "1"}
    done = subprocess.run([sys.executable, "-c", ASSERTING], env=env, capture_output=True, text=True, timeout=120)
    signature, _, text = done.stdout.partition(" | ")
    assert signature == "device error rms_norm.backward", done.stdout + done.stderr
    assert "in rms_norm.backward call 0 in layer 'blocks.0' on 'asserting': CUDA error: device-side assert" in text


@pytest.fixture
def everything_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """All tools on; the directory they write to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIPTYCH_TRACE", "trace.jsonl")
    monkeypatch.setenv("TRIPTYCH_SYNC", "1")
    monkeypatch.setenv("TRIPTYCH_CHECK", "nonfinite|mismatch::composite")
    monkeypatch.setenv("TRIPTYCH_CAPTURE", "captures|rms_norm.backward")
    monkeypatch.setenv("TRIPTYCH_BACKEND", "torch")
    monkeypatch.setattr(scope, "_process", None)
    yield tmp_path
    tools.uninstall()


def step(x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(triptych.rms_norm(x, layer="layer").sum(), x)
    return gradient


def test_a_call_on_a_device_is_checked_captured_and_replayed_there(everything_on: Path) -> None:
    x = torch.randn(4, 6, 64, device="cuda").transpose(0, 1).requires_grad_()
    step(x)
    assert [(call.phase, call.backend) for call in trace.read(Path("trace.jsonl")).calls] == [
        ("forward", "torch"),
        ("backward", "torch"),
    ]
    (path,) = (everything_on / "captures").iterdir()
    loaded = capture.load(path)
    values = dict(loaded.arguments)
    assert values["x"].device == x.device
    assert values["x"].stride() == x.stride()
    assert torch.equal(values["x"], x)
    result = capture.replay(loaded, "composite", "torch")
    assert result.agrees, str(result)
    assert capture.replay(capture.load(path, "cpu")).agrees


def test_nothing_waits_while_a_graph_is_recorded(everything_on: Path) -> None:
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(recorded, step(x))
    assert len(trace.read(Path("trace.jsonl")).calls) == 6
