"""The trace: what a line says, when it is written, by which processes, and what reading tolerates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import triptych
from triptych import layers, registry, scope, trace
from triptych.backend import Backend
from triptych.errors import EnvironmentVariableError, UsageError
from triptych.opspec import PhaseFunction


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.RMSNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Raising(Backend):
    """Raises in forward."""

    def ops(self) -> tuple[str, ...]:
        return ("rms_norm",)

    def implementation(self, op: str, phase: str) -> PhaseFunction | None:
        def run(*args: object) -> tuple[torch.Tensor, ...]:
            raise RuntimeError("launched")

        return run


@pytest.fixture
def traced(fresh_scope: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that the trace of this process goes to."""
    path = fresh_scope / "trace.jsonl"
    monkeypatch.setenv("TRIPTYCH_TRACE", str(path))
    monkeypatch.setenv("TRIPTYCH_BACKEND", "composite")
    return path


def sites(found: trace.Trace) -> list[tuple[str, str, str]]:
    return [(f"{call.op}.{call.phase}", call.layer, call.backend) for call in found.calls]


def indices(found: trace.Trace, phase: str) -> list[int]:
    return [call.call for call in found.calls if call.phase == phase]


def test_each_phase_of_each_call_is_one_record_with_its_decision(traced: Path) -> None:
    first, second = layers.RMSNorm(8), layers.AddRMSNorm(8)
    first.layer_name, second.layer_name = "a", "b"
    x = torch.ones(2, 8, requires_grad=True)
    with triptych.use("rms_norm.backward=torch"):
        y, h = second(first(x), x)
    (y + h).sum().backward()
    found = trace.read(traced)
    assert sites(found) == [
        ("rms_norm.forward", "a", "composite"),
        ("add_rms_norm.forward", "b", "composite"),
        ("add_rms_norm.backward", "b", "composite"),
        ("rms_norm.backward", "a", "torch"),
    ]
    assert {call.pid for call in found.calls} == {os.getpid()}
    assert found.calls[3].decision["source"] == "triptych.use rule 1"
    assert found.calls[3].decision["call"]["tensors"]["x"]["shape"] == [2, 8]
    (process,) = found.processes
    assert (process.pid, process.rank, process.policy) == (os.getpid(), 0, "composite")
    assert process.versions["torch"] == torch.__version__
    assert process.backends["composite"] == registry.backends.origin("composite")


def test_a_call_is_numbered_and_its_decision_is_written_once(traced: Path) -> None:
    start = triptych.calls("rms_norm", "forward")
    for _ in range(3):
        triptych.rms_norm(torch.ones(2, 8))
    numbers = indices(trace.read(traced), "forward")
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    assert triptych.calls("rms_norm", "forward") == start + 3
    assert traced.read_text().count('"kind":"decision"') == 1


def test_no_gradient_no_backward(traced: Path) -> None:
    with torch.no_grad():
        layers.RMSNorm(8)(torch.ones(2, 8))
    assert [call.phase for call in trace.read(traced).calls] == ["forward"]


def test_a_line_is_written_before_the_launch(traced: Path) -> None:
    with registry.backends.added("raising", Raising("raising")), triptych.use("raising"):
        with pytest.raises(RuntimeError, match="launched"):
            triptych.rms_norm(torch.ones(2, 8))
    assert sites(trace.read(traced)) == [("rms_norm.forward", "", "raising")]


def test_layers_of_an_unknowing_program_have_names_from_the_second_call_at_the_latest(traced: Path) -> None:
    model = Model()
    for _ in range(2):
        model(torch.ones(3, 8))
    names = [call.layer for call in trace.read(traced).calls]
    # The scope was read inside the first layer's first call, which had passed its name on by then.
    assert names == ["", "blocks.1.norm", "blocks.0.norm", "blocks.1.norm"]


