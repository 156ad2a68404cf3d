"""The pytest plug-in: gives the tests of a `BackendSuite` their cases. Active wherever triptych is installed.

It imports the suite only where a module has done so already, so that it costs other test runs nothing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from triptych.testing.subject import Subject


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    conformance = sys.modules.get("triptych.testing.conformance")
    if conformance is None or metafunc.cls is None or not issubclass(metafunc.cls, conformance.BackendSuite):
        return
    name = metafunc.function.__name__.removeprefix("test_")
    check = conformance.CHECKS.get(name)
    if check is None or "case" not in metafunc.fixturenames:
        return  # a test of the subclass's own
    subject = getattr(metafunc.cls, "subject", None)
    if subject is None:
        raise pytest.UsageError(f"{metafunc.cls.__name__} has no subject. Write: subject = Subject('backend name').")
    complaints = _complaints(subject)
    if complaints:
        raise pytest.UsageError(f"{metafunc.cls.__name__}: {' '.join(complaints)}")
    metafunc.parametrize("case", conformance.parameters(subject, check))


def _complaints(subject: Subject) -> tuple[str, ...]:
    """What is wrong with the subject's exclusions; found once, not once a check."""
    for known, complaints in _seen:
        if known is subject:
            return complaints
    execution = sys.modules["triptych.testing.execution"]
    found: tuple[str, ...] = execution.unmatched_exclusions(subject)
    _seen.append((subject, found))
    return found


_seen: list[tuple[Subject, tuple[str, ...]]] = []
"""Subjects themselves, not their ids: an id is given to another object once its owner is gone."""
