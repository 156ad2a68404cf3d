"""The search: which smallest set of candidates makes a predicate fail.

Pure. It knows candidates and the outcomes it is told; not torch, not policies, not processes. A search is a generator
that yields the next subset to test, receives the outcome, and returns a `Finding`. It is deterministic: told the same
outcomes it asks the same questions, so that a stored history resumes it and a guessed one runs ahead of it.

How it searches. Candidates lie in one order: op by op, phase by phase, layer by layer, call by call. The whole order
is known to fail and the empty prefix to pass, so there is a shortest prefix that fails, and a binary search finds it in
at most ceil(log2(n)) trials, whatever the predicate: between a prefix that passed and a longer one that failed there is
always such an edge. Where a cut between two ops, phases or layers costs no trial more than the middle, it is preferred;
hence op, then phase, then layer, then call. The last candidate of that prefix is needed. If it fails alone, it is the
culprit, and when several candidates fail alone it is the first of them. If it does not, it is kept in every further
trial and the search goes on in front of it, until what was kept fails by itself. Hence k candidates that only fail
together cost k * ceil(log2(n)) trials and a few, and no assumption about the predicate is made on the way. Last, each
member is left out in turn: nothing that is returned can be left out (1-minimal, as in delta debugging).

A prefix whose trial is unresolved is walked around: the search looks for where prefixes begin to be spoilt, and for a
window beside the cut, without what lies in front of it, that fails.

In a job of several ranks a call is at first swapped on every rank that makes it. What was found is then narrowed down
to the ranks that are needed: the suspect alone, then one other alone. If both fail, every rank is at fault; if neither
does, the ranks are searched as the calls were.

A failure that needs many calls (a leak, a drift) is not a set of calls worth listing: past `LIMIT` members the answer
is the layer, the phase or the op that fails as a whole.

FAIL is evidence by itself, since nothing fails with the empty subset. PASS of a flaky failure may be luck; it can make
the answer too large, but an answer has always been seen to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby


class Outcome(Enum):
    """What a trial of a subset showed."""

    PASS = "pass"
    FAIL = "fail"
    UNRESOLVED = "unresolved"
    """It says nothing about the failure that is searched for."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One phase of one call of an op on one rank: what can be swapped on its own."""

    op: str
    phase: str
    layer: str
    call: int
    rank: int = 0

    @property
    def site(self) -> tuple[str, str, str, int]:
        """What it has in common with the same call on other ranks."""
        return self.op, self.phase, self.layer, self.call


class Level(Enum):
    """How far a culprit was narrowed down; a call may be meant on one rank or on several."""

    OP = 1
    PHASE = 2
    LAYER = 3
    CALL = 4
    RANK = 5


@dataclass(frozen=True)
class Culprit:
    """A member of the answer: one call, or the calls that stand for a layer, phase or op as a whole.

    Attributes:
        level: CALL at the finest.
        members: its candidates, on every rank that is meant.
        alike: whether it is on several ranks because it fails on each alone, as far as that was tried: on the first of
            its members' ranks and on another one.
    """

    level: Level
    members: tuple[Candidate, ...]
    alike: bool = False

    @property
    def proved(self) -> tuple[Candidate, ...]:
        """Members that suffice to fail."""
        return tuple(each for each in self.members if not self.alike or each.rank == self.members[0].rank)


class Status(Enum):
    """How a search ended."""

    FOUND = "found"
    NOTHING_FAILS = "nothing fails"
    """All candidates together do not fail: the cause is not among them, or the failure is flaky."""
    UNRESOLVED = "unresolved"
    """Too many trials said nothing; the cause lies among the suspects."""


@dataclass(frozen=True)
class Finding:
    """The result of a search.

    Attributes:
        culprits: together they fail and none of them can be left out; in the order of the candidates.
        suspects: with UNRESOLVED, the candidates that could not be told apart.
    """

    status: Status
    culprits: tuple[Culprit, ...] = ()
    suspects: tuple[Candidate, ...] = ()

    @property
    def members(self) -> tuple[Candidate, ...]:
        """All candidates of all culprits."""
        return tuple(member for culprit in self.culprits for member in culprit.members)


