"""What a backend says before anything runs: refusals and their texts, arguments that fit no backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import triptych
from triptych.errors import ArgumentError, Refused
from triptych.opspec import OpSpec
from triptych.testing import grid
from triptych.testing.checks.catalogue import check, check_of_asking
from triptych.testing.grid import Case
from triptych.testing.running import phases_of, ran, under
from triptych.testing.subject import Subject


def refused_for(subject: Subject, case: Case, phase: str) -> tuple[str, ...]:
    """The subject's reasons against one phase of a case; empty when it takes it."""
    with under(subject.backend):
        try:
            triptych.explain(case.op, *case.arguments(), phase=phase)
        except Refused as refusal:
            return tuple(reason for _, reasons in refusal.rejected for reason in reasons)
    return ()


def assert_may_be_refused(subject: Subject, case: Case, phase: str, reasons: tuple[str, ...]) -> None:
    """Assert that the case is outside the floor, which every backend runs on the devices it supports."""
    assert not case.floor, (
        f"{subject.backend} refuses {case.op}.{phase} of {case.id}, which belongs to the floor: {' '.join(reasons)}"
    )


@check_of_asking(grid.full)
def refusals(subject: Subject, case: Case) -> None:
    """No floor case is refused, and a refusal gives reasons, each a whole sentence: found, needed, remedy."""
    for phase in phases_of(subject, case):
        with ran({}):
            reasons = refused_for(subject, case, phase)
        if reasons:
            assert_may_be_refused(subject, case, phase, reasons)
        with under(subject.backend):
            call = triptych.explain(case.op, *case.arguments(), phase=phase).call if not reasons else None
        further = tuple(subject.plugin.reasons_against_auto(call)) if call is not None else ()
        for reason in (*reasons, *further):
            text = reason.strip()
            assert text.endswith((".", "!")) and len(text.split()) >= 5, (
                f"the reason {reason!r} against {case.op}.{phase} of {case.id} is not a whole sentence; "
                "say what was found, what is needed and what to do"
            )


@check(grid.one)
def bad_arguments(subject: Subject, case: Case) -> None:
    """Tensors and scalars that do not fit together raise ArgumentError, and nothing is launched."""
    tried = 0
    for what, args in _broken(case.spec, case.arguments()):
        try:
            case.spec.check(*args)
        except ArgumentError as expected:
            tried += 1
            with under(subject.backend), ran({}):
                raised = _error_of_call(case, args)
            wanted = str(expected)
            assert raised == wanted, f"{what}: expected the ArgumentError {wanted!r}; found {raised!r}"
    assert tried, f"the check of {case.op} accepts every broken call that the suite knows how to make"


def _error_of_call(case: Case, args: tuple[Any, ...]) -> str:
    """The text of the ArgumentError that a call raises; "" when it raises none."""
    try:
        case.live.call("", *args)
    except ArgumentError as error:
        return str(error)
    return ""


def _broken(spec: OpSpec, good: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Calls that are unlikely to fit any op: (what was done to which argument, the arguments)."""

    def with_argument(i: int, value: Any) -> tuple[Any, ...]:
        return (*good[:i], value, *good[i + 1 :])

    names = spec.forward.tensor_names
    for i, name in enumerate(names):
        tensor: torch.Tensor | None = good[i]
        yield f"{name} as text", with_argument(i, "text")
        if tensor is None:
            continue
        yield f"no {name}", with_argument(i, None)
        yield f"{name} of integers", with_argument(i, tensor.to(torch.int64))
        yield f"{name} in float64 alone", with_argument(i, tensor.double())
        yield f"{name} with one more column", with_argument(i, torch.cat([tensor, tensor[..., :1]], -1))
        yield f"{name} with one more dimension", with_argument(i, tensor.unsqueeze(0))
        yield f"{name} without dimensions", with_argument(i, tensor.reshape(-1)[0])
    for i, (name, kind) in enumerate(spec.forward.scalars, start=len(names)):
        if kind is float:
            for value in (float("nan"), float("inf"), -1.0):
                yield f"{name} = {value}", with_argument(i, value)
        if kind is int:
            for number in (0, -1, -2, 2**40):
                yield f"{name} = {number}", with_argument(i, number)
        if kind is str:
            yield f"{name} = 'no such value'", with_argument(i, "no such value")
