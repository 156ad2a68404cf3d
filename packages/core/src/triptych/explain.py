"""Why a call would run where it would: the decision record, and how torch.compile sees it. Nothing runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from triptych import compile_mode, dispatch, inline, registry, scope
from triptych.call import BACKWARD, FORWARD, PHASES, TensorMeta
from triptych.checking import check_scalars
from triptych.errors import UsageError, nearest
from triptych.opspec import OpSpec
from triptych.select import Decision


@dataclass(frozen=True)
class Explanation(Decision):
    """A decision, and how torch.compile would see the call.

    Attributes:
        mode: the compile mode in force, and where it was asked for.
        opaque: why torch.compile would not look into the call; "" where it would trace through it. Then the `torch`
            backend's implementation runs, and tools and counters do not see the call.
    """

    mode: compile_mode.Mode
    opaque: str

    def to_json(self) -> dict[str, Any]:
        told = {"mode": self.mode.name, "source": self.mode.source, "opaque": self.opaque}
        return {**super().to_json(), "compile": told}


def spec_of(op: str) -> OpSpec:
    """What the op called `op` is.

    Raises:
        UsageError: there is no such op.
        PluginError: its plug-in is broken.
    """
    if op not in registry.ops.names():
        raise UsageError(f"There is no op {op!r}. {nearest(op, registry.ops.names())}")
    return registry.ops.get(op)


def explain(op: str, *args: Any, phase: str = FORWARD, layer: str = "") -> Explanation:
    """The decision for a call of `op` under the policy in force. Nothing runs and nothing is counted.

    Args:
        op: the op's name.
        args: forward's tensors (or `TensorMeta` in their place, or None), then its scalars.
        phase: "forward" or "backward".
        layer: the name of the calling layer, for rules with "@".

    Raises:
        UsageError: there is no such op or phase, or the arguments do not fit together.
        Refused: no backend that the policy allows can run it; the error carries the same record.
    """
    spec = spec_of(op)
    if phase not in PHASES:
        raise UsageError(f"There is no phase {phase!r}. {nearest(phase, PHASES)}")
    if phase == BACKWARD and spec.backward is None:
        raise UsageError(f"{op} has no backward. Ask for its forward.")
    metas = tuple(TensorMeta.of(value) if isinstance(value, torch.Tensor) else value for value in args)
    names = spec.forward.tensors
    if len(metas) != len(names) + len(spec.forward.scalars):
        wanted = ", ".join((*names, *spec.forward.scalar_names))
        raise UsageError(f"{op} was explained with {len(metas)} arguments. Its forward takes all of: {wanted}.")
    for name, meta in zip(names, metas, strict=False):
        if not isinstance(meta, TensorMeta) and not (meta is None and name.endswith("?")):
            raise UsageError(f"{op}: {name} is {meta!r}. It must be a tensor or a triptych.call.TensorMeta.")
    check_scalars(spec, metas[len(names) :])
    decision = dispatch.define(spec).decide(layer, metas, phase)
    mode = scope.current().mode
    opaque = inline.against(op, layer) if mode.name == compile_mode.INLINE else f"the compile mode is {mode.name}"
    return Explanation(
        **{each.name: getattr(decision, each.name) for each in dataclasses.fields(decision)}, mode=mode, opaque=opaque
    )
