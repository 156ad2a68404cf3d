"""Reading what is in force, for commands that change nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from triptych import compile_mode, scope
from triptych.run import preflight


@contextmanager
def policy_in_force() -> Iterator[None]:
    """Put the policy in force that a program with this environment would have, for the length of a block.

    The tools of the environment stay off: a command that reads must not write into a trace or make a directory.

    Raises:
        PolicyError, EnvironmentVariableError: a program with this environment would not run.
    """
    policy, mode = preflight.check_environment(os.environ), compile_mode.from_environment(os.environ)
    with scope.within(scope.Scope(policy, mode)):
        yield
