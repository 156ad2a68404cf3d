"""From a subset of calls to the policy that swaps exactly these: one text for TRIPTYCH_BACKEND.

A trial's policy is the good policy, then rules that give the subset what the bad policy gives it. Rules are as coarse
as they can be: an op or a phase that is swapped as a whole is one rule, a layer is one rule, and call numbers are
spans, joined over the numbers that the layer does not use. Ranks are named where a call is not swapped on every rank
that makes it. A rule for a whole op or phase also holds for calls that the good run did not make.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol

from triptych.bisect.engine import Candidate, hierarchical
from triptych.call import PHASES
from triptych.errors import UsageError
from triptych.policy import Policy, Rule, parse

VARIABLE = "TRIPTYCH_BACKEND"
SIZE_LIMIT = 128 * 1024 - len(VARIABLE) - 2
"""Linux takes no environment string of more than 128 KiB, its name, "=" and final zero included."""

_LITERAL = {"[": "[[]", "*": "[*]", "?": "[?]"}
_FORBIDDEN = ";#%=\0"
"""Characters that the grammar of policies gives a meaning, or that an environment cannot hold."""


Site = tuple[str, str, str, int]
"""Op, phase, layer and number of a call, on whatever rank: `Candidate.site`."""


class Traced(Protocol):
    """What is needed of a call record of a trace."""

    @property
    def op(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def layer(self) -> str: ...
    @property
    def call(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def backend(self) -> str: ...


@dataclass(frozen=True)
class Side:
    """A policy as it was written, and with what lies beneath it.

    Attributes:
        text: what TRIPTYCH_BACKEND says.
        policy: its rules over those of the configuration file and the default.
    """

    text: str
    policy: Policy

    @classmethod
    def parse(cls, text: str, source: str, beneath: Policy, backends: Iterable[str], ops: Iterable[str]) -> Side:
        """The side that `text` describes. PolicyError when it does not parse."""
        return cls(text, beneath.extended(parse(text, source, backends=backends, ops=ops)))

    @property
    def by_rank(self) -> bool:
        """Whether it may choose differently on different ranks."""
        return any(rule.ranks is not None for rule in self.policy.rules)

    def choice(self, op: str, phase: str, layer: str, call: int, rank: int) -> str:
        """The choice for a call, as a rule spells it."""
        return ",".join(self.policy.rule_for(op, phase, layer, call, rank).choice)


def have_one_effect(good: Side, bad: Side, ops: Iterable[str]) -> bool:
    """Whether it is plain, before anything runs, that two policies choose alike for every call of every op."""
    rules = [rule for side in (good, bad) for rule in side.policy.rules]
    if any(rule.layer is not None or rule.is_dynamic for rule in rules):
        return [_meaning(rule) for rule in good.policy.rules] == [_meaning(rule) for rule in bad.policy.rules]
    return all(good.choice(op, phase, "", 0, 0) == bad.choice(op, phase, "", 0, 0) for op in ops for phase in PHASES)


def _meaning(rule: Rule) -> Rule:
    """The rule without how and where it was written."""
    return replace(rule, text="", source="")


class PolicyWriter:
    """Writes the policies of trials.

    Args:
        good, bad: the two policies.
        calls: the trace of the good run, of all its processes. Call numbers count in each process on its own: calls
            of several processes that have op, phase, layer, number and rank in common are one candidate.

    Attributes:
        candidates: the calls for which the two policies choose differently, in the order of the search.
        ranks: the ranks that made calls, in order.
    """

    def __init__(self, good: Side, bad: Side, calls: Sequence[Traced]) -> None:
        self.good = good
        self.bad = bad
        traced = hierarchical(Candidate(each.op, each.phase, each.layer, each.call, each.rank) for each in calls)
        self.ranks = tuple(sorted({each.rank for each in traced}))
        self._ranks: dict[Site, list[int]] = defaultdict(list)
        self._by_phase: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
        for each in traced:
            self._ranks[each.site].append(each.rank)
            self._by_phase[each.op, each.phase].append(each)
        self._sites: dict[tuple[str, str], list[Site]] = defaultdict(list)
        for site in self._ranks:
            self._sites[site[:2]].append(site)
        self._known: dict[tuple[bool, Site, int], str] = {}
        self.candidates = tuple(
            each
            for each in traced
            if self._choice(good, each.site, each.rank) != self._choice(bad, each.site, each.rank)
        )

    def swapped_in(self, subset: Collection[Candidate]) -> str:
        """The good policy with the bad one's choices for `subset`.

        Raises:
            UsageError: it does not fit into an environment variable.
        """
        text = _joined(self.good.text, self._rules(self.bad, subset))
        if len(os.fsencode(text)) > SIZE_LIMIT:
            others = set(self.candidates) - set(subset)
            text = _joined(self.good.text, self._rules(self.bad, self.candidates), self._rules(self.good, others))
        return _checked(text)

    def swapped_out(self, subset: Collection[Candidate]) -> str:
        """The bad policy with the good one's choices for `subset`. Raises as `swapped_in` does."""
        return _checked(_joined(self.bad.text, self._rules(self.good, subset)))

    def selectors(self, subset: Iterable[Candidate]) -> str:
        """Selectors of these calls by number, and by rank where there are several, for a capture."""
        several = len(self.ranks) > 1
        texts = (f"{each.op}.{each.phase}#{each.call}" + f"%{each.rank}" * several for each in subset)
        return ";".join(dict.fromkeys(texts))

    def phase_of(self, candidate: Candidate) -> tuple[Candidate, ...]:
        """Every traced call of the candidate's op and phase, on every rank.

        A workaround swaps these, also where one rank alone is at fault: ranks that run the same implementation stay
        equal bit for bit where they should, and the next launch may number the ranks otherwise.
        """
        return tuple(self._by_phase[candidate.op, candidate.phase])

    def _choice(self, side: Side, site: Site, rank: int) -> str:
        """What a side chooses for a call on a rank."""
        key = (side is self.bad, site, rank if side.by_rank else 0)
        if key not in self._known:
            self._known[key] = side.choice(*site, rank)
        return self._known[key]

    def _ends(self, site: Site, chosen: Mapping[int, str]) -> list[str]:
        """The ends of the rules that give a call these choices, by rank."""
        by_choice: dict[str, list[int]] = defaultdict(list)
        for rank, choice in chosen.items():
            by_choice[choice].append(rank)
        everywhere = len(self._ranks[site])
        return [
            f"={choice}" if len(mine) == everywhere else f"%{_spans(mine, set(self.ranks) - set(mine))}={choice}"
            for choice, mine in by_choice.items()
        ]

    def _rules(self, side: Side, subset: Collection[Candidate]) -> list[str]:
        """Rules that give `subset`, and no other traced call, what `side` chooses for it."""
        wanted: dict[Site, set[int]] = defaultdict(set)
        for each in subset:
            wanted[each.site].add(each.rank)
        groups: dict[tuple[str, str], dict[str, list[Site]]] = defaultdict(lambda: defaultdict(list))
        for site in self._ranks:
            inside = wanted.get(site)
            if inside is None:
                continue
            chosen = {rank: self._choice(side, site, rank) for rank in self._ranks[site] if rank in inside}
            for end in self._ends(site, chosen):
                groups[site[:2]][end].append(site)
        rules: list[str] = []
        for op in dict.fromkeys(op for op, _ in groups):
            whole = self._whole_op(op, groups)
            if whole is not None:
                rules.append(f"{op}{whole}")
                continue
            for phase in PHASES:
                numbered: list[str] = []
                for end, members in groups.get((op, phase), {}).items():
                    rules += self._phase_rules(op, phase, members, end, numbered)
                if numbered:
                    # First, so that rules with layers decide where processes use one number for several layers.
                    other = self.good if side is self.bad else self.bad
                    rules = numbered + self._corrections(op, phase, side, other, wanted) + rules
        return rules

    def _whole_op(self, op: str, groups: dict[tuple[str, str], dict[str, list[Site]]]) -> str | None:
        """The end of the one rule that swaps an op, when both phases are swapped as a whole and alike."""
        ends: set[str] = set()
        for phase in PHASES:
            group = groups.get((op, phase), {})
            if len(group) != 1 or len(next(iter(group.values()))) != len(self._sites[op, phase]):
                return None
            ends |= group.keys()
        return ends.pop() if len(ends) == 1 else None

    def _phase_rules(self, op: str, phase: str, members: list[Site], end: str, numbered: list[str]) -> list[str]:
        """Rules for the calls of one phase that end alike; those that only numbers can select go to `numbered`."""
        everything = self._sites[op, phase]
        if len(members) == len(everything):
            return [f"{op}.{phase}{end}"]
        swapped = set(members)
        kept = [site[3] for site in everything if site not in swapped]
        layers: dict[str, list[Site]] = defaultdict(list)
        for site in everything:
            layers[site[2]].append(site)
        rules, by_number = [], []
        for layer, calls in layers.items():
            inside = [site[3] for site in calls if site in swapped]
            if not inside:
                continue
            pattern = _pattern(layer, layers)
            if pattern is None:
                by_number += inside
            elif len(inside) == len(calls):
                rules.append(f"{op}.{phase}@{pattern}{end}")
            else:
                outside = [site[3] for site in calls if site not in swapped]
                rules.append(f"{op}.{phase}@{pattern}#{_spans(inside, outside)}{end}")
        numbers = [site[3] for site in members]
        if not set(numbers) & set(kept):
            # Calls are numbered over all layers in the order of time: what was swapped until then is often one span.
            plain = [f"{op}.{phase}#{_spans(numbers, kept)}{end}"]
            if by_number or len(plain[0]) < len(";".join(rules)):
                return plain
        if by_number:
            numbered.append(f"{op}.{phase}#{_spans(by_number, kept)}{end}")
        return rules

    def _corrections(
        self, op: str, phase: str, side: Side, other: Side, wanted: Mapping[Site, Collection[int]]
    ) -> list[str]:
        """Rules that give back what rules by number took because another process uses a number for another layer."""
        sites = self._sites[op, phase]
        layers = {site[2] for site in sites}
        unnamed = {site[3] for site in sites if _pattern(site[2], layers) is None and site in wanted}
        rules = []
        for site in sites:
            pattern = _pattern(site[2], layers)
            if site[3] not in unnamed or pattern is None:
                continue
            inside = wanted.get(site, ())
            chosen = {rank: self._choice(side if rank in inside else other, site, rank) for rank in self._ranks[site]}
            rules += [f"{op}.{phase}@{pattern}#{site[3]}{end}" for end in self._ends(site, chosen)]
        return rules


