"""Selection: which backend runs a call. A pure function of the call, the rule and the backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.backend import Backend, ask, origin_of
from triptych.call import Call
from triptych.errors import PluginError, Refused, TriptychError
from triptych.opspec import PhaseFunction
from triptych.policy import AUTO, Rule


@dataclass(frozen=True)
class Decision:
    """The record of one decision. `explain`, the counters, the trace and `Refused` all show this one.

    Attributes:
        call: what was asked.
        layer: the name of the layer that asked, "" when it has none.
        rule: the rule that decided.
        chosen: the backend that runs it.
        rejected: pairs (backend, reasons) asked before it; with `auto`, broken plug-ins first.
        broken: which of the rejected are plug-ins that do not work at all.
        distribution, version: where the chosen backend comes from.
        function: its implementation.
    """

    call: Call
    layer: str
    rule: Rule
    chosen: str
    rejected: tuple[tuple[str, tuple[str, ...]], ...]
    broken: tuple[str, ...]
    distribution: str
    version: str
    function: PhaseFunction

    def to_json(self) -> dict[str, Any]:
        origin = (self.distribution, self.version)
        return _record(self.call, self.layer, self.rule, self.chosen, self.rejected, self.broken, origin)


def select(
    call: Call,
    layer: str,
    rule: Rule,
    names: Sequence[str],
    get: Callable[[str], Backend],
    prepare: Callable[[Backend, Call], None] = lambda backend, call: None,
) -> Decision:
    """The first backend of the rule's choice that has no reason against the call.

    Args:
        call: what is asked.
        layer: who asks.
        rule: the rule that decides. `auto` stands for every backend that has a priority for the call's device.
        names: all backends there are.
        get: the backend of a name; raises PluginError for a broken one.
        prepare: called with the backend that would be chosen; a TriptychError that it raises is a reason against it.

    Raises:
        Refused: every backend of the choice has reasons; the text lists them all.
    """
    named = rule.choice != (AUTO,)
    rejected: list[tuple[str, tuple[str, ...]]] = []
    broken: list[str] = []
    order = rule.choice
    if not named:
        order, causes = auto_order(call.device.type, names, get)
        rejected += [(name, (cause,)) for name, cause in causes]
        broken += [name for name, _ in causes]
    for name in order:
        try:
            backend = get(name)
            reasons, function = _reasons(backend, call, named)
            if function is not None:
                prepare(backend, call)
                origin = origin_of(backend)
        except PluginError as cause:
            reasons, function = [str(cause)], None
            broken.append(name)
        except TriptychError as cause:
            reasons, function = [str(cause)], None
        if function is not None:
            return Decision(call, layer, rule, name, tuple(rejected), tuple(broken), *origin, function)
        rejected.append((name, tuple(reasons)))
    record = _record(call, layer, rule, None, rejected, broken, (None, None))
    raise Refused(refusal_text(call, layer, rule, rejected), tuple(rejected), record)


def _record(
    call: Call,
    layer: str,
    rule: Rule,
    chosen: str | None,
    rejected: Sequence[tuple[str, tuple[str, ...]]],
    broken: Sequence[str],
    origin: tuple[str, str] | tuple[None, None],
) -> dict[str, Any]:
    """A decision or a refusal as plain data."""
    return {
        "call": call.to_json(),
        "layer": layer,
        "rule": rule.text,
        "source": rule.source,
        "chosen": chosen,
        "rejected": [{"backend": name, "reasons": list(reasons)} for name, reasons in rejected],
        "broken": list(broken),
        "distribution": origin[0],
        "version": origin[1],
    }


def auto_order(
    device_type: str, names: Sequence[str], get: Callable[[str], Backend]
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The backends that `auto` stands for on a device type: by priority, highest first, then by name.

    Also those that are broken, with their causes: whether they would have had a place cannot be known.
    """
    ranked, broken = [], []
    for name in names:
        try:
            priority = ask(get(name), "priority", device_type)
        except PluginError as cause:
            broken.append((name, str(cause)))
            continue
        if priority is not None:
            ranked.append((-priority, name))
    return tuple(name for _, name in sorted(ranked)), tuple(broken)


def _reasons(backend: Backend, call: Call, named: bool) -> tuple[list[str], PhaseFunction | None]:
    reasons = list(ask(backend, "reasons_unavailable"))
    ops = ask(backend, "ops")
    if not reasons and call.op not in ops:
        reasons.append(f"it does not implement {call.op}; it implements {', '.join(ops) or 'nothing'}.")
    if not reasons:
        reasons += ask(backend, "reasons_against", call)
        if not named:
            reasons += ask(backend, "reasons_against_auto", call)
    if reasons:
        return reasons, None
    function: PhaseFunction | None = ask(backend, "implementation", call.op, call.phase)
    if function is None:
        return [f"it implements {call.op} but not its {call.phase}."], None
    return [], function


def refusal_text(call: Call, layer: str, rule: Rule, rejected: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    """The text of a refusal: what was asked, who decided, and every reason of every backend that was asked."""
    asked = f"{call.op}.{call.phase}" + (f" in layer {layer!r}" if layer else "")
    names = ", ".join(repr(name) for name, _ in rejected) or f"any backend for {call.device.type!r} devices"
    lines = [f"{asked} on {names} ({rule})"]
    for name, reasons in rejected:
        prefix = f"{name}: " if len(rejected) > 1 else ""
        lines += [f"  - {prefix}{reason}" for reason in reasons]
    if not rejected:
        lines.append("  - no installed backend has a place in auto for this device. Install one, or name a backend.")
    lines.append(f"  asked: {call}")
    return "\n".join(lines)
