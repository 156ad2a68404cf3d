"""What code that torch.compile traces asks of Python itself, when it is traced.

A marked function is run, not traced into, and its result is a constant of the graph. That is what
torch.compiler.assume_constant_result does, which would import the compiler: as long as importing torch. A torch that
did not know the mark would trace into the function, and say under fullgraph that it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function: traced code takes what it returns for a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def exporting() -> bool:
    """Whether torch.export is tracing. torch 2.11 takes torch.compiler.is_exporting() for True in all traced code."""
    return bool(torch.compiler.is_exporting())
