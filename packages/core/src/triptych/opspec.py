"""What an op is: its phases, what passes from forward to backward, its oracle, its sample cases.

Conventions that every op follows, so that dispatch, the suite and bisect need not know any of them:

- a phase takes its tensors first, then its scalars, all positional, and returns a tuple of fresh tensors;
- backward takes the gradients of the differentiable outputs, then what forward saved, then forward's scalars, then
  one flag a gradient that says whether it is wanted. A gradient that is not wanted comes back with shape [0].
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from triptych.call import BACKWARD, FORWARD, Scalar
from triptych.errors import PluginError
from triptych.sharding.rule import Sharding

Tensors = tuple[torch.Tensor, ...]
PhaseFunction = Callable[..., Tensors]
"""Takes a phase's tensors, then its scalars; returns its outputs."""

_SCALAR_TYPES: dict[type, str] = {float: "float", int: "int", bool: "bool", str: "str"}


@dataclass(frozen=True)
class Phase:
    """The signature of one phase.

    Attributes:
        tensors: names of the tensor parameters; a name that ends with "?" may be None.
        scalars: pairs (name, type) with type one of float, int, bool, str.
        outputs: names of the tensors it returns.
        reference: the oracle: slow, obvious, float64 inside. Never used to run a program.
        composite: the same in plain PyTorch operations, one after the other, at the op's own precision.
        fake: returns empty outputs of the right shape, dtype, device and layout (contiguous) without computing.
        bound: for each output, elementwise and in float64, how far a correct implementation may lie from the
            reference: derived from dtypes, reduction lengths and the magnitudes of the terms, never tuned.
    """

    tensors: tuple[str, ...]
    scalars: tuple[tuple[str, type], ...]
    outputs: tuple[str, ...]
    reference: PhaseFunction
    composite: PhaseFunction
    fake: PhaseFunction
    bound: PhaseFunction

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(name.removesuffix("?") for name in self.tensors)

    @property
    def scalar_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.scalars)

    def schema(self) -> str:
        """Parameters and returns in the syntax of torch.library, plus `str layer`, the name of the calling layer."""
        parameters = [f"Tensor{'?' if name.endswith('?') else ''} {name.removesuffix('?')}" for name in self.tensors]
        parameters += [f"{_SCALAR_TYPES[kind]} {name}" for name, kind in self.scalars]
        parameters.append("str layer")
        returns = ", ".join(f"Tensor {name}" for name in self.outputs)
        return f"({', '.join(parameters)}) -> ({returns})"


@dataclass(frozen=True)
class Sample:
    """One case of an op's grid: how to make forward's inputs, and what is special about it.

    Attributes:
        name: unique within the op; names the case in test ids.
        make: called with a generator, a dtype and a device; returns forward's tensors in order (None where absent).
        scalars: forward's scalars.
        floor: whether no backend may refuse it on a device it supports.
        smooth: the forward inputs whose gradient is the derivative of forward in this case; None means all of them.
            The gradients of a quantiser are straight-through estimates, which finite differences contradict.
        nan: whether NaN is the right result somewhere although all inputs are finite. Where inputs are not, the suite
            expects NaN wherever the reference has it without being told.
    """

    name: str
    make: Callable[[torch.Generator, torch.dtype, torch.device], tuple[torch.Tensor | None, ...]]
    scalars: tuple[Scalar, ...]
    floor: bool = True
    smooth: tuple[str, ...] | None = None
    nan: bool = False


