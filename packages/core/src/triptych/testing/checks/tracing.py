"""The op under torch.compile and torch.export: one graph, right gradients, and a backend that can still be switched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo import lookup_backend

from triptych.call import BACKWARD, FORWARD
from triptych.opspec import Tensors
from triptych.testing import grid
from triptych.testing.assertions import assert_declared
from triptych.testing.checks.catalogue import check
from triptych.testing.checks.gradients import (
    as_tuple,
    both_phases,
    differentiable_inputs,
    expected_gradients,
    leaves_of,
)
from triptych.testing.checks.selection import others
from triptych.testing.grid import Case
from triptych.testing.running import Skip, assert_right, forward, gradients_of_outputs, needs_every_phase, ran, under
from triptych.testing.subject import Subject


class CountingCompiler:
    """A torch.compile backend that counts the graphs it is given and hands them on."""

    def __init__(self, inner: str) -> None:
        self.graphs = 0
        self._inner: Callable[..., Any] = lookup_backend(inner)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.graphs += 1
        return self._inner(graph, inputs)


class OpModule(torch.nn.Module):
    """An op as a module: what export takes."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.call = case.live.call
        self.scalars = case.scalars

    def forward(self, *tensors: torch.Tensor | None) -> Any:
        return self.call("", *tensors, *self.scalars)


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    """No graph of an earlier check is reused, none is left behind."""
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def _compiled(case: Case, compiler: CountingCompiler, dynamic: bool | None) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(OpModule(case), fullgraph=True, backend=compiler, dynamic=dynamic)
    return compiled


def _assert_trains(
    subject: Subject, case: Case, function: Callable[..., Any], rules: str, expected: dict[tuple[str, str, str], int]
) -> None:
    """Run `function`, a traced form of the op, forward and backward; compare outputs and gradients."""
    names = differentiable_inputs(case)
    outputs = forward(subject, case, case.arguments())
    grads = gradients_of_outputs(case, outputs)
    leaves = leaves_of(case, names)
    inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    with under(rules), ran(expected):
        results: Tensors = as_tuple(function(*leaves))
        found = torch.autograd.grad(results[: len(grads)], inputs, grads) if grads else ()
    results = tuple(each.detach() for each in results)
    phase, args, count = case.spec.forward, case.arguments(), case.spec.visible
    assert_declared(phase.outputs[:count], results, phase.fake(*args)[:count])
    assert_right(case, phase.outputs[:count], results, phase.reference(*args)[:count], phase.bound(*args)[:count])
    if grads:
        reference, bound = expected_gradients(case, grads, outputs, names)
        assert_right(case, [f"gradient of {name}" for name in names], found, reference, bound)


@check(grid.layouts_in_float32)
def compile_static(subject: Subject, case: Case) -> None:
    """torch.compile(fullgraph=True) with static shapes: one graph, and outputs and gradients are right."""
    needs_every_phase(subject, case)
    compiler = CountingCompiler("aot_eager")
    with _fresh_compiler():
        function = _compiled(case, compiler, dynamic=False)
        _assert_trains(subject, case, function, subject.backend, both_phases(subject, case))
    assert compiler.graphs == 1, f"{compiler.graphs} graphs were compiled; expected 1"


@check(grid.one)
def compile_dynamic(subject: Subject, case: Case) -> None:
    """torch.compile(fullgraph=True, dynamic=True): one graph for all sizes, and outputs and gradients are right."""
    needs_every_phase(subject, case)
    compiler = CountingCompiler("aot_eager")
    with _fresh_compiler():
        function = _compiled(case, compiler, dynamic=True)
        names = grid.same_but_size(case.op)
        for name in names:
            sized = Case(case.op, name, case.dtype, case.device_type)
            _assert_trains(subject, sized, function, subject.backend, both_phases(subject, case))
    assert names, f"{case.op} needs plain samples that differ in sizes only"
    assert compiler.graphs == 1, f"{compiler.graphs} graphs were compiled for {len(names)} sizes; expected 1"


@check(grid.one_in_bfloat16)
def compile_inductor(subject: Subject, case: Case) -> None:
    """torch.compile's default compiler: one graph, and outputs and gradients are right."""
    needs_every_phase(subject, case)
    compiler = CountingCompiler("inductor")
    with _fresh_compiler():
        function = _compiled(case, compiler, dynamic=None)
        _assert_trains(subject, case, function, subject.backend, both_phases(subject, case))
    assert compiler.graphs == 1, f"{compiler.graphs} graphs were compiled; expected 1"


@check(grid.one)
def policy_switch(subject: Subject, case: Case) -> None:
    """After torch.compile, a policy switch takes effect for either phase, and nothing is compiled again."""
    needs_every_phase(subject, case)
    candidates = others(subject, case)
    if not candidates:
        raise Skip(f"no other backend here runs {case.op} on {case.device_type}")
    compiler = CountingCompiler("aot_eager")
    here = subject.backend
    with _fresh_compiler():
        function = _compiled(case, compiler, dynamic=False)
        for other in candidates:
            for ahead, back in ((here, here), (other, other), (here, other), (other, here), (here, here)):
                chosen = {FORWARD: ahead, BACKWARD: back}
                expected = {(case.op, phase, chosen[phase]): 1 for phase in case.spec.phases}
                _assert_trains(subject, case, function, f"{ahead};{case.op}.backward={back}", expected)
    assert compiler.graphs == 1, f"{compiler.graphs} graphs were compiled while the policy switched; expected 1"


@check(grid.operator_cases)
def export_strict(subject: Subject, case: Case) -> None:
    """torch.export in strict mode keeps the op as one node, and the exported graph trains."""
    _assert_exports(subject, case, strict=True)


@check(grid.operator_cases)
def export_non_strict(subject: Subject, case: Case) -> None:
    """torch.export in non-strict mode keeps the op as one node, and the exported graph trains."""
    _assert_exports(subject, case, strict=False)


def _assert_exports(subject: Subject, case: Case, strict: bool) -> None:
    needs_every_phase(subject, case)
    operator = getattr(torch.ops.triptych, case.op).default
    leaves = leaves_of(case, differentiable_inputs(case))
    with _fresh_compiler():
        with under(subject.backend), ran({}):
            exported = torch.export.export(OpModule(case), leaves, strict=strict)
        nodes = [node for node in exported.graph.nodes if node.op == "call_function" and node.target is operator]
        assert len(nodes) == 1, f"the exported graph calls {operator} {len(nodes)} times; expected once"
        _assert_trains(subject, case, exported.module(), subject.backend, both_phases(subject, case))
