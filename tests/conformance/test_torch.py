"""The conformance suite over `torch`, where triptych-torch is installed."""

from __future__ import annotations

import pytest

from triptych.testing import BackendSuite, Subject

pytest.importorskip("triptych_torch", reason="triptych-torch is not installed")


class TestTorch(BackendSuite):
    subject = Subject("torch")
