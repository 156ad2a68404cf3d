"""Where the ranks of a job stood when its time was up: one of them may have kept the others waiting.

A call is traced before it is launched, and nothing is traced when it returns: a rank whose last call others have left
behind them was in that call, or had just left it. What is compared is how many calls of a good run each did not make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from triptych.trace import CallRecord


def suspect(good: Sequence[CallRecord], hung: Sequence[CallRecord]) -> int | None:
    """The rank that is furthest from the end; None when that is none or several."""
    missing = _missing(good, hung)
    furthest = [rank for rank, calls in missing.items() if calls == max(missing.values())]
    return furthest[0] if len(furthest) == 1 < len(missing) else None


def note(good: Sequence[CallRecord], hung: Sequence[CallRecord]) -> list[str]:
    """A note on where each rank stood; none for a job of one process."""
    missing = _missing(good, hung)
    if len(missing) < 2:
        return []
    last = {call.rank: _place(call) for call in hung}
    behind = suspect(good, hung)
    others: dict[str, list[int]] = {}
    for rank in missing:
        if rank != behind:
            others.setdefault(last.get(rank, "nothing yet"), []).append(rank)
    stood = "; ".join(f"rank {', '.join(map(str, ranks))}: {place}" for place, ranks in others.items())
    if behind is None:
        return [f"The last call that each rank had begun when the time was up: {stood}."]
    place = f"in {last[behind]}" if behind in last else "before its first call"
    return [f"When the time was up, rank {behind} was {place}, or had just left it. Others had gone on to {stood}."]


def _missing(good: Sequence[CallRecord], hung: Sequence[CallRecord]) -> dict[int, int]:
    """How many calls each rank did not make any more."""
    wanted, made = Counter(call.rank for call in good), Counter(call.rank for call in hung)
    return {rank: wanted[rank] - made[rank] for rank in sorted(wanted)}


def _place(call: CallRecord) -> str:
    return f"{call.op}.{call.phase} call {call.call}" + (f" in layer {call.layer!r}" if call.layer else "")