def _pattern(layer: str, others: Collection[str]) -> str | None:
    """A glob that matches `layer` and no other of the layers; None when the grammar cannot write one."""
    if not layer:
        return None
    characters = []
    for place, character in enumerate(layer):
        at_edge = place in (0, len(layer) - 1)
        if character in _FORBIDDEN or (at_edge and character.isspace()) or not _encodes(character):
            characters.append("?")
        else:
            characters.append(_LITERAL.get(character, character))
    pattern = "".join(characters)
    return pattern if sum(fnmatchcase(other, pattern) for other in others) == 1 else None


def _encodes(character: str) -> bool:
    try:
        return os.fsdecode(os.fsencode(character)) == character
    except UnicodeEncodeError:
        return False


def _spans(inside: Iterable[int], outside: Iterable[int]) -> str:
    """The fewest spans that hold every number of `inside` and, where that is possible, none of `outside`."""
    taken = set(inside)
    spans: list[tuple[int, int]] = []
    joins = False
    for number in sorted(taken | set(outside)):
        if number not in taken:
            joins = False
        elif joins:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
            joins = True
    return ",".join(str(first) if first == last else f"{first}:{last + 1}" for first, last in spans)


def _joined(text: str, *rules: Iterable[str]) -> str:
    return ";".join([part for part in (text,) if part] + [rule for part in rules for rule in part])


def _checked(text: str) -> str:
    size = len(os.fsencode(text))
    if size > SIZE_LIMIT:
        raise UsageError(
            f"The policy of a trial is {size} bytes long; an environment variable holds {SIZE_LIMIT}. "
            f"Narrow the search: let --bad differ from --good for one op or phase only, or shorten the layers' names."
        )
    return text
