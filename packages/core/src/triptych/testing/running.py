"""Running a phase on a named backend, and asserting that it ran there and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import triptych
from triptych import operator, scope
from triptych.call import BACKWARD, FORWARD
from triptych.opspec import Tensors
from triptych.testing.assertions import assert_within
from triptych.testing.grid import Case
from triptych.testing.subject import Subject


class Skip(Exception):
    """A case that cannot be tested here, with the reason. Never raised for something that a backend got wrong."""


@contextmanager
def under(rules: str) -> Iterator[None]:
    """Put policy `rules` in force for the whole process, for the length of the block.

    Unlike `triptych.use`, it reaches autograd's own threads, on which backward of a compiled graph selects.
    """
    assert scope.used() is None, "the suite sets the policy of the process; leave the triptych.use block first"
    with scope.process_policy(rules):
        yield


def counts() -> Counter[tuple[str, str, str]]:
    """Calls so far in this process, by (op, phase, backend)."""
    return Counter({(row.op, row.phase, row.backend): row.calls for row in triptych.report().rows})


@contextmanager
def ran(expected: Mapping[tuple[str, str, str], int]) -> Iterator[None]:
    """Assert that the block runs exactly these calls, by (op, phase, backend): no more, no fewer, nothing else."""
    before = counts()
    yield
    found = dict(counts() - before)
    assert found == dict(expected), f"ran {_listed(found)}; expected {_listed(expected)}"


@contextmanager
def ran_only(backend: str, op: str) -> Iterator[None]:
    """Assert that the block runs `op` at least once, on `backend`, and nothing else anywhere."""
    before = counts()
    yield
    found = dict(counts() - before)
    others = [key for key in found if (key[0], key[2]) != (op, backend)]
    assert found and not others, f"ran {_listed(found)}; expected {op} on {backend} and nothing else"


def _listed(calls: Mapping[tuple[str, str, str], int]) -> str:
    return ", ".join(f"{op}.{phase} on {name} x{n}" for (op, phase, name), n in sorted(calls.items())) or "nothing"


def run_phase(backend: str, case: Case, phase: str, args: tuple[Any, ...]) -> Tensors:
    """One phase through the operator `torch.ops.triptych.<op>`, on `backend`; all its outputs."""
    with under(backend), ran({(case.op, phase, backend): 1}):
        return operator.run(case.spec, phase, args, "")


def assert_right(
    case: Case, names: Sequence[str], outputs: Tensors, references: Tensors, bounds: Tensors, what: str = ""
) -> None:
    """Assert that results of a case lie within their bounds, and are NaN where the case makes that right."""
    assert_within(names, outputs, references, bounds, what, case.agree)


def forward(subject: Subject, case: Case, args: tuple[Any, ...]) -> Tensors:
    """All outputs of forward on the subject; on `composite` where the subject has a backward only."""
    backend = subject.backend if FORWARD in subject.implements(case.op) else "composite"
    return run_phase(backend, case, FORWARD, args)


def gradients_of_outputs(case: Case, outputs: Tensors) -> Tensors:
    """Random gradients, contiguous, for the differentiable outputs among `outputs`."""
    generator = case.generator("gradients")
    named = dict(zip(case.spec.forward.outputs, outputs, strict=True))
    return tuple(
        torch.randn(named[name].shape, generator=generator, dtype=torch.float64).to(
            dtype=named[name].dtype, device=named[name].device
        )
        for name in case.spec.differentiable
    )


def everything_wanted(case: Case) -> tuple[bool, ...]:
    return (True,) * len(case.spec.gradients)


def backward_arguments(subject: Subject, case: Case) -> tuple[Any, ...]:
    """Arguments of backward: random contiguous gradients, what the subject's forward saved, everything wanted."""
    args = case.arguments()
    outputs = forward(subject, case, args)
    grads = gradients_of_outputs(case, outputs)
    return case.spec.backward_arguments(grads, args, outputs, everything_wanted(case))


def arguments_of(subject: Subject, case: Case, phase: str) -> tuple[Any, ...]:
    """Arguments of either phase for this case."""
    return case.arguments() if phase == FORWARD else backward_arguments(subject, case)


def phases_of(subject: Subject, case: Case) -> tuple[str, ...]:
    """The phases to test; Skip when the subject implements none of them."""
    phases = subject.implements(case.op)
    if not phases:
        raise Skip(f"{subject.backend} implements no phase of {case.op}")
    return phases


def needs_phases(subject: Subject, case: Case, *phases: str) -> None:
    """Skip unless the subject implements all of these."""
    for phase in phases:
        if phase not in subject.implements(case.op):
            raise Skip(f"{subject.backend} does not implement {case.op}.{phase}")


def needs_backward(subject: Subject, case: Case) -> None:
    """Skip unless the subject implements the op's backward."""
    needs_phases(subject, case, BACKWARD)


def needs_every_phase(subject: Subject, case: Case) -> None:
    """Skip unless the subject implements forward and, where the op has one, backward."""
    needs_phases(subject, case, *case.spec.phases)
