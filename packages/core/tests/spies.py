"""Backends for tests: they record what they were asked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import triptych
from triptych import registry
from triptych.backend import Backend
from triptych.call import Call
from triptych.opspec import PhaseFunction


class Spy(Backend):
    """Runs the composite of every op, and keeps each call that it was asked about and each that it ran."""

    def __init__(self, name: str = "spy", refuse: tuple[str, ...] = ()) -> None:
        super().__init__(name)
        self.refuse = refuse
        self.asked: list[Call] = []
        self.ran: list[tuple[str, str, tuple[Any, ...]]] = []

    def ops(self) -> tuple[str, ...]:
        return registry.ops.names()

    def reasons_against(self, call: Call) -> list[str]:
        self.asked.append(call)
        return ["this spy refuses it. Use 'composite'."] if call.phase in self.refuse else []

    def implementation(self, op: str, phase: str) -> PhaseFunction:
        composite = registry.ops.get(op).phase(phase).composite

        def run(*args: Any) -> Any:
            self.ran.append((op, phase, args))
            return composite(*args)

        return run


@contextmanager
def spying(policy: str = "spy", **options: Any) -> Iterator[Spy]:
    """A spy, registered and in force under `policy` for the block."""
    spy = Spy(**options)
    with registry.backends.added(spy.name, spy), triptych.use(policy):
        yield spy


Counts = dict[tuple[str, str, str], int]


def counts() -> Counts:
    """Calls so far by (op, phase, backend)."""
    return {(row.op, row.phase, row.backend): row.calls for row in triptych.report().rows}


@contextmanager
def ran() -> Iterator[Counts]:
    """Yields a dictionary that holds, after the block, what ran inside it."""
    before = counts()
    inside: Counts = {}
    yield inside
    inside.update({key: n - before.get(key, 0) for key, n in counts().items() if n != before.get(key, 0)})


def call_and_count(queue: Any) -> None:
    """What a child process does: calls an op on `composite`, and puts its own counts and its process id."""
    with triptych.use("composite"):
        triptych.rms_norm(torch.ones(2, 8))
    queue.put((counts(), os.getpid()))
