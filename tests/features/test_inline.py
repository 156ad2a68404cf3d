"""Compile mode inline: torch.compile traces through the ops, with their own gradients, and never serves a stale graph."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compiling import assert_same, nothing_is_compiled_before_or_after, trained  # noqa: F401
from subjects import SUBJECTS, assert_close, batch, build, counts, ran_on, step
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import triptych
from triptych import compile_mode, intercept, registry, scope
from triptych.compile_mode import BACKEND
from triptych.testing import grid
from triptych.testing.checks.tracing import CountingCompiler, OpModule, _assert_trains
from triptych.testing.grid import Case
from triptych.testing.subject import Subject

OPS = ("rms_norm", "add_rms_norm", "tile_abs_max", "tile_std", "input_range_update", "analog_weight", "analog_linear")
SLOW = ("add_rms_norm", "tile_abs_max", "analog_weight", "analog_linear")
THIRD_PARTY = Path(__file__).parents[2] / "examples" / "third_party_op.py"
Record = Callable[[str, object], None]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of compile modes."""
    return [record.getMessage() for record in caplog.records if record.name == "triptych.compile"]


# --- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.feature("torch.compile, inline mode")
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_training_step_is_traced_through(name: str, device: str, record_property: Record) -> None:
    """No call reaches a kernel, gradients are eager's, and other sizes compile nothing again.

    The larger analog models are traced for one size only: noise, many operations for each tile, takes a minute with a
    symbol.
    """
    resized = name in ("rms_norm", "add_rms_norm", "analog_calibrating")
    model, plain = build(name, device, blocks=1), build(name, device, blocks=1)
    compiler = CountingCompiler("aot_eager")
    function = torch.compile(model, fullgraph=True, backend=compiler)
    for number, rows in enumerate((4, 7, 9) if resized else (4, 4)):
        x = batch(device, rows=rows, number=number)
        if resized:
            torch._dynamo.mark_dynamic(x, 0)  # type: ignore[no-untyped-call]
        with triptych.use(BACKEND, compile="inline"):
            before = counts()
            found = trained(model, function, x)
            assert counts() == before, "something was not traced through"
        with triptych.use(BACKEND):
            assert_same(found, trained(plain, plain, x))
    # A forward of clipped weights is compiled once more when a step is suspected that no optimiser made.
    assert compiler.graphs == (2 if name == "analog_clipped" else 1)
    assert set(SUBJECTS[name].ops) <= set(triptych.report().inlined)
    for op in SUBJECTS[name].ops:
        record_property("inlined", (op, BACKEND))


def _cases() -> list[Case]:
    """Every layout of the norms, which are compiled in half a second; of the others one case in three dtypes."""
    layouts = [case for op in OPS[:2] for case in grid.layouts_in_float32(Subject(BACKEND), op, "cpu")]
    dtypes = [case for op in OPS for case in grid.one_a_dtype(Subject(BACKEND), op, "cpu")]
    return list(dict.fromkeys((*layouts, *(case for case in dtypes if case.dtype is not torch.float64))))


@pytest.mark.feature("torch.compile, inline mode")
@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.id)
def test_every_layout_and_dtype_is_within_the_bounds_of_the_op(case: Case, record_property: Record) -> None:
    function = torch.compile(OpModule(case), fullgraph=True, backend="aot_eager", dynamic=False)
    with scope.process_policy("", compile="inline"):
        _assert_trains(Subject(BACKEND), case, function, BACKEND, {})  # in which no call is counted
    record_property("inlined", (case.op, BACKEND))


