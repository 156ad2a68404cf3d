"""Running a captured call again, alone, and judging the result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from triptych import registry
from triptych.call import dtype_name
from triptych.capture.store import Capture
from triptych.checking import check_outputs
from triptych.compare import Difference, all_finite, differences, differences_of_nonfinite, plain
from triptych.errors import TriptychError, UsageError, nearest
from triptych.layout import clone_exactly
from triptych.opspec import OpSpec, Tensors
from triptych.policy import Rule
from triptych.select import Decision, select
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
        backend: the one backend that runs it; None means the one that it was captured on.
        against: "reference", with the tolerance of a correct implementation; or a backend, with twice that.

    Raises:
        UsageError: there is no such backend, or the call cannot be judged on this machine.
        PluginError: the op is not installed, or its plug-in is broken.
        Refused: a backend has reasons against the call.
    """
    spec = registry.ops.get(capture.op)
    phase = spec.phase(capture.phase)
    if backend is None:
        name = capture.backend
        decision = _decision(capture, spec, name, "the backend that the call was captured on")
    else:
        name = backend
        decision = _decision(capture, spec, name, "the backend to replay on")
    if against == REFERENCE:
        other = None
    else:
        other = _decision(capture, spec, against, "the backend to compare with", REFERENCE)
    with torch.no_grad():
        with _possible(capture):
            args = clone_exactly(capture.args)
            finite = bool(all_finite(args))
        try:
            outputs = decision.function(*args)
            check_outputs(spec, decision, outputs)
            _settle(args)
        except Exception as cause:
            error = f"{type(cause).__name__}: {cause}"
            return Replay(capture, name, against, finite, (), (), (), error)
        with _possible(capture):
            wanted, tolerances = _wanted(capture, spec, other)
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


def _wanted(capture: Capture, spec: OpSpec, other: Decision | None) -> tuple[Tensors, Tensors]:
    """What the outputs are compared with, the reference or another backend's, and how far they may lie from it."""
    phase = spec.phase(capture.phase)
    args = clone_exactly(capture.args)
    if other is None:
        wanted, factor = phase.reference(*args), 1
    else:
        wanted, factor = other.function(*args), 2
        check_outputs(spec, other, wanted)
    return wanted, tuple(factor * each for each in phase.bound(*clone_exactly(capture.args)))


@contextmanager
def _possible(capture: Capture) -> Iterator[None]:
    """Say what cannot be computed: judging takes several times the memory of the call, in float64."""
    try:
        yield
    except (RuntimeError, MemoryError) as cause:
        if isinstance(cause, TriptychError):
            raise
        raise UsageError(
            f"{capture.title} cannot be judged here ({type(cause).__name__}: {cause}). "
            f"Replay it where there is more memory, or with another --device or --against."
        ) from cause


def _decision(capture: Capture, spec: OpSpec, name: str, role: str, *instead: str) -> Decision:
    """What the one backend called `name` runs the call with.

    Args:
        role: what the backend is for, in texts.
        instead: names that would do as well as a backend's.
    """
    names = registry.backends.names()
    if name not in names:
        hint = nearest(name, (*names, *instead))
        raise UsageError(
            f"{role.capitalize()} is {name!r}; there is no such backend. {hint} Name one backend; a policy will not do."
        )
    rule = Rule(name, role, None, None, None, None, None, (name,))
    return select(capture.asked(spec), capture.layer, rule, names, registry.backends.get)


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
