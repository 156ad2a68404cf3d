"""From what the search knows, candidates and culprits, to what a report says: sites."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from triptych.bisect.engine import Candidate, Culprit, Level
from triptych.bisect.policies import Side
from triptych.bisect.verdicts import Site
from triptych.trace import CallRecord


class Sites:
    """Describes candidates by what ran them in the bad run.

    Args:
        bad: the bad policy.
        bad_calls: the trace of the bad run.
        ranks: the ranks of the job.

    Attributes:
        backends: what ran each candidate that the bad run reached.
    """

    def __init__(self, bad: Side, bad_calls: Iterable[CallRecord], ranks: Sequence[int] = ()) -> None:
        self.backends = {candidate(each): each.backend for each in bad_calls}
        self._bad = bad
        self._several = len(ranks) > 1

    def of(self, culprit: Culprit) -> Site:
        """The site of a culprit; of its layer and call, as far as it was narrowed down."""
        first = culprit.members[0]
        backend = self.backends.get(first)
        if backend is None:
            backend = self._bad.choice(first.op, first.phase, first.layer, first.call, first.rank)
        site = Site(
            first.op,
            first.phase,
            first.layer if culprit.level in (Level.CALL, Level.LAYER) else None,
            first.call if culprit.level is Level.CALL else None,
            len(culprit.members),
            backend,
        )
        if not self._several:
            return site
        ranks = tuple(sorted({each.rank for each in culprit.members}))
        return replace(site, rank=ranks[0] if len(ranks) == 1 else None, ranks=ranks, alike=culprit.alike)

    def suspects(self, candidates: Sequence[Candidate]) -> tuple[Site, ...]:
        """Suspects, layer by layer: there may be thousands of calls."""
        layers: dict[tuple[str, str, str], list[Candidate]] = {}
        for each in candidates:
            layers.setdefault((each.op, each.phase, each.layer), []).append(each)
        groups = [tuple(members) for members in layers.values()]
        return tuple(self.of(Culprit(Level.LAYER if len({m.call for m in g}) > 1 else Level.CALL, g)) for g in groups)


def candidate(call: CallRecord) -> Candidate:
    """What a traced call is to the search."""
    return Candidate(call.op, call.phase, call.layer, call.call, call.rank)
