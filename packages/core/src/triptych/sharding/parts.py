"""One part of a call: its arguments, and what it does with them. Shared by meshes and by the conformance suite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from triptych.sharding import seeds
from triptych.sharding.rule import Calls, Exchange, Output, Part, Sharding, Whole, kind

if TYPE_CHECKING:
    from triptych.opspec import OpSpec


def arguments(spec: OpSpec, rule: Sharding, phase: str, part: Part, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a part, from its tensors and the scalars of the whole call: its own tiles, its own seed."""
    signature, mine = spec.phase(phase), list(args)
    count = len(signature.tensors)
    if rule.tiles and part.tiles:
        mine[count + signature.scalar_names.index(rule.tiles)] = part.tiles
    if rule.seed in signature.tensor_names and part.splits():
        place = signature.tensor_names.index(rule.seed)
        if mine[place] is not None:
            mine[place] = seeds.of_part(mine[place], part.place())
    return tuple(mine)


def tiles_of(spec: OpSpec, rule: Sharding, phase: str, scalars: tuple[Any, ...]) -> int:
    """Into how many tiles the inputs of the whole call are split; 0 where they are not, or it does not matter where."""
    if not rule.tiles or (rule.may_cut is not None and rule.may_cut(*scalars)):
        return 0
    tiles: int = scalars[spec.phase(phase).scalar_names.index(rule.tiles)]
    return tiles


def exchange_of(rule: Sharding, phase: str, part: Part, calls: Calls, args: tuple[Any, ...]) -> Exchange:
    """What a part does: what the rule says, or the phase alone."""
    local = rule.local(phase)
    return _alone(calls, args) if local is None or not part.splits() else local(calls, part, args)


def _alone(calls: Calls, args: tuple[Any, ...]) -> Exchange:
    return calls.phase(*args)
    yield  # asks the other parts nothing


def partial_along(rule: Sharding, phase: str, number: int, output: Output, part: Part) -> tuple[int, ...]:
    """The dimensions of the mesh along which output `number` of a phase is a sum that has not been taken yet."""
    done = output.kinds if isinstance(output, Whole) else ()
    sums = set(rule.pattern(phase).outputs[number].sums) - set(done)
    return tuple(i for i in part.along() if kind(part.axes[i]) in sums)


def tensor_of(output: Output) -> torch.Tensor:
    """The tensor itself."""
    return output.tensor if isinstance(output, Whole) else output
