"""The conformance suite: what every backend must do, as tests that any backend runs.

A backend's own test file names the backend and adds what the suite cannot know:

    from triptych.testing import BackendSuite, Subject

    class TestMine(BackendSuite):
        subject = Subject("mine")

`Subject` holds what its author may declare. `outcomes` and `first_failure` run the checks without pytest.
`triptych.testing.faulty` holds the planted faults that prove the checks. Only `BackendSuite` needs pytest.
"""

from typing import TYPE_CHECKING, Any

from triptych.testing.checks import CHECKS, Check
from triptych.testing.execution import Outcome, execute, first_failure, outcomes
from triptych.testing.grid import Case
from triptych.testing.running import Skip, ran, under
from triptych.testing.subject import Subject

if TYPE_CHECKING:
    from triptych.testing.conformance import BackendSuite

__all__ = [
    "CHECKS",
    "BackendSuite",
    "Case",
    "Check",
    "Outcome",
    "Skip",
    "Subject",
    "execute",
    "first_failure",
    "outcomes",
    "ran",
    "under",
]


def __getattr__(name: str) -> Any:
    if name != "BackendSuite":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from triptych.testing.conformance import BackendSuite

    return BackendSuite
