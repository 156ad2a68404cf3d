"""Planted faults: tiny backends, each right but for one thing, each with the checks that must catch it.

A fault is a function around a healthy implementation. It works on any op, from the op's spec alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from triptych import registry
from triptych.backend import Backend
from triptych.call import BACKWARD, FORWARD, Call
from triptych.layout import whole
from triptych.opspec import OpSpec, PhaseFunction, Tensors
from triptych.testing.subject import Subject


@dataclass
class Healthy:
    """The implementation that a fault spoils: the op's composite. Call it with a phase's arguments.

    Attributes:
        spec, phase: what is implemented.
        memory: whatever the fault keeps from one call to the next.
    """

    spec: OpSpec
    phase: str
    memory: dict[Any, Any] = field(default_factory=dict)

    def __call__(self, *args: Any) -> Tensors:
        return self.spec.phase(self.phase).composite(*args)

    @property
    def forward(self) -> bool:
        return self.phase == FORWARD

    @property
    def backward(self) -> bool:
        return self.phase == BACKWARD

    @property
    def gradients(self) -> range:
        """The places of the gradients among the arguments of backward."""
        return range(len(self.spec.differentiable) if self.backward else 0)

    @property
    def inputs(self) -> range:
        """The places of the tensors that are no gradients."""
        return range(len(self.gradients), len(self.spec.phase(self.phase).tensors))


Spoiled = Callable[..., Tensors]
"""Called with the healthy implementation and a phase's arguments; returns the phase's outputs, in some way wrong."""


Reasons = Callable[[Call], list[str]]
"""What a backend says against a call."""


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        name: of the fault; its backend is called `faulty_<name>`.
        case: the class of real bugs it stands for, by its number in the project's list of cases, or "".
        caught_by: checks that must fail, each on its own.
        run: what the backend does.
        reasons: what it says against a call.
    """

    name: str
    case: str
    caught_by: tuple[str, ...]
    run: Spoiled
    reasons: Reasons

    @property
    def summary(self) -> str:
        return (self.run.__doc__ or self.reasons.__doc__ or "").strip()


FAULTS: dict[str, Fault] = {}
"""All planted faults by name."""


def _sound(healthy: Healthy, *args: Any) -> Tensors:
    return healthy(*args)


def _no_reasons(call: Call) -> list[str]:
    return []


def fault(*caught_by: str, case: str = "") -> Callable[[Spoiled], Spoiled]:
    """Plant the decorated function as an implementation of every phase of every op."""

    def add(run: Spoiled) -> Spoiled:
        FAULTS[run.__name__] = Fault(run.__name__, case, caught_by, run, _no_reasons)
        return run

    return add


def fault_of_refusal(*caught_by: str, case: str = "") -> Callable[[Reasons], Reasons]:
    """Plant the decorated function as `reasons_against` of a backend that computes correctly."""

    def add(reasons: Reasons) -> Reasons:
        FAULTS[reasons.__name__] = Fault(reasons.__name__, case, caught_by, _sound, reasons)
        return reasons

    return add


LOOPBACK = Fault("loopback", "", (), _sound, _no_reasons)
"""No fault at all: it must pass every check."""


class FaultyBackend(Backend):
    """A backend with one fault. In no `auto`, so that nothing but its own test ever runs on it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"faulty_{fault.name}", "triptych")
        self.fault = fault
        self._functions: dict[tuple[str, str], PhaseFunction] = {}

    def ops(self) -> tuple[str, ...]:
        return registry.ops.names()

    def implementation(self, op: str, phase: str) -> PhaseFunction | None:
        spec = registry.ops.get(op)
        if phase not in spec.phases:
            return None
        if (op, phase) not in self._functions:
            healthy = Healthy(spec, phase)
            self._functions[op, phase] = lambda *args: self.fault.run(healthy, *args)
        return self._functions[op, phase]

    def reasons_against(self, call: Call) -> list[str]:
        return self.fault.reasons(call)


@contextmanager
def planted(fault: Fault, device_type: str = "cpu") -> Iterator[Subject]:
    """A backend with this fault, registered for the length of the block, as a subject of the suite."""
    backend = FaultyBackend(fault)
    with registry.backends.added(backend.name, backend):
        yield Subject(backend.name, device_types=(device_type,))


# --- what faults are made of ------------------------------------------------------------------------------------------


def scaled(outputs: Tensors, factor: float) -> Tensors:
    """Outputs times a factor; counts and bits as they are."""
    return tuple(output * factor if output.is_floating_point() else output for output in outputs)


def with_integers(outputs: Tensors, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    """Outputs with `change` applied to those that hold integers."""
    return tuple(output if output.is_floating_point() else change(output) for output in outputs)


def replaced(
    args: tuple[Any, ...], places: Sequence[int], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Any, ...]:
    """`args` with `change` applied to the tensors in `places`."""
    return tuple(
        change(value) if i in places and isinstance(value, torch.Tensor) else value for i, value in enumerate(args)
    )


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor as a flat tensor of its dtype: what a kernel with a pointer can reach."""
    return whole(tensor).view(tensor.dtype)


def offsets(shape: tuple[int, ...], stride: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The distance of every element from the first, in elements."""
    total = torch.zeros(shape, dtype=torch.int64, device=device)
    for dim, (size, step) in enumerate(zip(shape, stride, strict=True)):
        total += (torch.arange(size, device=device) * step).view(-1, *(1,) * (len(shape) - dim - 1))
    return total


def read_at(tensor: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Elements at these distances from the tensor's first; 0 where a distance leads out of its storage."""
    memory = whole_storage(tensor)
    if not memory.numel():
        return tensor
    places = distance + int(tensor.storage_offset())
    inside = places.ge(0).logical_and(places.lt(memory.numel()))
    return memory[places.clamp(0, memory.numel() - 1)].masked_fill(~inside, 0)


def read_with(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor, read with other strides than its own."""
    return read_at(tensor, offsets(tuple(tensor.shape), stride, tensor.device))
