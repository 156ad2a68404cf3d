"""Selection: which backend runs a call. A pure function of the call, the rule and the backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.backend import Backend
from triptych.call import Call
from triptych.errors import PluginError, Refused
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
        rejected: pairs (backend, reasons) asked before it.
        distribution, version: where the chosen backend comes from.
        function: its implementation.
    """

    call: Call
    layer: str
    rule: Rule
    chosen: str
    rejected: tuple[tuple[str, tuple[str, ...]], ...]
    distribution: str
    version: str
    function: PhaseFunction

    def to_json(self) -> dict[str, Any]:
        return {
            "call": self.call.to_json(),
            "layer": self.layer,
            "rule": self.rule.text,
            "source": self.rule.source,
            "chosen": self.chosen,
            "rejected": [{"backend": name, "reasons": list(reasons)} for name, reasons in self.rejected],
            "distribution": self.distribution,
            "version": self.version,
        }


def select(call: Call, layer: str, rule: Rule, names: Sequence[str], get: Callable[[str], Backend]) -> Decision:
    """The first backend of the rule's choice that has no reason against the call.

    Args:
        call: what is asked.
        layer: who asks.
        rule: the rule that decides. `auto` stands for every backend that has a priority for the call's device.
        names: all backends there are.
        get: the backend of a name; raises PluginError for a broken one.

    Raises:
        Refused: every backend of the choice has reasons; the text lists them all.
    """
    named = rule.choice != (AUTO,)
    rejected: list[tuple[str, tuple[str, ...]]] = []
    for name in rule.choice if named else auto_order(call.device.type, names, get):
        try:
            backend = get(name)
            reasons, function = _reasons(backend, call, named)
        except PluginError as cause:
            reasons, function = [str(cause)], None
        if function is not None:
            return Decision(call, layer, rule, name, tuple(rejected), backend.distribution, backend.version, function)
        rejected.append((name, tuple(reasons)))
    raise Refused(refusal_text(call, layer, rule, rejected), tuple(rejected))


def auto_order(device_type: str, names: Sequence[str], get: Callable[[str], Backend]) -> tuple[str, ...]:
    """The backends that `auto` stands for on a device type: by priority, highest first, then by name.

    A broken plug-in has no priority and is left out; `triptych info` shows it.
    """
    ranked = []
    for name in names:
        try:
            priority = get(name).priority(device_type)
        except PluginError:
            continue
        if priority is not None:
            ranked.append((-priority, name))
    return tuple(name for _, name in sorted(ranked))


def _reasons(backend: Backend, call: Call, named: bool) -> tuple[list[str], PhaseFunction | None]:
    reasons = list(backend.reasons_unavailable())
    if not reasons and call.op not in backend.ops():
        reasons.append(f"it does not implement {call.op}; it implements {', '.join(backend.ops()) or 'nothing'}.")
    if not reasons:
        reasons += backend.reasons_against(call)
        if not named:
            reasons += backend.reasons_against_auto(call)
    if reasons:
        return reasons, None
    function = backend.implementation(call.op, call.phase)
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