@pytest.mark.feature("torch.compile, inline mode")
@pytest.mark.parametrize("op", [OPS[0], *OPS[3:5], *(pytest.param(op, marks=pytest.mark.slow) for op in SLOW)])
def test_what_inductor_makes_of_it_is_within_the_bounds_of_the_op(op: str, record_property: Record) -> None:
    (case,) = grid.one(Subject(BACKEND), op, "cpu")
    function = torch.compile(OpModule(case), fullgraph=True, dynamic=False)
    with scope.process_policy("", compile="inline"):
        _assert_trains(Subject(BACKEND), case, function, BACKEND, {})
    record_property("inlined", (op, BACKEND))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_is_rounded_where_the_option_says(dtype: torch.dtype) -> None:
    """Inductor leaves out a rounding between two operations that it fuses, unless it is made to keep it."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 257, generator=generator).to(dtype), torch.randn(257, generator=generator).to(dtype)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return triptych.rms_norm(x, weight, eps=1e-6, rounding="before_weight")

    with triptych.use(BACKEND):
        expected, other = norm(x, weight), triptych.rms_norm(x, weight, eps=1e-6)
    with triptych.use(BACKEND, compile="inline"):
        found = torch.compile(norm, fullgraph=True)(x, weight)
    assert float((expected != other).float().mean()) > 0.1
    assert float((found != expected).float().mean()) < 0.001  # a sum in another order


def test_it_is_fused_with_what_lies_around_it(device: str) -> None:
    """Scale, norm, activation: three launches with an opaque norm, one kernel with an inline one.

    On a GPU Inductor may split the reduction from what follows it: two at most.
    """

    def block(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.silu(triptych.rms_norm(x * scale, weight, eps=1e-6)) * 2

    x, scale, weight = torch.randn(64, 256, device=device), *torch.rand(2, 256, device=device)
    kernels, calls = {}, {}
    for mode in compile_mode.MODES:
        torch.compiler.reset()
        with torch.no_grad(), triptych.use(BACKEND, compile=mode):
            found, (code,) = run_and_get_code(torch.compile(block, fullgraph=True), x, scale, weight)
            assert_close(found, block(x, scale, weight))
        kernels[mode] = code.count("async_compile.triton(") + code.count("async_compile.cpp_pybinding(")
        calls[mode] = code.count("torch.ops.triptych.rms_norm.default(")
    assert (kernels["opaque"], calls) == (2, {"opaque": 1, "inline": 0})
    assert kernels["inline"] == 1 if device == "cpu" else kernels["inline"] <= 2


def test_autocast_ends_at_the_op() -> None:
    model, plain = build("analog", blocks=1), build("analog", blocks=1)
    x = batch()
    with torch.autocast("cpu", torch.bfloat16):
        with triptych.use(BACKEND):
            expected = trained(plain, plain, x)
        with triptych.use(BACKEND, compile="inline"):
            found = trained(model, torch.compile(model, fullgraph=True, backend="aot_eager"), x)
    assert_same(found, expected)


# --- when it is traced through ----------------------------------------------------------------------------------------


def test_a_switch_compiles_once_and_serves_no_stale_graph(device: str) -> None:
    model, x = build("rms_norm", device), batch(device)
    compiler = CountingCompiler("aot_eager")
    function = torch.compile(model, fullgraph=True, backend=compiler)
    for _ in range(3):
        with scope.process_policy(BACKEND), ran_on(BACKEND, "rms_norm"):
            step(function, x)
        with triptych.use(BACKEND, compile="inline"):
            before = counts()
            step(function, x)
            assert counts() == before
        with scope.process_policy("composite", compile="inline"), ran_on("composite", "rms_norm"):
            step(function, x)
    assert compiler.graphs == 2


def test_a_rule_that_names_another_backend_is_kept_layer_by_layer() -> None:
    model, x = build("rms_norm"), batch()
    compiler = CountingCompiler("aot_eager")
    function = torch.compile(model, fullgraph=True, backend=compiler)
    with triptych.use(compile="inline"):
        for backend, layer, graphs in (("composite", 0, 1), ("triton", 0, 1), ("composite", 1, 2)):
            before = counts()
            with triptych.use(f"{BACKEND};rms_norm.backward@{layer}.norm={backend}"), torch.no_grad():
                function(x)
            assert dict(counts() - before) == {("rms_norm", "forward", BACKEND): 1}
            assert compiler.graphs == graphs


def test_a_mode_holds_for_the_thread_that_asked_for_it() -> None:
    model, x = build("rms_norm"), batch()
    function = torch.compile(model, fullgraph=True, backend="aot_eager")

    def elsewhere() -> None:
        with ran_on(BACKEND, "rms_norm"), triptych.use(BACKEND):
            step(function, x)

    with triptych.use(BACKEND, compile="inline"):
        before = counts()
        step(function, x)
        assert counts() == before
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert counts() - before
        middle = counts()
        step(function, x)
        assert counts() == middle


def test_a_tool_that_is_switched_on_sees_every_call() -> None:
    model, x = build("rms_norm"), batch()
    function = torch.compile(model, fullgraph=True, backend="aot_eager")
    seen: list[str] = []

    def tool(invocation: intercept.Invocation, proceed: intercept.Proceed) -> tuple[Tensor, ...]:
        seen.append(f"{invocation.phase} {invocation.layer}")
        return proceed()

    with triptych.use(BACKEND, compile="inline"):
        step(function, x)
        undo = intercept.install(tool)
        try:
            step(function, x)
        finally:
            undo()
        step(function, x)
    assert seen == ["forward 0.norm", "forward 1.norm", "backward 1.norm", "backward 0.norm"]


def test_an_op_that_the_backend_lacks_stays_opaque(caplog: pytest.LogCaptureFixture) -> None:
    module = sys.modules.get("third_party_op")  # an op is defined once in a process
    if module is None:
        specification = importlib.util.spec_from_file_location("third_party_op", THIRD_PARTY)
        assert specification is not None and specification.loader is not None
        module = sys.modules["third_party_op"] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
    x = torch.randn(3, 4, requires_grad=True)
    with registry.ops.added("scaled_square", module.SPEC), triptych.use(compile="inline"):
        before = counts()
        with caplog.at_level(logging.WARNING, "triptych.compile"):
            y = torch.compile(module.scaled_square, backend="aot_eager", fullgraph=True)(x, 1.5)
        y.sum().backward()
        assert set(counts() - before) == {("scaled_square", phase, "composite") for phase in ("forward", "backward")}
    assert said(caplog) == [
        "Compile mode inline is not applied to scaled_square, which stays opaque: backend 'torch' does not implement it."
    ]


def test_a_call_that_the_backend_refuses_stays_opaque(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import triptych_torch.ops.rms_norm as implementation

    monkeypatch.setattr(compile_mode, "_said", set())
    monkeypatch.setattr(implementation, "reasons_against", lambda call: [f"it refuses {call.phase}."], raising=False)
    with triptych.use(f"{BACKEND},composite", compile="inline"), ran_on("composite", "rms_norm"):
        with caplog.at_level(logging.WARNING, "triptych.compile"):
            model = build("rms_norm")
            step(torch.compile(model, fullgraph=True, backend="aot_eager"), batch())
    assert said(caplog) == [
        "Compile mode inline is not applied to calls of rms_norm that stay opaque: it refuses forward."
    ]


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_keeps_its_ops(strict: bool) -> None:
    model, x = build("add_rms_norm"), batch()
    with triptych.use(BACKEND, compile="inline"):
        program = torch.export.export(model, (x,), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if "triptych" in str(node.target)]
    assert targets == ["triptych.add_rms_norm.default"] * 2
