"""Running a captured call again, alone, and judging the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from triptych import registry
from triptych.call import dtype_name
from triptych.capture.store import Capture
from triptych.compare import Difference, all_finite, differences, differences_of_nonfinite, plain
from triptych.layout import clone_exactly
from triptych.opspec import OpSpec, PhaseFunction, Tensors
from triptych.policy import parse
from triptych.select import select
from triptych.sync import can_wait, wait

REFERENCE = "reference"


@dataclass(frozen=True)
class Statistics:
    """One output in numbers: over its finite values, and how many are not finite."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    smallest: float | None
    mean: float | None
    largest: float | None
    nonfinite: int

    def __str__(self) -> str:
        text = f"{self.name}: {self.dtype}{list(self.shape)}"
        if self.smallest is not None:
            text += f", {self.smallest:.6g} to {self.largest:.6g}, mean {self.mean:.6g}"
        return f"{text}, {self.nonfinite} not finite"


@dataclass(frozen=True)
class Replay:
    """What came of running a captured call again.

    Attributes:
        capture: the call.
        backend: what ran it.
        against: what the result was compared with: "reference" or a backend.
        inputs_finite: whether the captured inputs are. If not, the same NaN or infinity in the same place agrees.
        outputs: each output in numbers; empty when the backend raised.
        differences: the outputs that lie outside their tolerance.
        changed: the inputs that the backend changed, which it must not.
        error: what the backend raised, else None.
    """

    capture: Capture
    backend: str
    against: str
    inputs_finite: bool
    outputs: tuple[Statistics, ...]
    differences: tuple[Difference, ...]
    changed: tuple[str, ...]
    error: str | None

    @property
    def agrees(self) -> bool:
        """Whether it ran, agrees in every element, and changed no input."""
        return self.error is None and not self.differences and not self.changed

    def __str__(self) -> str:
        lines = [f"{self.capture.title}, captured on {self.capture.backend!r}, run on {self.backend!r}"]
        if not self.inputs_finite:
            lines.append("  its inputs hold values that are not finite")
        lines += [f"  {each}" for each in self.outputs]
        lines += [f"  it changed its input {name}" for name in self.changed]
        if self.error is not None:
            lines.append(f"  it raised {self.error}")
        elif self.differences:
            lines += [f"  against {self.against!r}: {each}" for each in self.differences]
        else:
            lines.append(f"  against {self.against!r}: every element agrees")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "op": self.capture.op,
            "phase": self.capture.phase,
            "layer": self.capture.layer,
            "call": self.capture.call,
            "captured_on": self.capture.backend,
            "backend": self.backend,
            "against": self.against,
            "agrees": self.agrees,
            "inputs_finite": self.inputs_finite,
            "outputs": [
                {
                    "name": each.name,
                    "shape": list(each.shape),
                    "dtype": each.dtype,
                    "smallest": plain(each.smallest),
                    "mean": plain(each.mean),
                    "largest": plain(each.largest),
                    "nonfinite": each.nonfinite,
                }
                for each in self.outputs
            ],
            "differences": [each.to_json() for each in self.differences],
            "changed": list(self.changed),
            "error": self.error,
        }


def replay(capture: Capture, backend: str | None = None, against: str = REFERENCE) -> Replay:
    """Run a captured call on one backend, alone, and compare.

    Args:
        capture: what `load` returned. Its tensors are not changed.
        backend: the backend that runs it; None means the one that it was captured on.
        against: "reference", with the tolerance of a correct implementation; or a backend, with twice that.

    Raises:
        PolicyError: there is no such backend.
        PluginError: the op is not installed, or its plug-in is broken.
        Refused: a backend has reasons against the call.
    """
    name = backend or capture.backend
    spec = registry.ops.get(capture.op)
    phase = spec.phase(capture.phase)
    function = _function(capture, spec, name, "the backend to replay on")
    other = (
        phase.reference if against == REFERENCE else _function(capture, spec, against, "the backend to compare with")
    )
    args = clone_exactly(capture.args)
    with torch.no_grad():
        finite = bool(all_finite(args))
        try:
            outputs = function(*args)
            _settle(args)
        except Exception as cause:
            error = f"{type(cause).__name__}: {cause}"
            return Replay(capture, name, against, finite, (), (), (), error)
        wanted = other(*clone_exactly(capture.args))
        factor = 1 if against == REFERENCE else 2
        tolerances = tuple(factor * each for each in phase.bound(*clone_exactly(capture.args)))
        compare = differences if finite else differences_of_nonfinite
        return Replay(
            capture,
            name,
            against,
            finite,
            _statistics(phase.outputs, outputs),
            compare(phase, outputs, wanted, tolerances),
            _changed(capture, args),
            None,
        )


def _function(capture: Capture, spec: OpSpec, name: str, source: str) -> PhaseFunction:
    (rule,) = parse(name, source, backends=registry.backends.names(), ops=registry.ops.names()) or (None,)
    assert rule is not None
    call = capture.asked(spec)
    return select(call, capture.layer, rule, registry.backends.names(), registry.backends.get).function


def _settle(args: tuple[Any, ...]) -> None:
    """Wait for the device, so that its error is raised here."""
    for device in {each.device for each in args if isinstance(each, torch.Tensor)}:
        if can_wait(device):
            wait(device)


def _statistics(names: tuple[str, ...], outputs: Tensors) -> tuple[Statistics, ...]:
    found = []
    for name, output in zip(names, outputs, strict=True):
        finite = output.double()[torch.isfinite(output)]
        some = finite.numel() > 0
        found.append(
            Statistics(
                name,
                tuple(output.shape),
                dtype_name(output.dtype),
                float(finite.min()) if some else None,
                float(finite.mean()) if some else None,
                float(finite.max()) if some else None,
                output.numel() - finite.numel(),
            )
        )
    return tuple(found)


def _changed(capture: Capture, args: tuple[Any, ...]) -> tuple[str, ...]:
    """The names of the inputs whose bits are not what they were."""
    return tuple(
        name
        for (name, before), after in zip(capture.arguments, args, strict=True)
        if isinstance(before, torch.Tensor) and not _same_bits(before, after)
    )


def _same_bits(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Compared as integers: a NaN equals itself, and -0.0 does not equal 0.0."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[before.element_size()]
    return bool((_as(before, integer) == _as(after, integer)).all())


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.view(dtype) if tensor.dtype != dtype else tensor
