"""The checks of the conformance suite, one module a theme. Importing this package fills `CHECKS`."""

# The order is that of the checks: what fails first should explain what fails after it.
from triptych.testing.checks import asking, values, gradients, memory, repetition, selection, operator, tracing  # noqa: F401, I001
from triptych.testing.checks import sharding  # noqa: F401
from triptych.testing.checks.catalogue import CHECKS, Check

__all__ = ["CHECKS", "Check"]