@dataclass(frozen=True)
class OpSpec:
    """Everything that is fixed once for an op, whatever backend runs it.

    Attributes:
        name: lower-case letters, digits and underscores; also the name under `torch.ops.triptych`.
        summary: one line for `triptych info`.
        forward, backward: the phases; backward is None where the op has no gradient.
        check: called with forward's arguments before anything else; raises ArgumentError.
        check_backward: the same for backward's, when its operator is called by itself.
        differentiable: forward outputs that carry gradients, its first ones. Backward's first tensors are their
            gradients, `d<name>`, with "?" where a missing gradient is passed as None rather than as zeros.
        returned: forward outputs without a gradient that a caller gets all the same; they follow the differentiable
            ones. What is in neither is for backward alone. An op without differentiable outputs returns all of them.
        saved: forward inputs or outputs, by name, that backward takes after the gradients.
        remade: those of the saved inputs that are not kept from forward to backward when the caller has said how to
            make them again (`triptych.remake`).
        varying: float scalars of forward that may take a new value with every call, as a schedule makes them. A backend
            must not decide by them whether it can run, except by whether they are positive.
        gradients: for each output of backward, the forward inputs whose gradient it is.
        sharding: how a call is split over the processes of a mesh (DTensor); without it, operands are gathered.
        typical: called with (shape, dtype, device); returns the forward arguments of an ordinary call whose first
            tensor is that, with a TensorMeta in place of each tensor. For `triptych explain`.
        samples: the op's grid of cases for the conformance suite.
    """

    name: str
    summary: str
    forward: Phase
    backward: Phase | None
    check: Callable[..., None]
    typical: Callable[[tuple[int, ...], torch.dtype, torch.device], tuple[Any, ...]]
    samples: Callable[[], Iterator[Sample]]
    check_backward: Callable[..., None] | None = None
    differentiable: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    remade: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()
    gradients: tuple[tuple[str, ...], ...] = ()
    sharding: Sharding | None = None

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise PluginError(f"The spec of op {self.name!r} is wrong: {problem} Report it to the authors of the op.")

    def _problem(self) -> str:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name) or keyword.iskeyword(self.name):
            return "a name is lower-case letters, digits and _, begins with a letter, and is no word of Python."
        if self.name.endswith("_backward"):
            return "names that end with _backward belong to the backward operators."
        if self.backward is not None:
            if len(self.gradients) != len(self.backward.outputs):
                return (
                    f"it has {len(self.backward.outputs)} gradients and says of {len(self.gradients)} whose they are."
                )
            known = self.forward.tensor_names + self.forward.outputs
            unknown = [name for name in self.saved if name not in known]
            if unknown:
                return f"it saves {', '.join(unknown)}, which forward neither takes nor returns."
        visible = self.differentiable + self.returned
        if visible != self.forward.outputs[: len(visible)]:
            return f"its first outputs must be {', '.join(visible)}, those with a gradient before those without."
        unknown = [name for name in self.remade if name not in self.saved or name not in self.forward.tensor_names]
        if unknown:
            return f"it makes {', '.join(unknown)} again, which is no forward input that it saves."
        floats = [name for name, kind in self.forward.scalars if kind is float]
        unknown = [name for name in self.varying if name not in floats]
        if unknown:
            return f"it lets {', '.join(unknown)} vary, which is no float scalar of forward."
        return self._problem_of_sharding()

    def _problem_of_sharding(self) -> str:
        if self.sharding is None:
            return ""
        phases = [self.phase(name) for name in self.phases]
        for name, phase in zip(self.phases, phases, strict=True):
            if problem := self.sharding.problem(name, len(phase.tensors), len(phase.outputs)):
                return problem
        known = {name for phase in phases for name in phase.tensor_names}
        named = (*self.sharding.decides, *self.sharding.stays, *self.sharding.weights)
        unknown = [name for name in named if name not in known]
        if unknown:
            return f"its sharding rule speaks of {', '.join(unknown)}, which no phase takes."
        if self.sharding.tiles and self.sharding.tiles not in self.forward.scalar_names:
            return (
                f"its sharding rule takes {self.sharding.tiles} for the number of tiles, which is no scalar of forward."
            )
        return ""

    @property
    def phases(self) -> tuple[str, ...]:
        return (FORWARD,) if self.backward is None else (FORWARD, BACKWARD)

    def phase(self, name: str) -> Phase:
        """The phase called `name`, which must be one of `phases`."""
        found = self.forward if name == FORWARD else self.backward
        assert found is not None, f"{self.name} has no {name}"
        return found

    @property
    def visible(self) -> int:
        """How many of forward's outputs a caller gets: the first ones."""
        return len(self.differentiable + self.returned) or len(self.forward.outputs)

    def check_of(self, phase: str) -> Callable[..., None]:
        """What checks the arguments of a phase."""
        if phase == FORWARD:
            return self.check
        return self.check_backward or (lambda *args: None)

    def operator_name(self, phase: str) -> str:
        """The name under `torch.ops.triptych`: `rms_norm` and `rms_norm_backward`."""
        return self.name if phase == FORWARD else f"{self.name}_{phase}"

    def backward_arguments(
        self, grads: tuple[Any, ...], forward_args: tuple[Any, ...], outputs: tuple[Any, ...], needs: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        """The arguments of backward that belong to a forward call with `forward_args` that returned `outputs`."""
        names = self.forward.tensor_names
        values = dict(zip(names + self.forward.outputs, forward_args[: len(names)] + outputs, strict=True))
        return (*grads, *(values[name] for name in self.saved), *forward_args[len(names) :], *needs)

    def wanted(self, requires_grad: dict[str, bool]) -> tuple[bool, ...]:
        """Which outputs of backward are wanted, given which forward inputs require a gradient."""
        return tuple(any(requires_grad[name] for name in names) for names in self.gradients)

    def result_for(self, name: str) -> int | None:
        """Which output of backward is the gradient of forward's tensor `name`; None where it has none."""
        return next((i for i, names in enumerate(self.gradients) if name in names), None)
