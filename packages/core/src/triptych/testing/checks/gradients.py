"""Gradients as a training program gets them: through autograd, on the short path."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError

from triptych.call import BACKWARD
from triptych.opspec import Tensors
from triptych.testing import grid
from triptych.testing.assertions import assert_same_bits
from triptych.testing.checks.catalogue import check
from triptych.testing.grid import Case
from triptych.testing.running import (
    Skip,
    assert_right,
    forward,
    gradients_of_outputs,
    needs_every_phase,
    ran,
    ran_only,
    run_phase,
    under,
)
from triptych.testing.subject import Subject


def as_tuple(outputs: Any) -> Tensors:
    """What an op returned, as a tuple also where it is one tensor."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def differentiable_outputs(case: Case, outputs: Any) -> Tensors:
    """Those of what the op returned that carry gradients: the first ones."""
    return as_tuple(outputs)[: len(case.spec.differentiable)]


def leaves_of(case: Case, wanted: Sequence[str]) -> tuple[torch.Tensor | None, ...]:
    """Forward's tensors as leaves of a graph; those named in `wanted` require a gradient."""
    tensors = zip(case.spec.forward.tensor_names, case.tensors(), strict=True)
    return tuple(None if each is None else each.detach().requires_grad_(name in wanted) for name, each in tensors)


def differentiable_inputs(case: Case) -> tuple[str, ...]:
    """The forward inputs, of those present, that have gradients."""
    present = dict(zip(case.spec.forward.tensor_names, case.tensors(), strict=True))
    return tuple(name for names in case.spec.gradients for name in names if present[name] is not None)


def by_input(case: Case, results: Sequence[torch.Tensor], inputs: Sequence[str]) -> Tensors:
    """For each of `inputs`, the output of backward that is its gradient."""
    place = {name: i for i, names in enumerate(case.spec.gradients) for name in names}
    return tuple(results[place[name]] for name in inputs)


def expected_gradients(
    case: Case, grads: Sequence[torch.Tensor | None], outputs: Tensors, inputs: Sequence[str]
) -> tuple[Tensors, Tensors]:
    """Reference and bound of the gradients of `inputs`, from what `outputs` holds of saved tensors."""
    phase = case.spec.backward
    assert phase is not None
    present = {
        name: tensor is not None for name, tensor in zip(case.spec.forward.tensor_names, case.tensors(), strict=True)
    }
    args = case.spec.backward_arguments(tuple(grads), case.arguments(), outputs, case.spec.wanted(present))
    return by_input(case, phase.reference(*args), inputs), by_input(case, phase.bound(*args), inputs)


def both_phases(subject: Subject, case: Case) -> dict[tuple[str, str, str], int]:
    """What one forward and backward on the subject count; forward alone, where the op has no backward."""
    return {(case.op, phase, subject.backend): 1 for phase in case.spec.phases}


@check(grid.differentiable(grid.full))
def autograd_runs_the_phases(subject: Subject, case: Case) -> None:
    """Outputs and gradients through autograd are, bit for bit, those of the two phases called alone."""
    needs_every_phase(subject, case)
    names = differentiable_inputs(case)
    args = case.arguments()
    outputs = forward(subject, case, args)
    grads = gradients_of_outputs(case, outputs)
    present = {name: tensor is not None for name, tensor in zip(case.spec.forward.tensor_names, args, strict=False)}
    asked = case.spec.backward_arguments(grads, args, outputs, case.spec.wanted(present))
    alone = run_phase(subject.backend, case, BACKWARD, asked)
    leaves = leaves_of(case, names)
    inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    with under(subject.backend), ran(both_phases(subject, case)):
        results = differentiable_outputs(case, case.live.call("", *leaves, *case.scalars))
        found = torch.autograd.grad(results, inputs, grads)
    what = "through autograd and alone"
    assert_same_bits(case.spec.differentiable, results, outputs[: len(results)], what)
    assert_same_bits([f"gradient of {name}" for name in names], found, by_input(case, alone, names), what)


@check(grid.differentiable(grid.layouts))
def autograd_layouts(subject: Subject, case: Case) -> None:
    """Gradients are right behind a sum (stride 0, M2), a concatenation (narrowed, M3) and a transpose."""
    needs_every_phase(subject, case)
    names = differentiable_inputs(case)
    outputs = forward(subject, case, case.arguments())
    given = gradients_of_outputs(case, outputs)
    for what in ("sum", "cat", "transpose"):
        leaves = leaves_of(case, names)
        inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        with under(subject.backend), ran(both_phases(subject, case)):
            results = differentiable_outputs(case, case.live.call("", *leaves, *case.scalars))
            if what == "sum":
                grads = tuple(torch.ones_like(grad) for grad in given)
                found = torch.autograd.grad([result.sum() for result in results], inputs)
            elif what == "cat":
                grads = given
                wider = [torch.cat([result, torch.zeros_like(result)], -1) for result in results]
                found = torch.autograd.grad(wider, inputs, [torch.cat([grad, grad], -1) for grad in grads])
            else:
                grads = given
                turned = [result.transpose(0, -1) for result in results]
                found = torch.autograd.grad(turned, inputs, [grad.transpose(0, -1).contiguous() for grad in grads])
        reference, bound = expected_gradients(case, grads, outputs, names)
        assert_right(case, [f"gradient of {name}" for name in names], found, reference, bound, f"behind a {what}: ")


