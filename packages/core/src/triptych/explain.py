"""Why a call would run where it would: the decision record, without running anything."""

from __future__ import annotations

from typing import Any

from triptych import dispatch, registry
from triptych.call import BACKWARD, FORWARD, PHASES, TensorMeta
from triptych.errors import UsageError, nearest
from triptych.select import Decision


def explain(op: str, *args: Any, phase: str = FORWARD, layer: str = "") -> Decision:
    """The decision for a call of `op` under the policy in force. Nothing runs and nothing is counted.

    Args:
        op: the op's name.
        args: forward's tensors (or `TensorMeta` in their place, or None), then its scalars.
        phase: "forward" or "backward".
        layer: the name of the calling layer, for rules with "@".

    Raises:
        UsageError: there is no such op or phase.
        Refused: no backend that the policy allows can run it; the error carries the same record.
    """
    if op not in registry.ops.names():
        raise UsageError(f"There is no op {op!r}. {nearest(op, registry.ops.names())}")
    if phase not in PHASES:
        raise UsageError(f"There is no phase {phase!r}. {nearest(phase, PHASES)}")
    spec = registry.ops.get(op)
    if phase == BACKWARD and spec.backward is None:
        raise UsageError(f"{op} has no backward. Ask for its forward.")
    metas = tuple(TensorMeta.of(value) if hasattr(value, "data_ptr") else value for value in args)
    return dispatch.define(spec).decide(layer, metas, phase)
