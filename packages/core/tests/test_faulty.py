"""The conformance suite proved: it catches every planted fault, and passes a backend that has none."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from triptych import dispatch, registry
from triptych.autograd import NoSecondDerivative
from triptych.compile_mode import Mode
from triptych.scope import Scope
from triptych.testing import CHECKS, first_failure, outcomes
from triptych.testing.execution import FAILED, PASSED, SKIPPED
from triptych.testing.faulty import FAULTS, LOOPBACK, planted
from triptych.testing.faulty.values import ignoring

NEEDS_NO_FAULT = {"bad_arguments", "second_derivative"}
"""Checks of what dispatch does for every backend, which no backend can get wrong. Broken below in other ways."""

RUNS_NOTHING = {"refusals", "bad_arguments"}
"""Checks that only ask."""

MAY_BE_SKIPPED = {
    ("sharding_rule", "no axis of this case can be split in two"),
    ("sharding_rule", "each part draws noise of its own"),
    ("sharding_rule", "what forward leaves for backward is in doubt in this case"),
}
"""Cases that a healthy backend need not be tested on, by check."""


@pytest.mark.parametrize(
    ("name", "check"), [(name, check) for name, fault in FAULTS.items() for check in fault.caught_by]
)
def test_a_planted_fault_is_caught(name: str, check: str) -> None:
    with planted(FAULTS[name]) as subject:
        failure = first_failure(subject, check)
    assert failure is not None, f"{check} does not catch {name}: {FAULTS[name].summary}"


SCALARS = [(op, scalar) for op in registry.ops.names() for scalar in registry.ops.get(op).forward.scalar_names]


@pytest.mark.parametrize(("op", "scalar"), SCALARS)
def test_no_scalar_of_any_op_can_be_ignored(op: str, scalar: str) -> None:
    with planted(ignoring(scalar)) as subject:
        subject = dataclasses.replace(subject, ops=(op,))
        failure = first_failure(subject, "forward_values") or first_failure(subject, "backward_values")
    assert failure is not None, f"no sample of {op} has a {scalar} that matters and is not the usual one"


@pytest.mark.parametrize("check", CHECKS)
def test_a_backend_without_fault_passes(check: str) -> None:
    with planted(LOOPBACK) as subject:
        found = list(outcomes(subject, check))
    assert [outcome for outcome in found if outcome.verdict == FAILED] == []
    skipped = [outcome for outcome in found if outcome.verdict == SKIPPED]
    assert [outcome for outcome in skipped if (check, outcome.text) not in MAY_BE_SKIPPED] == []
    assert {outcome.case.op for outcome in found if outcome.verdict == PASSED} == {outcome.case.op for outcome in found}
    assert found


def test_every_check_has_a_fault_that_it_catches() -> None:
    proved = {check for fault in FAULTS.values() for check in fault.caught_by}
    assert proved | NEEDS_NO_FAULT == set(CHECKS)
    assert not proved & NEEDS_NO_FAULT


def test_every_fault_says_what_is_wrong() -> None:
    for fault in FAULTS.values():
        assert fault.summary.endswith("."), fault.name
        assert fault.caught_by, fault.name


@pytest.mark.parametrize("check", sorted(set(CHECKS) - RUNS_NOTHING))
def test_a_policy_that_is_lost_fails_every_check(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """W6: the decorator, the variable or the block that names the backend has no effect; something else runs."""
    extended = Scope.extended

    def lost(self: Scope, rules: str, source: str, mode: Mode | None = None) -> Scope:
        return extended(self, "composite", source, mode)

    with planted(LOOPBACK) as subject:
        monkeypatch.setattr(Scope, "extended", lost)
        failure = first_failure(subject, check)
    assert failure is not None
    assert "ran" in failure.text


def test_dispatch_that_checks_nothing_fails_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    op = dispatch.define(registry.ops.get("rms_norm"))
    monkeypatch.setattr(op, "spec", dataclasses.replace(op.spec, check=lambda *args: None))
    with planted(LOOPBACK) as subject:
        failure = first_failure(dataclasses.replace(subject, ops=("rms_norm",)), "bad_arguments")
    assert failure is not None


def test_silent_second_derivatives_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return tuple(torch.zeros(()) if needed else None for needed in ctx.needs_input_grad)

    monkeypatch.setattr(NoSecondDerivative, "backward", staticmethod(zeros))
    with planted(LOOPBACK) as subject:
        failure = first_failure(subject, "second_derivative")
    assert failure is not None
