"""The shaky backend passes Triptych's conformance suite when no fault is planted."""

from __future__ import annotations

import pytest

from triptych.testing import BackendSuite, Subject


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHAKY_FAULT", "none")


class TestShaky(BackendSuite):
    subject = Subject(
        "shaky",
        device_types=("cpu", "cuda"),  # it has no place in auto, so it says where it runs
        thin="its kernels are the ops' composites, which have the full grid to themselves",
    )
