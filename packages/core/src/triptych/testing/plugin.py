"""The pytest plug-in: gives the tests of a `BackendSuite` their cases. Active wherever triptych is installed.

It imports the suite only where a module has done so already, so that it costs other test runs nothing.
"""

from __future__ import annotations

import sys

import pytest


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


def _complaints(subject: object) -> tuple[str, ...]:
    execution = sys.modules["triptych.testing.execution"]
    key = id(subject)
    if key not in _seen:
        _seen[key] = execution.unmatched_exclusions(subject)
    return _seen[key]


_seen: dict[int, tuple[str, ...]] = {}
