"""How torch.compile sees an op: opaque, one node that it cannot look into, or inline, traced through.

Opaque is the default: the backend is chosen whenever the graph runs, and a policy switch compiles nothing again. Inline
lets the compiler fuse an op with its neighbours: what is traced is the `torch` backend's implementation, of forward and
of backward. `triptych.use(compile="inline")` asks for it, or TRIPTYCH_COMPILE=inline; the innermost `use` that names a
mode counts, then the environment.

Inline overrides no rule. An op is traced through where the rule that decides it names `torch` first, or `auto`, in both
phases; where it names another backend the op stays opaque. So does

- every op while a tool is on, or in a trial of `triptych bisect`: neither sees a call that was traced through;
- an op of which some rule counts calls ("#"): a call that was traced through has no number.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from triptych import intercept
from triptych.errors import EnvironmentVariableError, UsageError, nearest
from triptych.policy import AUTO, Policy, Rule, within

VARIABLE = "TRIPTYCH_COMPILE"
OPAQUE, INLINE = MODES = ("opaque", "inline")
BACKEND = "torch"
"""Whose implementation is traced."""

TRIAL = "_TRIPTYCH_TRIAL"
"""What triptych.run.process sets in the environment of a trial; spelled out here, to be found without loading that."""

_log = logging.getLogger("triptych.compile")
_said: set[str] = set()


@dataclass(frozen=True)
class Mode:
    """A mode and where it was asked for: `default`, the variable or `triptych.use`."""

    name: str
    source: str

    def __str__(self) -> str:
        return f"{self.name} ({self.source})"


DEFAULT = Mode(OPAQUE, "default")


def from_environment(environ: Mapping[str, str]) -> Mode:
    """The mode of a process with this environment.

    Raises:
        EnvironmentVariableError: TRIPTYCH_COMPILE names none.
    """
    name = environ.get(VARIABLE, "")
    if name and name not in MODES:
        raise EnvironmentVariableError(
            f"{VARIABLE} is {name!r}. It takes opaque (the default: torch.compile does not look into the ops) or "
            f"inline (it traces through those that run on 'torch' or 'auto'). {nearest(name, MODES)}"
        )
    return Mode(name, VARIABLE) if name else DEFAULT


def from_use(name: object) -> Mode:
    """The mode that a `use` block names.

    Raises:
        UsageError: there is no such mode.
    """
    if not isinstance(name, str) or name not in MODES:
        hint = nearest(name, MODES) if isinstance(name, str) else "Known: opaque, inline."
        raise UsageError(f'triptych.use takes compile="opaque" or compile="inline"; it was given {name!r}. {hint}')
    return Mode(name, "triptych.use")


# --- which ops are traced through -------------------------------------------------------------------------------------


def sites(policy: Policy, mode: Mode, rank: int) -> str:
    """Which ops, phases and layers are traced through, as text; "" for none.

    Two policies have one text if they trace through the same: torch.compile, which compares it before it runs a graph,
    then compiles nothing again. It does not depend on what is switched on beside: see `in_force`.
    """
    if mode.name != INLINE:
        return ""
    verdicts: list[tuple[str, bool]] = []
    counted = sorted({rule.op or "*" for rule in policy.rules if rule.calls is not None})
    for rule in reversed(policy.rules):
        if rule.calls is not None or not within(rank, rule.ranks):
            continue
        verdicts.append((_selector(rule), _names_ours(rule)))
        if verdicts[-1][0] == "*":
            break
    while len(verdicts) > 1 and verdicts[-2][1] == verdicts[-1][1]:
        del verdicts[-2]  # it says of what it selects what is said of everything
    if not any(inline for _, inline in verdicts):
        return ""
    return ";".join([f"{selector}={INLINE if inline else OPAQUE}" for selector, inline in verdicts] + counted)


def against(policy: Policy, op: str, phases: tuple[str, ...], layer: str, rank: int) -> str:
    """Why the rules of `policy` keep a call opaque though the mode is inline, as a clause; "" if they do not."""
    for rule in policy.rules:
        if rule.calls is not None and (rule.op is None or fnmatchcase(op, rule.op)):
            return f"a rule counts calls of {op} ({rule}), and one that was traced through has no number"
    for phase in phases:
        rule = policy.rule_for(op, phase, layer, 0, rank)
        if not _names_ours(rule):
            return f"{op}.{phase} is to run on {rule.choice[0]!r} ({rule})"
    return ""


def _names_ours(rule: Rule) -> bool:
    return rule.choice[0] in (BACKEND, AUTO)


def _selector(rule: Rule) -> str:
    """What a rule selects, without its ranks."""
    phase = "" if rule.phase is None else f".{rule.phase}"
    layer = "" if rule.layer in (None, "*") else f"@{rule.layer}"
    return f"{rule.op or '*'}{phase}{layer}"


def obstacle() -> str:
    """What keeps everything opaque in this process now, as a clause; "" if nothing does."""
    if intercept.active:
        return "a tool is on that must see every call"
    if TRIAL in os.environ:
        return "this is a trial of triptych bisect, which must see every call"
    return ""


def log_once(text: str) -> None:
    """Log what keeps an op opaque, once a process for each text."""
    if text not in _said:
        _said.add(text)
        _log.warning("%s", text)