def test_a_compiled_model_is_traced_by_layer_and_without_a_warning(traced: Path) -> None:
    scope.process_scope()
    torch._dynamo.reset()
    compiled = torch.compile(Model(), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        compiled(torch.ones(3, 8)).sum().backward()
    names = [(call.phase, call.layer) for call in trace.read(traced).calls]
    forward = [("forward", "blocks.0.norm"), ("forward", "blocks.1.norm")]
    backward = [("backward", "blocks.1.norm"), ("backward", "blocks.0.norm")]
    assert names == (forward + backward) * 2


PROGRAM = """
import multiprocessing, os, sys
import torch, triptych

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = triptych.layers.RMSNorm(8)
    def forward(self, x):
        return self.norm(x) * 2

def step(count):
    with torch.no_grad():
        for _ in range(count):
            Model()(torch.ones(2, 8))

if __name__ == "__main__":
    step(2)
    for method, count in (("fork", 3), ("spawn", 4)):
        child = multiprocessing.get_context(method).Process(target=step, args=(count,))
        child.start()
        child.join()
        assert child.exitcode == 0, (method, child.exitcode)
    print(os.getpid())
"""


def test_children_by_fork_and_spawn_write_headers_and_numbers_of_their_own(fresh_scope: Path) -> None:
    program, path = fresh_scope / "program.py", fresh_scope / "trace.jsonl"
    program.write_text(PROGRAM)
    env = {**os.environ, "TRIPTYCH_TRACE": str(path), "TRIPTYCH_BACKEND": "composite", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, program], env=env, check=True, capture_output=True, text=True, timeout=120)
    found = trace.read(path)
    by_pid: dict[int, list[int]] = {}
    for call in found.calls:
        assert call.layer == "norm"  # from the very first call: layers are named when triptych is imported
        by_pid.setdefault(call.pid, []).append(call.call)
    assert list(by_pid.values()) == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert [process.pid for process in found.processes] == list(by_pid)
    assert next(iter(by_pid)) == int(done.stdout)
    assert trace.totals(found) == (trace.Total("rms_norm", "forward", "composite", 9, 3),)


def test_a_torn_last_line_is_left_out(traced: Path) -> None:
    for _ in range(2):
        triptych.rms_norm(torch.ones(2, 8))
    whole = traced.read_bytes()
    traced.write_bytes(whole[:-7])
    assert len(trace.read(traced).calls) == 1
    traced.write_bytes(whole)
    assert len(trace.read(traced).calls) == 2


def test_reading_can_begin_where_another_run_ended(traced: Path) -> None:
    triptych.rms_norm(torch.ones(2, 8))
    size = traced.stat().st_size
    triptych.rms_norm(torch.ones(3, 8))
    assert [call.decision["call"]["tensors"]["x"]["shape"] for call in trace.read(traced, size).calls] == [[3, 8]]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{]\n", "{path} line 1 is not JSON: "),
        ('{"kind":"proc"}\n', "{path} line 1 is not a record of a trace of schema 1 (KeyError: 'proc')."),
        ('{"kind":"process","schema":2}\n', "{path} line 1 is not a record of a trace of schema 1 (TypeError: "),
        ("[1]\n", "{path} line 1 is not a record of a trace of schema 1 ("),
    ],
)
def test_what_is_not_a_trace_is_an_error(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        trace.read(path)
    assert str(raised.value).startswith(error.format(path=path))


def test_a_missing_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl cannot be read: No such file or directory\."):
        trace.read(tmp_path / "none.jsonl")


def test_a_trace_that_cannot_be_written_is_an_error_before_anything_runs(
    fresh_scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fresh_scope / "missing" / "trace.jsonl"
    monkeypatch.setenv("TRIPTYCH_TRACE", str(path))
    start = triptych.calls("rms_norm", "forward")
    for _ in range(2):  # not only the first time
        with pytest.raises(EnvironmentVariableError) as raised:
            triptych.rms_norm(torch.ones(2, 8))
        assert str(raised.value) == (
            f"TRIPTYCH_TRACE is '{path}': No such file or directory. "
            "Name a file that can be written, in a folder that exists."
        )
    assert triptych.calls("rms_norm", "forward") == start


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_trace_that_is_no_regular_file_is_an_error_and_not_waited_for(
    fresh_scope: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    os.mkfifo("pipe")
    path = fresh_scope / "pipe" if kind == "pipe" else Path("/dev/null")
    monkeypatch.setenv("TRIPTYCH_TRACE", str(path))
    with pytest.raises(EnvironmentVariableError) as raised:
        triptych.rms_norm(torch.ones(2, 8))
    assert str(raised.value).startswith(f"TRIPTYCH_TRACE is '{path}': Is a {kind}, not a regular file. Name ")
    with pytest.raises(UsageError, match=f"cannot be read: Is a {kind}, not a regular file"):
        trace.read(path)


def test_every_line_is_one_json_object_of_a_known_kind(traced: Path) -> None:
    layers.RMSNorm(8)(torch.ones(2, 8)).sum().backward()
    kinds = [json.loads(line)["kind"] for line in traced.read_text().splitlines()]
    assert kinds == ["process", "decision", "call", "decision", "call"]
