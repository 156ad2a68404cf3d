"""Interceptors: code that runs around every phase of every call while a tool is switched on.

Trace, sync, checks and capture are interceptors. With none installed, dispatch pays one test of an empty tuple.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triptych.checking import check_outputs
from triptych.opspec import OpSpec, Tensors
from triptych.select import Decision


@dataclass(frozen=True)
class Invocation:
    """One phase of one call, about to run.

    Attributes:
        spec: the op.
        index: the number of this call of this op and phase in the process, from 0. A backward call's number is given
            in forward, in the order of the forward calls that need a gradient.
        decision: which backend runs it, and why.
        args: the phase's tensors and scalars.
    """

    spec: OpSpec
    index: int
    decision: Decision
    args: tuple[Any, ...]

    @property
    def op(self) -> str:
        return self.spec.name

    @property
    def phase(self) -> str:
        return self.decision.call.phase

    @property
    def layer(self) -> str:
        return self.decision.layer

    def __str__(self) -> str:
        return f"{self.op}.{self.phase} call {self.index}" + (f" in layer {self.layer!r}" if self.layer else "")


Proceed = Callable[[], Tensors]
Interceptor = Callable[[Invocation, Proceed], Tensors]
"""Called with an invocation and the rest of the chain; returns what `proceed()` returned."""

active: tuple[Interceptor, ...] = ()
_lock = threading.Lock()


def install(interceptor: Interceptor) -> Callable[[], None]:
    """Put `interceptor` around those already there; returns its own undo."""
    global active
    with _lock:
        active = (*active, interceptor)

    def undo() -> None:
        global active
        with _lock:
            active = tuple(other for other in active if other is not interceptor)

    return undo


def run(invocation: Invocation) -> Tensors:
    """Run the chosen implementation inside every active interceptor, the latest installed outermost."""

    def proceed() -> Tensors:
        outputs = invocation.decision.function(*invocation.args)
        check_outputs(invocation.spec, invocation.decision, outputs)
        return outputs

    for interceptor in active:
        proceed = _around(interceptor, invocation, proceed)
    return proceed()


def _around(interceptor: Interceptor, invocation: Invocation, inner: Proceed) -> Proceed:
    return lambda: interceptor(invocation, inner)


def _after_fork() -> None:
    """A lock that another thread held at the moment of the fork would never be released in the child."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
