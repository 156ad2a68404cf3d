"""The sharding rule of an op: which axes its tensors have, and along which of them a mesh may split a call.

A pattern names the axes of each tensor of a phase, in the order of the phase, as einsum does:

    "... n, n -> ... n, ..."              rms_norm: x [..., N], weight [N] -> y [..., N], rstd [...]
    "... n, ... n, n, ... -> ... n, n +..."   its backward: dx; dw, which is a sum over the rows

    ...      any number of leading dimensions, each of which is an axis; (...) is all of them flattened into one
    n, c     one dimension; a letter is the same size wherever it stands
    t        the tiles that axis n is split into, where the rule has `tiles`
    1        a dimension that no process has a part of: a seed
    +axis    the output is a sum over that axis, which it does not have

Each dimension of the mesh splits one axis, or none. A tensor that has the axis is sharded along it, one that has not is
replicated, and an output that is a sum over it is partial.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

ROWS, FLAT = "...", "(...)"
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Axes:
    """The axes of one tensor, and those that it is a sum over."""

    dims: tuple[str, ...]
    sums: tuple[str, ...] = ()

    def named(self, ndim: int) -> tuple[str, ...]:
        """One name for each of `ndim` dimensions; the leading ones are "...0", "...1" and so on."""
        if ROWS not in self.dims:
            return self.dims
        at, rows = self.dims.index(ROWS), ndim - len(self.dims) + 1
        return (*self.dims[:at], *(f"{ROWS}{i}" for i in range(rows)), *self.dims[at + 1 :])


def kind(axis: str) -> str:
    """The axis as a rule names it: "..." for any of the leading dimensions."""
    return ROWS if axis.startswith(ROWS) else axis


class Pattern(NamedTuple):
    """The axes of the tensors and of the outputs of a phase."""

    tensors: tuple[Axes, ...]
    outputs: tuple[Axes, ...]


@cache
def parsed(text: str) -> Pattern:
    """A pattern as written in a rule. ValueError if it is none."""
    if text.count("->") != 1:
        raise ValueError(f"{text!r} needs one ->, between tensors and outputs.")
    left, right = text.split("->")
    return Pattern(*(tuple(_axes(each) for each in side.split(",")) for side in (left, right)))


def _axes(text: str) -> Axes:
    words = text.split()
    bad = [word for word in words if not re.fullmatch(r"\+?([a-z]+|\.\.\.)|1|\(\.\.\.\)", word)]
    dims = tuple(word for word in words if not word.startswith("+"))
    if bad or not words or len(set(dims)) != len(dims):
        raise ValueError(f"{text.strip()!r} names no axes: they are words in lower case, ..., (...) or 1, each once.")
    return Axes(dims, tuple(word[1:] for word in words if word.startswith("+")))


@dataclass(frozen=True)
class Part:
    """Which part of a call a process has.

    Attributes:
        axes: for each dimension of the mesh, the axis that it splits; "" where it splits none.
        places: for each dimension of the mesh, where this process is along it.
        counts: for each dimension of the mesh, how many processes there are along it.
        sizes: of the axes of the whole call, by name.
        tiles, all_tiles: how many tiles this part has, and the whole; 0 where there are none, or they may be cut.
    """

    axes: tuple[str, ...]
    places: tuple[int, ...]
    counts: tuple[int, ...]
    sizes: dict[str, int]
    tiles: int = 0
    all_tiles: int = 0

    def along(self, *kinds: str) -> tuple[int, ...]:
        """The dimensions of the mesh that split one of these axes; that split any, when none is named."""
        return tuple(i for i, axis in enumerate(self.axes) if axis and (not kinds or kind(axis) in kinds))

    def splits(self, *kinds: str) -> bool:
        """Whether one of these axes is split."""
        return bool(self.along(*kinds))

    def place(self, *kinds: str) -> int:
        """Which part of these axes this is, counted from 0: parts with the same number have the same of them."""
        number = 0
        for i in self.along(*kinds):
            number = number * self.counts[i] + self.places[i]
        return number


@dataclass(frozen=True)
class Stacked:
    """Asks for a tensor from every part of some axes: [parts, ...], the same on all of them. For small tensors.

    Where none of these axes is split there is one part, and nothing is sent.
    """

    tensor: torch.Tensor
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Summed:
    """Asks for the sum of a tensor over every part of some axes."""

    tensor: torch.Tensor
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Whole:
    """An output that is no sum over these axes any more, although the pattern says that it is one."""

    tensor: torch.Tensor
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Calls:
    """What a part runs: the phase that it is a part of, and other ops, under the name of the calling layer."""

    phase: Callable[..., Tensors]
    layer: str

    def op(self, name: str, *args: Any) -> Any:
        """Another op's operator; what that returns."""
        return getattr(torch.ops.triptych, name).default(*args, self.layer)


Request = Stacked | Summed
Output = torch.Tensor | Whole
Exchange = Generator[Request, torch.Tensor, tuple[Output, ...]]
"""What a part does: yields what it asks of the other parts, is sent the answers, returns its outputs."""
Asking = Generator[Request, torch.Tensor, torch.Tensor]
"""A step of that, which has a tensor for its result."""
Local = Callable[[Calls, Part, tuple[Any, ...]], Exchange]
"""Called with what it may run, which part this is, and its arguments: those of the part, tiles and seed included."""


@dataclass(frozen=True)
class Sharding:
    """The rule of an op.

    Attributes:
        forward, backward: the patterns of the phases.
        splits: the axes along which a call may be split.
        decides: the tensors whose placements decide which axis is split: those that are large, by name, in whichever
            phase they occur. The others follow. They must decide the same in backward as in forward.
        tiles: the scalar that says into how many tiles axis n is split, where only whole tiles may be.
        may_cut: called with the scalars; whether tiles may be cut after all, because nothing depends on them.
        seed: the tensor that is the seed of noise; each part gets one of its own.
        stays: tensors that are stored as forward left them and never moved.
        weights: tensors that are not gathered because tiles are cut: such a call is refused.
        local_forward, local_backward: what a part does; None for the phase alone.
    """

    forward: str
    backward: str = ""
    splits: tuple[str, ...] = (ROWS,)
    decides: tuple[str, ...] = ("x",)
    tiles: str = ""
    may_cut: Callable[..., bool] | None = None
    seed: str = ""
    stays: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    local_forward: Local | None = None
    local_backward: Local | None = None

    def pattern(self, phase: str) -> Pattern:
        """The axes of a phase, "forward" or "backward"."""
        return parsed(self.forward if phase == "forward" else self.backward)

    def local(self, phase: str) -> Local | None:
        """What a part of a phase does, if it is not the phase alone."""
        return self.local_forward if phase == "forward" else self.local_backward

    def problem(self, phase: str, tensors: int, outputs: int) -> str:
        """What is wrong with the pattern of a phase that takes and returns so many tensors; "" if nothing."""
        try:
            pattern = self.pattern(phase)
        except ValueError as error:
            return f"the sharding pattern of {phase} {error}"
        if (len(pattern.tensors), len(pattern.outputs)) != (tensors, outputs):
            return (
                f"its {phase} takes {tensors} tensors and returns {outputs}, and the sharding pattern names the axes "
                f"of {len(pattern.tensors)} and {len(pattern.outputs)}."
            )
        return ""
