"""torch.export: the graph holds the ops whole, is saved and loaded, and trains as the model; AOTInductor runs it."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import SUBJECTS, assert_close, batch, build, counts, ran_on, step
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import triptych
from triptych.scope import process_policy

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # PyTorch's own, while it copies a graph

EACH_OP = ("rms_norm", "add_rms_norm", "analog_calibrating", "analog_clipped")
"""Subjects that together run every op."""
SHAPES = {"static": None, "dynamic": ({0: Dim("rows"), 1: Dim("length")},)}


def exported(model: nn.Module, x: Tensor, strict: bool, shapes: str) -> ExportedProgram:
    """The program; making it runs no kernel."""
    before = counts()
    program = torch.export.export(model, (x,), strict=strict, dynamic_shapes=SHAPES[shapes])
    assert counts() == before
    return program


def written_and_read(program: ExportedProgram) -> nn.Module:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def train(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """Losses, the last gradients and the state after as many steps as there are batches, with fixed seeds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for number, x in enumerate(batches):
        torch.manual_seed(number)
        optimizer.zero_grad()
        losses.append(step(model, x))
        optimizer.step()
    gradients = {f"gradient of {key}": p.grad for key, p in model.named_parameters() if p.grad is not None}
    return {"losses": torch.stack(losses), **gradients, **model.state_dict()}


def assert_trains_alike(name: str, backend: str, loaded: nn.Module, model: nn.Module, batches: list[Tensor]) -> None:
    """Bit for bit, on the same backend. A program lacks those buffers that forward does not read."""
    with process_policy(backend), ran_on(backend, name):
        found = train(loaded, batches)
    with process_policy(backend):
        expected = train(model, batches)
    missing = expected.keys() - found.keys()
    buffers = dict(model.named_buffers())
    assert found.keys() <= expected.keys() and all(key in buffers and not buffers[key].any() for key in missing), (
        missing
    )
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


# --- training a loaded program ----------------------------------------------------------------------------------------


@pytest.mark.feature("torch.export")
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("strict", [False, True], ids=["tracing", "strict"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_loaded_program_trains_as_the_model(name: str, strict: bool, shapes: str, device: str) -> None:
    x = batch(device)
    loaded = written_and_read(exported(build(name, device), x, strict, shapes))
    size: Any = {"rows": 3, "length": 5} if shapes == "dynamic" else {}
    batches = [batch(device, number=number, **size) for number in range(2)]
    assert_trains_alike(name, "torch", loaded, build(name, device), batches)


@pytest.mark.feature("torch.export")
@pytest.mark.parametrize("name", EACH_OP)
def test_a_loaded_program_trains_on_the_backend_in_force(name: str, backend: str, device: str) -> None:
    x = batch(device, rows=2, length=3)
    with process_policy("torch"):
        loaded = written_and_read(exported(build(name, device, blocks=1), x, False, "static"))
    assert_trains_alike(name, backend, loaded, build(name, device, blocks=1), [x])


@pytest.mark.feature("torch.export")
def test_a_loaded_program_knows_the_layers_by_their_names(device: str) -> None:
    loaded = written_and_read(exported(build("rms_norm", device), batch(device), False, "static"))
    before = counts()
    with process_policy("torch;rms_norm@1.norm=composite"):
        step(loaded, batch(device))
    ran = {(phase, backend): 1 for phase in ("forward", "backward") for backend in ("torch", "composite")}
    assert counts() - before == {("rms_norm", *key): calls for key, calls in ran.items()}


@pytest.mark.parametrize("strict", [False, True], ids=["tracing", "strict"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_decompositions_keep_the_ops_whole(name: str, strict: bool) -> None:
    program = exported(build(name), batch(), strict, "dynamic")
    decomposed = program.run_decompositions()
    for each in (program, decomposed):
        ops = {target.split(".")[1] for target in targets(each.graph_module) if target.startswith("triptych.")}
        assert ops >= {op for op in SUBJECTS[name].ops if op != "tile_std"}  # which clipping runs, after a step
    aten = [target for target in targets(decomposed.graph_module) if target.startswith("aten.")]
    assert not [target for target in aten if "rsqrt" in target or "round" in target or "amax" in target], aten


def targets(module: nn.Module) -> Iterator[str]:
    """What the graphs of a module and of the modules in it call."""
    for each in module.modules():
        if isinstance(each, torch.fx.GraphModule):
            yield from (str(node.target) for node in each.graph.nodes if node.op == "call_function")


# --- AOTInductor ------------------------------------------------------------------------------------------------------

PACKAGED = {"rms_norm", "add_rms_norm", "tile_abs_max", "analog_weight", "analog_linear"}


class Inference(nn.Module):
    """Blocks with every op that an evaluation runs; what they make of x, and what a block with noise makes of that."""

    def __init__(self) -> None:
        super().__init__()
        names = ("rms_norm", "add_rms_norm", "analog", "analog_calibrating")
        self.quiet = nn.Sequential(*(build(name, blocks=1) for name in names)).eval()
        self.noisy = build("analog_noise", blocks=1).train()
        triptych.name_layers(self)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.quiet(x)
        return y, self.noisy(y)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One compiled program for all tests of this file: making it takes a C++ compiler and half a minute."""
    file = tmp_path_factory.mktemp("package") / "model.pt2"
    program = torch.export.export(Inference(), (batch(),), dynamic_shapes=({0: Dim("rows", min=2, max=64)},))
    torch._inductor.aoti_compile_and_package(program, package_path=str(file))
    return file


@pytest.mark.feature("AOTInductor")
def test_a_package_runs_on_the_backend_in_force(package: Path, backend: str) -> None:
    runner: Any = torch._inductor.aoti_load_package(str(package))
    model, x = Inference(), batch(rows=2, length=6)
    before = counts()
    with process_policy(backend):
        torch.manual_seed(1)
        quiet, first = runner(x)
        _, second = runner(x)
        torch.manual_seed(1)
        _, again = runner(x)
        ran = counts() - before
        expected, _ = model(x)
        without = model.noisy.eval()(quiet)
    assert {op for op, _, _ in ran} == PACKAGED and {(phase, each) for _, phase, each in ran} == {("forward", backend)}
    assert_close(quiet, expected)
    # Inductor has a random generator of its own: the noise is not eager's, but it is drawn anew, from torch's seed.
    assert torch.equal(first, again) and not torch.equal(first, second)
    share = (first - without).std() / (without - quiet).std()
    assert 0.001 < float(share) < 0.3, share


# --- a process that does not know the ops -----------------------------------------------------------------------------

LOAD = """
import sys, torch
for load in (torch._inductor.aoti_load_package, lambda file: torch.export.load(file).module()):
    try:
        print(tuple(load(sys.argv.pop(1))(torch.zeros(4, 6, 32))[0].shape))
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
"""


def test_what_was_saved_needs_triptych_in_the_process_that_loads_it(package: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.pt2"
    torch.export.save(exported(build("rms_norm"), batch(), False, "static"), program)
    (first, second), log = run(LOAD, str(package), str(program))
    assert first.startswith("RuntimeError Could not find schema for triptych::"), first
    assert second.startswith("RuntimeError") and "triptych.rms_norm" in log, (second, log)  # torch logs the cause
    knowing, _ = run("import triptych, triptych.analog" + LOAD, str(package), str(program))
    assert knowing == ["(4, 6, 32)", "(6, 32)"]


def run(program: str, *arguments: str) -> tuple[list[str], str]:
    """The lines that a Python program prints, and what it logs."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr
