"""What ran: the counters of this process as data and as text."""

from __future__ import annotations

import os
from dataclasses import dataclass

from triptych import compile_mode, dispatch, inline, scope


@dataclass(frozen=True)
class Row:
    """How often one phase of one op ran on one backend."""

    op: str
    phase: str
    backend: str
    calls: int


@dataclass(frozen=True)
class Report:
    """The counters of this process since it started (or was forked).

    Attributes:
        rows: by op, phase and backend.
        policy: the rules in force, as text.
        compile_mode: how torch.compile sees ops, and where that was asked for, as text.
        inlined: ops that torch.compile has traced through. Their compiled calls are not in `rows`.
        notes: what a reader should know, such as a policy variable that was changed too late to count.
    """

    rows: tuple[Row, ...]
    policy: str
    compile_mode: str
    inlined: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"policy: {self.policy}", f"compile mode: {self.compile_mode}"]
        for row in self.rows:
            times = "1 call" if row.calls == 1 else f"{row.calls} calls"
            lines.append(f"{row.op}.{row.phase} ran on {row.backend}: {times}")
        if not self.rows:
            lines.append("no op was called")
        if self.inlined:
            names = ", ".join(self.inlined)
            lines.append(f"torch.compile traced through {names}; what runs inside its graphs is not counted")
        return "\n".join((*lines, *self.notes))


def report() -> Report:
    """What ran in this process so far, by op, phase and backend."""
    rows = [
        Row(name, phase, backend, calls)
        for name, op in dispatch.live().items()
        for (phase, backend), calls in op.counts().items()
        if calls
    ]
    now = scope.current()
    obstacle = compile_mode.obstacle() if now.mode.name == compile_mode.INLINE else ""
    mode = f"{now.mode}, not applied: {obstacle}" if obstacle else str(now.mode)
    return Report(tuple(rows), str(now.policy), mode, inline.traced_ops(), _notes())


def calls(op: str, phase: str) -> int:
    """How many calls of this phase of this op have begun in this process, on whatever backend."""
    found = dispatch.live().get(op)
    return 0 if found is None else sum(n for (each, _), n in found.counts().items() if each == phase)


def _notes() -> tuple[str, ...]:
    read, now = scope.environment_text(), os.environ.get("TRIPTYCH_BACKEND", "")
    if read is None or read == now:
        return ()
    return (
        f"TRIPTYCH_BACKEND is now {now!r} but was {read!r} when the first op ran; the change was not applied. "
        "Set it before the program starts, or use triptych.use.",
    )
