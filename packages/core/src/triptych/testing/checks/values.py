"""Values of each phase against the float64 reference, within the op's own bound, in every layout."""

from __future__ import annotations

import itertools

import torch

from triptych.call import BACKWARD, FORWARD
from triptych.testing import grid, layouts
from triptych.testing.assertions import assert_declared
from triptych.testing.checks.catalogue import check
from triptych.testing.grid import Case
from triptych.testing.running import (
    arguments_of,
    assert_right,
    backward_arguments,
    forward,
    gradients_of_outputs,
    needs_backward,
    needs_phases,
    phases_of,
    run_phase,
)
from triptych.testing.subject import Subject


def assert_phase(subject: Subject, case: Case, phase: str, args: tuple[object, ...], what: str = "") -> None:
    """Run one phase and compare its outputs with the reference of the same arguments."""
    signature = case.spec.phase(phase)
    outputs = run_phase(subject.backend, case, phase, args)
    assert_right(case, signature.outputs, outputs, signature.reference(*args), signature.bound(*args), what)


@check(grid.full)
def outputs_as_declared(subject: Subject, case: Case) -> None:
    """Outputs have the shape, dtype, device and row-major layout that the op declares."""
    for phase in phases_of(subject, case):
        args = arguments_of(subject, case, phase)
        outputs = run_phase(subject.backend, case, phase, args)
        signature = case.spec.phase(phase)
        assert_declared(signature.outputs, outputs, signature.fake(*args), f"{phase}: ")


@check(grid.full)
def forward_values(subject: Subject, case: Case) -> None:
    """Every output of forward, those that only backward sees included, lies within the bound of the reference."""
    needs_phases(subject, case, FORWARD)
    assert_phase(subject, case, FORWARD, case.arguments())


@check(grid.differentiable(grid.full))
def backward_values(subject: Subject, case: Case) -> None:
    """Gradients lie within the bound of the reference, computed from the same saved tensors (S2)."""
    needs_backward(subject, case)
    assert_phase(subject, case, BACKWARD, backward_arguments(subject, case))


@check(grid.differentiable(grid.layouts))
def gradient_layouts(subject: Subject, case: Case) -> None:
    """Gradients may arrive in any layout: stride 0 (M2), narrowed (M3), transposed, permuted, offset."""
    needs_backward(subject, case)
    args = backward_arguments(subject, case)
    count = len(case.spec.differentiable)
    grads, rest = args[:count], args[count:]
    signature = case.spec.backward
    assert signature is not None
    reference, bound = signature.reference(*args), signature.bound(*args)
    for layout in layouts.SAME_VALUES:
        arrived = tuple(layout(grad) for grad in grads)
        outputs = run_phase(subject.backend, case, BACKWARD, (*arrived, *rest))
        assert_right(case, signature.outputs, outputs, reference, bound, f"{layout.__name__} gradients: ")
    for layout in layouts.REPEATED_VALUES:
        arrived = tuple(layout(grad) for grad in grads)
        assert_phase(subject, case, BACKWARD, (*arrived, *rest), f"{layout.__name__} gradients: ")
    if count > 1:  # each gradient in a layout of its own
        chosen = (layouts.transposed, layouts.narrowed_columns, layouts.offset)
        arrived = tuple(layout(grad) for layout, grad in zip(itertools.cycle(chosen), grads, strict=False))
        outputs = run_phase(subject.backend, case, BACKWARD, (*arrived, *rest))
        assert_right(case, signature.outputs, outputs, reference, bound, "gradients of different layouts: ")


@check(grid.one_a_dtype)
def drawn_layouts(subject: Subject, case: Case) -> None:
    """Inputs, saved tensors and gradients in ten random layouts each: order in memory, gaps, offset."""
    generator = case.generator("layouts")
    for phase in phases_of(subject, case):
        args = arguments_of(subject, case, phase)
        for number in range(3 if subject.thin else 10):
            laid_out = tuple(
                layouts.drawn(value, generator) if isinstance(value, torch.Tensor) else value for value in args
            )
            described = [value.stride() for value in laid_out if isinstance(value, torch.Tensor)]
            assert_phase(subject, case, phase, laid_out, f"{phase}, layout {number}, strides {described}: ")


@check(grid.differentiable(grid.one_a_dtype))
def wanted_gradients(subject: Subject, case: Case) -> None:
    """Each combination of wanted gradients gives those, and shape [0] for the others."""
    needs_backward(subject, case)
    signature = case.spec.backward
    assert signature is not None
    args = case.arguments()
    outputs = forward(subject, case, args)
    grads = gradients_of_outputs(case, outputs)
    for needs in itertools.product((True, False), repeat=len(case.spec.gradients)):
        asked = case.spec.backward_arguments(grads, args, outputs, needs)
        results = run_phase(subject.backend, case, BACKWARD, asked)
        what = f"wanted {dict(zip(signature.outputs, needs, strict=True))}: "
        assert_declared(signature.outputs, results, signature.fake(*asked), what)
        assert_right(case, signature.outputs, results, signature.reference(*asked), signature.bound(*asked), what)


@check(grid.differentiable(grid.one_a_dtype))
def absent_gradients(subject: Subject, case: Case) -> None:
    """A gradient that may be absent is None where its output took no part in the loss; it then counts as zero."""
    needs_backward(subject, case)
    signature = case.spec.backward
    assert signature is not None
    args = backward_arguments(subject, case)
    count = len(case.spec.differentiable)
    may_be_absent = [name.endswith("?") for name in signature.tensors[:count]]
    for present in itertools.product((True, False), repeat=count):
        if all(there or allowed for there, allowed in zip(present, may_be_absent, strict=True)):
            grads = tuple(grad if there else None for grad, there in zip(args, present, strict=False))
            assert_phase(subject, case, BACKWARD, (*grads, *args[count:]), f"gradients present {present}: ")
