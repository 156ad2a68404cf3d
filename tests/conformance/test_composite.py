"""The conformance suite over `composite`, which comes with core."""

from __future__ import annotations

from triptych.testing import BackendSuite, Subject


class TestComposite(BackendSuite):
    subject = Subject("composite")
