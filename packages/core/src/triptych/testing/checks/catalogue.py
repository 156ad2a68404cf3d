"""The list of checks: what each is called, what it runs on, what it asserts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from triptych.testing.grid import Case, Cases
from triptych.testing.subject import Subject

Assertion = Callable[[Subject, Case], None]
"""Raises AssertionError when the subject is at fault, and Skip when the case cannot be tested here."""


@dataclass(frozen=True)
class Check:
    """One property that every backend must have.

    Attributes:
        name: of the check; its test is called `test_<name>`.
        cases: the part of the grid it runs on.
        function: the assertion.
        asks: whether the backend is asked first and a refused case skipped. Off for the check of refusals itself.
    """

    name: str
    cases: Cases
    function: Assertion
    asks: bool = True

    @property
    def summary(self) -> str:
        """The first paragraph of its docstring."""
        return inspect.cleandoc(self.function.__doc__ or "").split("\n\n")[0].replace("\n", " ")


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order in which a failure explains most: what fails first makes the rest plain."""


def check(cases: Cases) -> Callable[[Assertion], Assertion]:
    """Add the decorated function to the checks; it runs on `cases` that the backend does not refuse."""
    return _adds(cases, asks=True)


def check_of_asking(cases: Cases) -> Callable[[Assertion], Assertion]:
    """Add the decorated function to the checks; it runs on all `cases`, whatever the backend says of them."""
    return _adds(cases, asks=False)


def _adds(cases: Cases, asks: bool) -> Callable[[Assertion], Assertion]:
    def add(function: Assertion) -> Assertion:
        name = function.__name__
        assert name not in CHECKS and function.__doc__, name
        CHECKS[name] = Check(name, cases, function, asks)
        return function

    return add