@dataclass(frozen=True)
class Question:
    """A subset to test.

    Attributes:
        subset: the candidates to swap in, in order.
        left: how many candidates may still be the culprit that is being looked for.
        trials_left: about how many trials the search still takes.
    """

    subset: tuple[Candidate, ...]
    left: int
    trials_left: int


Search = Generator[Question, Outcome, Finding]
Bounds = tuple[int, int, int]
"""Where a binary search stands in its pool: start, low and high; see `_Search._narrower`."""
Unit = tuple[int, ...]
"""Indices of candidates that are swapped together: a call on all its ranks, or all calls of a layer, phase or op."""

LIMIT = 4
"""The most culprits listed call by call."""
_SINGLES = 8
"""Where cuts show nothing, so many units are still tried one by one."""


def hierarchical(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """The candidates without repetition, in the order of the search.

    Ops, the phases of an op and the layers of a phase stand in order of first appearance; calls by number and rank.
    """
    first: dict[tuple[str, ...], int] = {}
    unique = list(dict.fromkeys(candidates))
    for place, each in enumerate(unique):
        for key in ((each.op,), (each.op, each.phase), (each.op, each.phase, each.layer)):
            first.setdefault(key, place)

    def order(each: Candidate) -> tuple[int, int, int, int, int]:
        op, phase, layer = (each.op,), (each.op, each.phase), (each.op, each.phase, each.layer)
        return first[op], first[phase], first[layer], each.call, each.rank

    return tuple(sorted(unique, key=order))


def search(candidates: Sequence[Candidate], suspect: int | None = None) -> Search:
    """Find a minimal set of candidates that fails.

    Args:
        candidates: in the order of `hierarchical`. The caller has proved that swapping none of them passes, and has
            reason to believe that swapping all of them fails; the search proves that only where it depends on it.
        suspect: the rank that is tried first, when ranks are told apart; None for the first one.
    """
    return _Search(candidates, suspect).run()


def ask(make: Callable[[], Search], history: Sequence[Outcome]) -> Question | Finding:
    """What a search asks next, or finds, after it was told `history`. Pure: this is how one looks ahead."""
    running = make()
    try:
        question = next(running)
        for outcome in history:
            question = running.send(outcome)
    except StopIteration as end:
        finding: Finding = end.value
        return finding
    return question


@dataclass
class _Stuck(Exception):
    status: Status
    suspects: Unit = ()


Step = Generator[Question, Outcome, Outcome]


class _Search:
    def __init__(self, candidates: Sequence[Candidate], suspect: int | None) -> None:
        self.candidates = candidates
        self.suspect = suspect
        self.alike: set[Unit] = set()
        self.known: dict[frozenset[int], Outcome] = {frozenset(): Outcome.PASS}
        self.left = len(candidates)

    def run(self) -> Search:
        try:
            units = yield from self._find()
            units = yield from self._told_apart(units)
        except _Stuck as stuck:
            return Finding(stuck.status, suspects=tuple(self.candidates[index] for index in stuck.suspects))
        return Finding(Status.FOUND, tuple(self._culprit(unit) for unit in sorted(units)))

    # --- the strategy -----------------------------------------------------------------------------

    def _find(self) -> Generator[Question, Outcome, list[Unit]]:
        calls = self._units(Level.CALL)
        if not calls:
            raise _Stuck(Status.NOTHING_FAILS)
        last, _ = yield from self._last_needed(calls, ())
        suspected = tuple(index for index in last if self.candidates[index].rank == self.suspect)
        for unit in (suspected, last) if 0 < len(suspected) < len(last) else (last,):
            if (yield from self._test(unit)) is Outcome.FAIL:
                return [last]
        if Outcome.FAIL not in self.known.values():
            whole = yield from self._test(_joined(calls))
            if whole is Outcome.PASS:
                raise _Stuck(Status.NOTHING_FAILS)
            if whole is Outcome.UNRESOLVED:
                raise _Stuck(Status.UNRESOLVED, _joined(calls))
        for level in (Level.LAYER, Level.PHASE):
            around = next(unit for unit in self._units(level) if last[0] in unit)
            if len(around) > 1 and (yield from self._test(around)) is Outcome.FAIL:
                return (yield from self._find_inside(around, level))
        found = yield from self._minimal(calls, LIMIT)
        if found is None:
            phases = self._units(Level.PHASE)
            found = yield from self._minimal(phases, len(phases))
        assert found is not None
        return found

    def _find_inside(self, around: Unit, level: Level) -> Generator[Question, Outcome, list[Unit]]:
        """A minimal set inside a layer or phase that is known to fail: of calls, else of layers, else the whole."""
        for finer in (Level.CALL, Level.LAYER):
            if finer is level:
                break
            inside = [unit for unit in self._units(finer) if unit[0] in around]
            found = yield from self._minimal(inside, LIMIT)
            if found is not None and len(found) < len(inside):
                return found
        return [around]

    def _minimal(
        self, pool: list[Unit], limit: int, kept: Unit = ()
    ) -> Generator[Question, Outcome, list[Unit] | None]:
        """A 1-minimal set of units of `pool`, all of which together fail; None when it has more than `limit`.

        `kept` is swapped in every trial, and does not fail alone.
        """
        found: list[Unit] = []
        while True:
            last, pool = yield from self._last_needed(pool, kept + _joined(found))
            found.insert(0, last)
            together = yield from self._test(kept + _joined(found))
            if together is Outcome.FAIL or not pool:
                return (yield from self._reduced(found, kept))
            if len(found) >= limit:
                return None

    def _reduced(self, units: list[Unit], kept: Unit) -> Generator[Question, Outcome, list[Unit]]:
        """The units without those that can be left out."""
        for unit in units:
            rest = [other for other in units if other is not unit]
            if rest and (yield from self._test(kept + _joined(rest))) is Outcome.FAIL:
                return (yield from self._reduced(rest, kept))
        return units

    # --- ranks ------------------------------------------------------------------------------------

    def _told_apart(self, units: list[Unit]) -> Generator[Question, Outcome, list[Unit]]:
        """Each unit narrowed down to the ranks that are needed; where trials say nothing, it stays on all of them."""
        found = list(units)
        for unit in units:
            ranks = self._by_rank(unit)
            if len(ranks) == 1:
                continue
            place = found.index(unit)
            try:
                found[place : place + 1] = yield from self._needed_ranks(
                    unit, ranks, _joined(found[:place] + found[place + 1 :])
                )
            except _Stuck:
                continue
        return found

    def _needed_ranks(self, unit: Unit, ranks: list[Unit], kept: Unit) -> Generator[Question, Outcome, list[Unit]]:
        """What of a unit is needed to fail together with `kept`: all of it where its ranks fail alike, or many do."""
        first = next((each for each in ranks if self.candidates[each[0]].rank == self.suspect), ranks[0])
        if (yield from self._test(kept + first)) is Outcome.FAIL:
            other = ranks[-1] if first is ranks[0] else ranks[0]
            if (yield from self._test(kept + other)) is not Outcome.FAIL:
                return [first]
            self.alike.add(unit)
            return [unit]
        few = yield from self._minimal(ranks, LIMIT, kept)
        return [unit] if few is None or len(few) == len(ranks) > 2 else few

    def _by_rank(self, unit: Unit) -> list[Unit]:
        """A unit, rank by rank."""
        ranks: dict[int, list[int]] = {}
        for index in unit:
            ranks.setdefault(self.candidates[index].rank, []).append(index)
        return [tuple(ranks[rank]) for rank in sorted(ranks)]

    # --- the binary search ------------------------------------------------------------------------

    def _last_needed(self, pool: list[Unit], kept: Unit) -> Generator[Question, Outcome, tuple[Unit, list[Unit]]]:
        """The last unit of a shortest prefix of `pool` that fails together with `kept`, and the units in front of it.

        `kept` alone does not fail; with all of `pool` it does.
        """
        bounds = (0, 0, len(pool))
        wall = len(pool)  # where a cut shows nothing, the next ones lie in front of it: up to what spoils the prefixes
        while bounds[2] - bounds[1] > 1:
            start, low, high = bounds
            self.left = sum(len(unit) for unit in pool[low:high])
            if wall - low == 1:
                return (yield from self._one_by_one(pool[low:high], kept)), pool[start:low]
            cut = self._best_cut(pool, low, wall)
            narrower = yield from self._narrower(pool, kept, bounds, cut)
            if narrower is None:
                wall = cut
            else:
                bounds = narrower
                wall = min(wall, bounds[2]) if bounds[0] == start else bounds[2]
        start, low, _ = bounds
        self.left = len(pool[low])
        return pool[low], pool[start:low]

    def _narrower(
        self, pool: list[Unit], kept: Unit, bounds: Bounds, cut: int
    ) -> Generator[Question, Outcome, Bounds | None]:
        """The bounds after a trial at `cut`; None when it shows nothing.

        With `kept`, `pool[start:low]` does not fail and `pool[start:high]` does. Where the prefix up to the cut is
        unresolved, one of the windows beside the cut may still fail: what spoils the prefix may lie outside it.
        """
        start, low, high = bounds
        outcome = yield from self._test(kept + _joined(pool[start:cut]))
        if outcome is Outcome.FAIL:
            return start, low, cut
        if outcome is Outcome.PASS:
            return start, cut, high
        for first, last in ((low, cut), (cut, high)):
            if (yield from self._test(kept + _joined(pool[first:last]))) is Outcome.FAIL:
                return first, first, last
        return None

    def _one_by_one(self, pool: list[Unit], kept: Unit) -> Generator[Question, Outcome, Unit]:
        """A unit of `pool` that fails with `kept` and nothing else, where cuts between them are unresolved."""
        if len(pool) <= _SINGLES:
            for unit in pool:
                if (yield from self._test(kept + unit)) is Outcome.FAIL:
                    return unit
        raise _Stuck(Status.UNRESOLVED, _joined(pool))

    def _best_cut(self, pool: list[Unit], low: int, high: int) -> int:
        """The cut at the coarsest border that leaves no more trials than the middle would; of these, the middlemost."""
        largest = 1 << ((high - low - 1).bit_length() - 1)
        middle = (low + high) / 2

        def rank(cut: int) -> tuple[int, float]:
            before, after = self.candidates[pool[cut - 1][-1]], self.candidates[pool[cut][0]]
            return _border(before, after).value, abs(cut - middle)

        return min(range(max(high - largest, low + 1), min(low + largest, high - 1) + 1), key=rank)

    # --- trials -----------------------------------------------------------------------------------

    def _test(self, members: Unit) -> Step:
        """The outcome of a subset: remembered, or asked for."""
        key = frozenset(members)
        if key not in self.known:
            subset = tuple(self.candidates[index] for index in sorted(key))
            self.known[key] = yield Question(subset, self.left, (self.left - 1).bit_length() + 1)
        return self.known[key]

    def _units(self, level: Level) -> list[Unit]:
        """All candidates, grouped at a level."""

        def key(index: int) -> tuple[object, ...]:
            each = self.candidates[index]
            return (*each.site, each.rank)[: level.value]

        return [tuple(group) for _, group in groupby(range(len(self.candidates)), key)]

    def _culprit(self, unit: Unit) -> Culprit:
        members = tuple(self.candidates[index] for index in unit)
        if len({each.site for each in members}) == 1:
            return Culprit(Level.CALL, members, unit in self.alike)
        return Culprit(Level(_border(members[0], members[-1]).value - 1), members, unit in self.alike)


def _joined(units: Iterable[Unit]) -> Unit:
    return tuple(index for unit in units for index in unit)


def _border(before: Candidate, after: Candidate) -> Level:
    """The coarsest level at which two candidates differ."""
    if before.op != after.op:
        return Level.OP
    if before.phase != after.phase:
        return Level.PHASE
    if before.layer != after.layer:
        return Level.LAYER
    return Level.CALL if before.call != after.call else Level.RANK
