"""Whether two results agree, element by element, and what to say when they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from triptych.opspec import Phase


@dataclass(frozen=True)
class Difference:
    """Where one output disagrees with what it was compared with.

    Attributes:
        output: the name of the output.
        text: what differs, as a sentence without a subject.
        count, total: how many of its elements disagree, of how many.
        index: the first one that does.
        got, wanted, tolerance: its values there.
    """

    output: str
    text: str
    count: int
    total: int
    index: tuple[int, ...] = ()
    got: float | None = None
    wanted: float | None = None
    tolerance: float | None = None

    def __str__(self) -> str:
        return f"{self.output} {self.text}"

    def to_json(self) -> dict[str, Any]:
        return {
            "output": self.output,
            "text": self.text,
            "count": self.count,
            "total": self.total,
            "index": list(self.index),
            "got": plain(self.got),
            "wanted": plain(self.wanted),
            "tolerance": plain(self.tolerance),
        }


def plain(value: float | None) -> float | str | None:
    """A number as JSON knows it: what is not finite becomes text."""
    return value if value is None or value - value == 0 else str(value)


def all_finite(tensors: tuple[Any, ...]) -> torch.Tensor | bool:
    """Whether every floating tensor among `tensors` holds finite values only; stays on the device, without waiting."""
    flags = [
        torch.isfinite(each).all() for each in tensors if isinstance(each, torch.Tensor) and each.is_floating_point()
    ]
    return torch.stack([flag.reshape(()) for flag in flags]).all() if flags else True


def nonfinite(name: str, tensor: torch.Tensor) -> Difference | None:
    """What is not finite in `tensor`; None when all of it is."""
    if not tensor.is_floating_point():
        return None
    return _describe(name, torch.isfinite(tensor), tensor, None, None, "is not finite")


def agreement(got: torch.Tensor, wanted: torch.Tensor, tolerance: torch.Tensor) -> torch.Tensor:
    """Elementwise, whether `got` lies within `tolerance` of `wanted`, measured in float64; exactly between integers.

    An infinity agrees where `wanted`, rounded to the dtype of `got`, is the same infinity, and nowhere else, however
    large the tolerance: both overflowed. NaN agrees with nothing.
    """
    error = _distance(got, wanted)
    within = (error <= tolerance.double()) & (error < torch.inf)
    return within | (got == wanted.to(got.dtype)) if got.is_floating_point() else within


def _distance(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """|got - wanted| in float64. Two integers are subtracted as such: beyond 2^53 a float knows but every other one."""
    if got.is_floating_point() or wanted.is_floating_point():
        return (got.double() - wanted.double()).abs()
    got, wanted = got.to(torch.int64), wanted.to(torch.int64)
    difference = torch.maximum(got, wanted) - torch.minimum(got, wanted)
    return torch.where(difference < 0, torch.inf, difference.double())  # past 2^63 the difference wraps around


def differences(
    phase: Phase, got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], tolerances: tuple[torch.Tensor, ...]
) -> tuple[Difference, ...]:
    """Every output that does not lie within its tolerance of what was wanted, all of it; see `agreement`.

    Args:
        phase: names the outputs.
        got, wanted: the two results; they must agree in shape.
        tolerances: elementwise, absolute.
    """
    return _differences(phase, got, wanted, tolerances, agreement)


def differences_of_nonfinite(
    phase: Phase, got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], tolerances: tuple[torch.Tensor, ...]
) -> tuple[Difference, ...]:
    """`differences` for a call whose inputs hold NaN or infinities: NaN agrees where NaN was wanted."""
    return _differences(phase, got, wanted, tolerances, agreement_or_both_nan)


def relative(wanted: tuple[torch.Tensor, ...], rtol: float) -> tuple[torch.Tensor, ...]:
    """For each output, `rtol` times the largest magnitude among its finite values.

    What overflowed has no magnitude: it must not widen the tolerance of what did not.
    """
    return tuple(rtol * _largest_finite(each) for each in wanted)


def _largest_finite(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    return torch.where(torch.isfinite(tensor), tensor, 0).double().abs().amax()


def agreement_or_both_nan(got: torch.Tensor, wanted: torch.Tensor, tolerance: torch.Tensor) -> torch.Tensor:
    """`agreement`, and NaN where NaN was wanted."""
    return agreement(got, wanted, tolerance) | (got.isnan() & wanted.isnan())


def _differences(
    phase: Phase,
    got: tuple[torch.Tensor, ...],
    wanted: tuple[torch.Tensor, ...],
    tolerances: tuple[torch.Tensor, ...],
    agree: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[Difference, ...]:
    found = []
    for name, mine, other, tolerance in zip(phase.outputs, got, wanted, tolerances, strict=True):
        if mine.shape != other.shape:
            text = f"has shape {list(mine.shape)} instead of {list(other.shape)}"
            found.append(Difference(name, text, mine.numel(), mine.numel()))
            continue
        allowed = tolerance.double().expand(other.shape)
        difference = _describe(name, agree(mine, other, allowed), mine, other.double(), allowed, "is off")
        if difference is not None:
            found.append(difference)
    return tuple(found)


def _describe(
    name: str,
    agrees: torch.Tensor,
    got: torch.Tensor,
    wanted: torch.Tensor | None,
    tolerance: torch.Tensor | None,
    verb: str,
) -> Difference | None:
    total = agrees.numel()
    count = total - int(agrees.sum())
    if count == 0:
        return None
    first = int((~agrees).reshape(-1).to(torch.uint8).argmax())
    index = tuple(int(each) for each in torch.unravel_index(torch.tensor(first), agrees.shape)) if agrees.dim() else ()
    mine = float(got[index])
    right = None if wanted is None else float(wanted[index])
    allowed = None if tolerance is None else float(tolerance[index])
    text = f"{verb} in {count} of {total} elements, first at {list(index)}: {mine!r}"
    if right is not None and allowed is not None:
        text += f" instead of {right!r}, tolerance {allowed:.3g}"
    return Difference(name, text, count, total, index, mine, right, allowed)
