"""The suite as tests: subclass `BackendSuite`, name a backend, and pytest runs every check over the whole grid.

from triptych.testing import BackendSuite, Subject

class TestMine(BackendSuite):
    subject = Subject("mine")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from triptych.testing.checks import CHECKS, Check
from triptych.testing.execution import EXCLUDED, FAILED, SKIPPED, execute
from triptych.testing.grid import Case
from triptych.testing.subject import Subject


class BackendSuite:
    """The conformance suite of a backend: one test a check, parametrised over the check's part of the grid.

    A subclass sets `subject`. The pytest plug-in of triptych supplies the cases; it is active wherever triptych is
    installed.
    """

    subject: ClassVar[Subject]


def _test(check: Check) -> Callable[[BackendSuite, Case], None]:
    def test(self: BackendSuite, case: Case) -> None:
        __tracebackhide__ = True
        outcome = execute(self.subject, check, case)
        if outcome.verdict == SKIPPED:
            pytest.skip(outcome.text)
        if outcome.verdict == EXCLUDED:
            pytest.xfail(outcome.text)
        if outcome.verdict == FAILED:
            if outcome.cause is None or isinstance(outcome.cause, AssertionError):
                pytest.fail(f"{check.name} on {self.subject.backend}: {outcome.text}", pytrace=False)
            raise outcome.cause

    test.__name__ = f"test_{check.name}"
    test.__qualname__ = f"BackendSuite.{test.__name__}"
    test.__doc__ = check.function.__doc__
    return test


for _check in CHECKS.values():
    setattr(BackendSuite, f"test_{_check.name}", _test(_check))


def parameters(subject: Subject, check: Check) -> list[Any]:
    """The cases of one check on this machine, as pytest parameters; those on a GPU carry the mark `gpu`."""
    found = []
    for device_type in subject.tested_device_types():
        marks = [pytest.mark.gpu] if device_type == "cuda" else []
        for op in subject.tested_ops():
            found += [pytest.param(case, id=case.id, marks=marks) for case in check.cases(subject, op, device_type)]
    if not found:
        wanted = ", ".join(subject.device_types) or "any device of this machine"
        why = f"{subject.backend} has nothing to test here: no op that {check.name} is about, for {wanted}"
        found.append(pytest.param(None, id="nothing", marks=pytest.mark.skip(reason=why)))
    return found
