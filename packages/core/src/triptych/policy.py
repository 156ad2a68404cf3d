"""The policy language: rules that say which backend runs what. Pure text in, pure data out.

    rules    = rule {";" rule}                     the last rule that matches a call decides
    rule     = [selector "="] choice
    selector = op-glob ["." ("forward" | "backward")] ["@" layer-glob] ["#" numbers] ["%" numbers]
    choice   = backend {"," backend} | "auto"
    numbers  = span {"," span}
    span     = N | [N] ":" [N]                     a call number or rank; the end of a span is not included

`#` selects by the number of the call of this op and phase in the process, counted from 0; `%` by rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from triptych.call import PHASES
from triptych.errors import PolicyError, nearest

AUTO = "auto"

_SELECTOR = re.compile(
    r"(?P<op>[^.@#%=]*)(?:\.(?P<phase>[^@#%=]*))?(?:@(?P<layer>[^#%=]*))?(?:#(?P<calls>[^%=]*))?(?:%(?P<ranks>[^=]*))?"
)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
"""What a backend may be called, so that rules can name it."""

Spans = tuple[tuple[int, int | None], ...]
"""Half-open intervals of call numbers or ranks; an end of None is open."""

_Selected = tuple[str | None, str | None, str | None, Spans | None, Spans | None]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        text: as it was written.
        source: where it was written, for records and errors: `TRIPTYCH_BACKEND rule 2`.
        op, phase, layer: what it selects; None selects all. `op` and `layer` are globs.
        calls, ranks: spans of call numbers and ranks; None selects all.
        choice: backend names in order of preference, or `("auto",)`.
    """

    text: str
    source: str
    op: str | None
    phase: str | None
    layer: str | None
    calls: Spans | None
    ranks: Spans | None
    choice: tuple[str, ...]

    def matches_site(self, op: str, phase: str, layer: str) -> bool:
        """Whether it selects this op, phase and layer, for some call and some rank."""
        return (
            (self.op is None or fnmatchcase(op, self.op))
            and (self.phase is None or phase == self.phase)
            and (self.layer is None or fnmatchcase(layer, self.layer))
        )

    def matches(self, op: str, phase: str, layer: str, call: int, rank: int) -> bool:
        """Whether it selects this call."""
        return self.matches_site(op, phase, layer) and within(call, self.calls) and within(rank, self.ranks)

    @property
    def is_dynamic(self) -> bool:
        """Whether it can match one call of a site and not the next."""
        return self.calls is not None or self.ranks is not None

    def __str__(self) -> str:
        return f'{self.source}, "{self.text}"'


def within(number: int, spans: Spans | None) -> bool:
    """Whether `number` lies in one of the spans; None holds every number."""
    return spans is None or any(start <= number and (end is None or number < end) for start, end in spans)


DEFAULT_RULE = Rule(AUTO, "default", None, None, None, None, None, (AUTO,))


@dataclass(frozen=True)
class Policy:
    """Rules in order of precedence: the last that matches decides. The first one is the default and matches all."""

    rules: tuple[Rule, ...] = field(default=(DEFAULT_RULE,))

    def extended(self, rules: Iterable[Rule]) -> Policy:
        """This policy with `rules` put over it."""
        return Policy((*self.rules, *rules))

    def rule_for(self, op: str, phase: str, layer: str, call: int, rank: int) -> Rule:
        """The rule that decides this call."""
        for rule in reversed(self.rules):
            if rule.matches(op, phase, layer, call, rank):
                return rule
        raise AssertionError("the default rule matches every call")

    def is_dynamic(self, op: str) -> bool:
        """Whether two calls of one phase of `op` in one layer may be decided by different rules."""
        return any(rule.is_dynamic and (rule.op is None or fnmatchcase(op, rule.op)) for rule in self.rules)

    def __str__(self) -> str:
        return ";".join(rule.text for rule in self.rules[1:]) or AUTO


