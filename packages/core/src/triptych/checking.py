"""What is checked about any op, from its spec alone: the scalars that come in, the outputs that a backend returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triptych.call import FORWARD, TensorMeta
from triptych.errors import ArgumentError, PluginError
from triptych.opspec import OpSpec
from triptych.select import Decision


def check_scalars(spec: OpSpec, values: Sequence[Any], phase: str = FORWARD) -> None:
    """Raise ArgumentError unless each scalar has the type that the op's signature gives it.

    A whole number is a number; a bool is not, nor is a tensor with one element, whose gradient would be lost. Strings
    are left to the op, which knows the words it takes.
    """
    for (name, kind), value in zip(spec.phase(phase).scalars, values, strict=True):
        if kind is str:
            continue
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            fits = abs(value) < 2**53  # beyond, it is another number as a float
        else:
            fits = type(value) is kind or (isinstance(value, kind) and kind is not int)
        if not fits:
            shown = f" ({value!r})" if isinstance(value, bool | int | float | str) else ""
            shown = shown if len(shown) <= 60 else f"{shown[:57]}...)"
            article = "an" if kind is int else "a"
            raise ArgumentError(
                f"{spec.name}: {name} is a {type(value).__name__}{shown}. It must be {article} {kind.__name__}."
            )


def check_outputs(
    spec: OpSpec, decision: Decision, outputs: Any, expected: tuple[TensorMeta, ...] | None = None
) -> None:
    """Raise PluginError unless an implementation returned what the op's spec says.

    Args:
        spec: the op.
        decision: which backend ran.
        outputs: what its implementation returned.
        expected: the metadata of each output; None checks only that they are a tuple of the right number.
    """
    phase = decision.call.phase
    names = spec.phase(phase).outputs
    asked = f"{spec.name}.{phase} on backend {decision.chosen!r}"
    report = "Report it to the authors of that backend, or choose another."
    if not isinstance(outputs, tuple) or not all(isinstance(output, torch.Tensor) for output in outputs):
        kinds = [type(each).__name__ for each in outputs] if isinstance(outputs, (tuple, list)) else []
        found = f"a {type(outputs).__name__}" + (f" of {', '.join(kinds)}" if kinds else "")
        raise PluginError(f"{asked} returned {found}. It must return a tuple of tensors: {', '.join(names)}. {report}")
    if len(outputs) != len(names):
        raise PluginError(
            f"{asked} returned {len(outputs)} tensors. It must return {len(names)}: {', '.join(names)}. {report}"
        )
    for name, output, meta in zip(names, outputs, expected or (), strict=False):
        got = f"{list(output.shape)} in {output.dtype} on {output.device.type}"
        wanted = f"{list(meta.shape)} in {meta.dtype} on {meta.device.type}"
        if got != wanted:
            raise PluginError(f"{asked} returned {name} as {got}. It must be {wanted}. {report}")