@check(grid.differentiable(grid.one_a_dtype))
def autograd_subsets(subject: Subject, case: Case) -> None:
    """Any subset of inputs may require gradients and any subset of outputs may take part in the loss."""
    needs_every_phase(subject, case)
    outputs = forward(subject, case, case.arguments())
    grads = gradients_of_outputs(case, outputs)
    every = differentiable_inputs(case)
    used = range(len(grads))
    for names in (subset for size in range(1, len(every) + 1) for subset in itertools.combinations(every, size)):
        for kept in (subset for size in range(1, len(grads) + 1) for subset in itertools.combinations(used, size)):
            leaves = leaves_of(case, names)
            inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            with under(subject.backend), ran(both_phases(subject, case)):
                results = differentiable_outputs(case, case.live.call("", *leaves, *case.scalars))
                found = torch.autograd.grad([results[i] for i in kept], inputs, [grads[i] for i in kept])
            given = [grad if i in kept else torch.zeros_like(grad) for i, grad in enumerate(grads)]
            reference, bound = expected_gradients(case, given, outputs, names)
            what = f"gradients of {', '.join(names)} from {', '.join(case.spec.differentiable[i] for i in kept)}: "
            assert_right(case, [f"gradient of {name}" for name in names], found, reference, bound, what)


@check(grid.differentiable(grid.smooth_in_float64))
def gradcheck(subject: Subject, case: Case) -> None:
    """In float64, the gradients of smooth inputs agree with finite differences of forward."""
    needs_every_phase(subject, case)
    if not case.smooth:
        raise Skip(f"no sample of {case.op} is smooth: its gradients are no derivatives anywhere")
    leaves = leaves_of(case, case.smooth)

    def function(*tensors: torch.Tensor | None) -> Tensors:
        return differentiable_outputs(case, case.live.call("", *tensors, *case.scalars))

    before = torch.random.get_rng_state()
    torch.manual_seed(0)  # gradcheck's fast mode draws the directions it differentiates in
    try:
        with under(subject.backend), ran_only(subject.backend, case.op):
            assert torch.autograd.gradcheck(function, leaves, fast_mode=True)  # type: ignore[arg-type] # None passes
    except GradcheckError as cause:
        raise AssertionError(str(cause).strip()) from cause
    finally:
        torch.random.set_rng_state(before)


@check(grid.not_differentiable(grid.one))
def outputs_carry_no_gradient(subject: Subject, case: Case) -> None:
    """The outputs of an op without backward require no gradient, although every floating input does."""
    needs_every_phase(subject, case)
    present = zip(case.spec.forward.tensor_names, case.tensors(), strict=True)
    floating = [name for name, tensor in present if tensor is not None and tensor.is_floating_point()]
    for what, call in _paths(case).items():
        leaves = leaves_of(case, floating)
        with under(subject.backend), ran(both_phases(subject, case)):
            results = as_tuple(call("", *leaves, *case.scalars))
        for name, result in zip(case.spec.forward.outputs, results, strict=False):
            assert not result.requires_grad, f"{what}: {name} requires a gradient, and {case.op} has no backward"


def _paths(case: Case) -> dict[str, Callable[..., Any]]:
    """The ways into an op, by name."""
    return {"eager": case.live.call, "the operator": case.live.through_operator}


@check(grid.differentiable(grid.one))
def second_derivative(subject: Subject, case: Case) -> None:
    """Differentiating twice raises NotImplementedError, which names the op; it never gives silent zeros."""
    needs_every_phase(subject, case)
    for what, call in _paths(case).items():
        leaves = leaves_of(case, differentiable_inputs(case))
        inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        with under(subject.backend), ran(both_phases(subject, case)):
            results = differentiable_outputs(case, call("", *leaves, *case.scalars))
            first = torch.autograd.grad([result.pow(2).sum() for result in results], inputs, create_graph=True)
            try:
                torch.autograd.grad([grad.pow(2).sum() for grad in first], inputs)
                refusal = ""
            except NotImplementedError as error:
                refusal = str(error)
        assert refusal, f"{what}: a second derivative came back; it must raise NotImplementedError"
        assert case.op in refusal, f"{what}: the error of a second derivative does not name {case.op}: {refusal}"