def parse(text: str, source: str, *, backends: Iterable[str], ops: Iterable[str]) -> tuple[Rule, ...]:
    """The rules in `text`.

    Args:
        text: rules in the grammar above; empty rules between two ";" are skipped.
        source: where the text comes from; a rule's own source is `<source> rule <n>`.
        backends, ops: the names that exist.

    Raises:
        PolicyError: a rule does not parse, or names a backend, op or phase that does not exist.
    """
    known_backends, known_ops = tuple(backends), tuple(ops)
    parts = [part.strip() for part in text.split(";")]
    rules = []
    for number, part in enumerate((part for part in parts if part), start=1):
        rules.append(_parse_rule(part, f"{source} rule {number}", known_backends, known_ops))
    return tuple(rules)


def parse_selectors(text: str, source: str, *, ops: Iterable[str]) -> tuple[Rule, ...]:
    """The selectors in `text`, separated by ";", as rules that choose nothing in particular.

    For tools that select calls as policies do. `*` selects every call.

    Raises:
        PolicyError: a selector does not parse, or names an op or phase that does not exist.
    """
    known = tuple(ops)
    parts = [part for part in (part.strip() for part in text.split(";")) if part]
    sources = [f"{source} selector {number}" for number in range(1, len(parts) + 1)]
    return tuple(
        Rule(part, where, *_selector(part, f'{where}, "{part}"', "", known), choice=(AUTO,))
        for part, where in zip(parts, sources, strict=True)
    )


def _parse_rule(text: str, source: str, backends: tuple[str, ...], ops: tuple[str, ...]) -> Rule:
    selector, separator, choice = text.rpartition("=")
    where = f'{source}, "{text}"'
    selected: _Selected = (None, None, None, None, None)
    if separator:
        selected = _selector(selector, where, " Write selector=backend.", ops)
    return Rule(text, source, *selected, choice=_choice(choice, where, backends))


def _selector(text: str, where: str, hint: str, ops: tuple[str, ...]) -> _Selected:
    match = _SELECTOR.fullmatch(text.strip())
    if match is None or not any(match.groupdict().values()):
        raise PolicyError(
            f'{where}: "{text}" is not a selector. A selector is op[.phase][@layer][#calls][%ranks], '
            f"for example rms_norm.backward@blocks.0.*#120:.{hint}"
        )
    op = match["op"] or None
    phase = match["phase"]
    layer = match["layer"]
    calls = _spans(match["calls"], "#", where)
    ranks = _spans(match["ranks"], "%", where)
    if layer == "":
        raise PolicyError(f'{where}: nothing follows "@". Write a module path or a glob, such as @blocks.*.')
    if op is not None and not any(fnmatchcase(name, op) for name in ops):
        raise PolicyError(f"{where}: no op matches {op!r}. {nearest(op, ops)}")
    if phase is not None and phase not in PHASES:
        raise PolicyError(f"{where}: there is no phase {phase!r}. {nearest(phase, PHASES)}")
    return op, phase, layer, calls, ranks


def _choice(text: str, where: str, backends: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not NAME.fullmatch(name):
            raise PolicyError(
                f"{where}: {name!r} is not a backend name. A rule ends with a backend, with several in order of "
                f"preference (cuda,torch), or with auto. Known backends: {', '.join(backends) or 'none'}."
            )
        if name != AUTO and name not in backends:
            raise PolicyError(f"{where}: there is no backend {name!r}. {nearest(name, (*backends, AUTO))}")
    if AUTO in names and len(names) > 1:
        raise PolicyError(f"{where}: auto is a list of backends already and stands alone. Write auto, or names.")
    if len(set(names)) != len(names):
        raise PolicyError(f"{where}: a backend is named twice. Write each once, in order of preference.")
    return names


def _spans(text: str | None, mark: str, where: str) -> Spans | None:
    if text is None:
        return None
    spans: list[tuple[int, int | None]] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,18})|([0-9]{0,18}):([0-9]{0,18})", part.strip())
        if match is None:
            raise PolicyError(
                f'{where}: "{mark}{text}" is not a set of numbers. Write {mark}7, {mark}3,5, {mark}2:9 '
                f"(2 to 8), {mark}120: (120 and later) or {mark}:5 (0 to 4)."
            )
        if match[1] is not None:
            spans.append((int(match[1]), int(match[1]) + 1))
            continue
        start, end = int(match[2] or 0), int(match[3]) if match[3] else None
        if end is not None and end <= start:
            raise PolicyError(f'{where}: the span "{part.strip()}" is empty. Its end must lie after its start.')
        spans.append((start, end))
    return tuple(spans)
