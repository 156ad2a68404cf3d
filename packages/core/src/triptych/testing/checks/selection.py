"""One op over several backends and two paths: they mean the same."""

from __future__ import annotations

import torch

import triptych
from triptych import registry
from triptych.call import BACKWARD, FORWARD
from triptych.opspec import Tensors
from triptych.select import auto_order
from triptych.testing import grid
from triptych.testing.assertions import assert_same_bits
from triptych.testing.checks.asking import refused_for
from triptych.testing.checks.catalogue import check
from triptych.testing.checks.gradients import (
    as_tuple,
    differentiable_inputs,
    differentiable_outputs,
    expected_gradients,
    leaves_of,
)
from triptych.testing.grid import Case
from triptych.testing.running import (
    Skip,
    assert_right,
    forward,
    gradients_of_outputs,
    needs_every_phase,
    needs_phases,
    ran,
    run_phase,
    under,
)
from triptych.testing.subject import Subject


def others(subject: Subject, case: Case) -> tuple[str, ...]:
    """The other backends that have a place in `auto` on this device and run every phase of this case.

    One that keeps out of `auto` is an experiment: its faults must not be blamed on the subject.
    """
    names, _ = auto_order(case.device_type, registry.backends.names(), registry.backends.get)
    return tuple(name for name in names if name != subject.backend and _runs_all(Subject(name), case))


def _runs_all(other: Subject, case: Case) -> bool:
    if case.op not in other.plugin.ops():
        return False
    for phase in case.spec.phases:
        with under("composite"):
            call = triptych.explain(case.op, *case.arguments(), phase=phase).call
        if other.plugin.reasons_unavailable() or other.plugin.reasons_against_auto(call):
            return False  # as `auto` passes over what is not built yet
    return not any(refused_for(other, case, phase) for phase in case.spec.phases)


@check(grid.differentiable(grid.layouts))
def mixed_backends(subject: Subject, case: Case) -> None:
    """Forward here and backward elsewhere, and the other way round, with every other backend there is (W5)."""
    needs_every_phase(subject, case)
    found_others = others(subject, case)
    if not found_others:
        raise Skip(f"no other backend here runs {case.op} on {case.device_type}")
    names = differentiable_inputs(case)
    for other in found_others:
        for ahead, back in ((subject.backend, other), (other, subject.backend)):
            outputs = run_phase(ahead, case, FORWARD, case.arguments())
            grads = gradients_of_outputs(case, outputs)
            leaves = leaves_of(case, names)
            inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            with (
                under(f"{ahead};{case.op}.backward={back}"),
                ran({(case.op, FORWARD, ahead): 1, (case.op, BACKWARD, back): 1}),
            ):
                results = differentiable_outputs(case, case.live.call("", *leaves, *case.scalars))
                found = torch.autograd.grad(results, inputs, grads)
            saved = _saved_by_the_oracle(case, outputs)
            reference, bound = expected_gradients(case, grads, saved, names)
            bound = tuple(2 * each for each in bound)  # of which one is the error of what forward saved
            what = f"forward on {ahead}, backward on {back}: "
            assert_right(case, [f"gradient of {name}" for name in names], found, reference, bound, what)


def _saved_by_the_oracle(case: Case, outputs: Tensors) -> Tensors:
    """What a perfect forward hands to backward. It starts from inputs alone: what passes between them is under test.

    Integers record decisions, which may fall either way at a border. They are compared, and then taken as they are:
    backward must follow the decisions of its own forward.
    """
    phase, args = case.spec.forward, case.arguments()
    exact, bounds = phase.reference(*args), phase.bound(*args)
    decisions = [i for i, output in enumerate(outputs) if not output.is_floating_point()]

    def decided(each: Tensors) -> Tensors:
        return tuple(each[i] for i in decisions)

    names = [phase.outputs[i] for i in decisions]
    assert_right(case, names, decided(outputs), decided(exact), decided(bounds), "saved for backward: ")
    return tuple(
        output if i in decisions else right.to(output.dtype)
        for i, (output, right) in enumerate(zip(outputs, exact, strict=True))
    )


@check(grid.full)
def short_path(subject: Subject, case: Case) -> None:
    """The short path of eager tensors gives, bit for bit, what the operator gives."""
    needs_phases(subject, case, FORWARD)
    args = case.arguments()
    through_operator = forward(subject, case, args)
    with torch.no_grad(), under(subject.backend), ran({(case.op, FORWARD, subject.backend): 1}):
        direct = as_tuple(case.live.call("", *args))
    names = case.spec.forward.outputs[: len(direct)]
    assert_same_bits(names, direct, through_operator[: len(direct)], "on the short path and through the operator")
