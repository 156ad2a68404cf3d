"""The op's sharding rule: what parts compute, put together as the rule says, is what the whole computes.

No processes are needed: each axis that the rule lets a mesh split is split in two, and both parts run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from triptych.call import BACKWARD, FORWARD
from triptych.errors import Refused
from triptych.opspec import Tensors
from triptych.sharding import parts
from triptych.sharding.placing import Operand, dim_of, sizes
from triptych.sharding.rule import FLAT, ROWS, Axes, Calls, Exchange, Output, Part, Sharding, Stacked, kind
from triptych.sharding.tiles import chunks, whole_tiles
from triptych.testing import grid
from triptych.testing.assertions import assert_within
from triptych.testing.checks.catalogue import check
from triptych.testing.grid import Case
from triptych.testing.running import Skip, counts, gradients_of_outputs, needs_every_phase, under
from triptych.testing.subject import Subject

PARTS = 2


@check(grid.layouts)
def sharding_rule(subject: Subject, case: Case) -> None:
    """Two parts of a call, along each axis that may be split, make the outputs and the gradients of the whole."""
    rule = case.spec.sharding
    if rule is None:
        raise Skip(f"{case.op} has no sharding rule")
    needs_every_phase(subject, case)
    args = case.arguments()
    names = case.spec.forward.tensor_names
    if rule.seed and args[names.index(rule.seed)] is not None:
        raise Skip("each part draws noise of its own")
    axes = _axes_to_split(case, rule, args)
    if not axes:
        raise Skip("no axis of this case can be split in two")
    for axis in axes:
        before = counts()
        try:
            with under(f"composite;{case.op}={subject.backend}"):  # a part may ask other ops, too
                _assert_parts_make_the_whole(case, rule, args, axis)
        except Refused as refusal:
            raise Skip(f"a part is refused: {refusal}") from None
        elsewhere = {backend for op, _, backend in counts() - before if op == case.op} - {subject.backend}
        assert not elsewhere, f"{case.op} ran on {elsewhere} too"


def _axes_to_split(case: Case, rule: Sharding, args: tuple[Any, ...]) -> list[str]:
    found = []
    deciding = set(rule.decides)
    for name, axes, value in zip(case.spec.forward.tensor_names, rule.pattern(FORWARD).tensors, args, strict=False):
        if name not in deciding or value is None:
            continue
        for axis, size in zip(axes.named(value.dim()), value.shape, strict=True):
            if kind(axis) in rule.splits and size >= PARTS and axis not in found:
                tiles = parts.tiles_of(case.spec, rule, FORWARD, case.scalars)
                if axis != "n" or not tiles or whole_tiles(size, tiles, (PARTS,)) is not None:
                    found.append(axis)
    return found


def _assert_parts_make_the_whole(case: Case, rule: Sharding, args: tuple[Any, ...], axis: str) -> None:
    """Forward, and from what the parts and the whole saved, backward."""
    signature = case.spec.forward
    whole = signature.composite(*args)
    found, bounds = _run_in_parts(case, rule, FORWARD, args, axis, [{} for _ in range(PARTS)])
    reference, bound = signature.reference(*args), signature.bound(*args)
    _assert_joined(case, rule, FORWARD, axis, found, bounds, reference, bound)
    if case.spec.backward is None:
        return
    kept = [number for number, name in enumerate(signature.outputs) if name in rule.stays]
    if any(bool((bound[number] != 0).any()) for number in kept):
        raise Skip("what forward leaves for backward is in doubt in this case")
    own = [{signature.outputs[number]: parts.tensor_of(outputs[number]) for number in kept} for outputs in found]
    grads = gradients_of_outputs(case, whole)
    wanted = (True,) * len(case.spec.gradients)
    asked = case.spec.backward_arguments(grads, args, whole, wanted)
    found, bounds = _run_in_parts(case, rule, BACKWARD, asked, axis, own)
    backward = case.spec.backward
    _assert_joined(case, rule, BACKWARD, axis, found, bounds, backward.reference(*asked), backward.bound(*asked))


def _run_in_parts(
    case: Case, rule: Sharding, phase: str, args: tuple[Any, ...], axis: str, own: Sequence[dict[str, torch.Tensor]]
) -> tuple[list[tuple[Output, ...]], list[Tensors]]:
    """What each part returns, and how far from its reference it may lie; `own` are tensors that a part has already."""
    spec, signature, pattern = case.spec, case.spec.phase(phase), rule.pattern(phase)
    count = len(signature.tensors)
    operands = tuple(
        Operand(name, axes, tuple(value.shape), 0, ())
        for name, axes, value in zip(signature.tensor_names, pattern.tensors, args, strict=False)
        if value is not None and name not in rule.stays
    )
    all_tiles = parts.tiles_of(spec, rule, phase, args[count:])
    by_place = whole_tiles(sizes(case.op, operands)["n"], all_tiles, (PARTS,)) if axis == "n" and all_tiles else None
    exchanges, bounds = [], []
    for place in range(PARTS):
        tiles = by_place[(place,)] if by_place is not None else all_tiles
        part = Part((axis,), (place,), (PARTS,), sizes(case.op, operands), tiles, all_tiles)
        mine = [
            own[place][name] if name in own[place] else _cut(value, axes, axis, place, rule)
            for name, axes, value in zip(signature.tensor_names, pattern.tensors, args, strict=False)
        ]
        local = parts.arguments(spec, rule, phase, part, (*mine, *args[count:]))
        calls = Calls(_phase_of(case, phase), "")
        exchanges.append(parts.exchange_of(rule, phase, part, calls, local))
        if axis == "n" and all_tiles == 0 and rule.tiles:  # tiles that are cut have no part in a bound
            at = count + signature.scalar_names.index(rule.tiles)
            local = (*local[:at], 1, *local[at + 1 :])
        bounds.append(signature.bound(*local))
    return side_by_side(exchanges, axis), bounds


def _phase_of(case: Case, phase: str) -> Callable[..., Tensors]:
    operator = getattr(torch.ops.triptych, case.spec.operator_name(phase)).default

    def run(*args: Any) -> Tensors:
        outputs = operator(*args, "")
        return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)

    return run


def _cut(value: torch.Tensor | None, axes: Axes, axis: str, place: int, rule: Sharding) -> torch.Tensor | None:
    """A part's share of a tensor."""
    dim = None if value is None else dim_of(axes.named(value.dim()), axis, bool(rule.tiles))
    if value is None or dim is None:
        return value
    return value.narrow(dim, *chunks(value.shape[dim], PARTS)[place])


def side_by_side(exchanges: Sequence[Exchange], axis: str) -> list[tuple[Output, ...]]:
    """Run parts in step, each answered with what all of them ask about; their outputs."""
    answers: list[Any] = [None] * len(exchanges)
    done: list[tuple[Output, ...]] = []
    while True:
        requests = []
        for exchange, answer in zip(exchanges, answers, strict=True):
            try:
                requests.append(exchange.send(answer))
            except StopIteration as end:
                done.append(end.value)
        if not requests:
            return done
        kinds = {(type(request), request.kinds) for request in requests}
        assert len(requests) == len(exchanges) and len(kinds) == 1, "the parts do not ask for the same"
        tensors = [request.tensor for request in requests]
        stacked = isinstance(requests[0], Stacked)
        if kind(axis) not in requests[0].kinds:
            answers = [each.unsqueeze(0) if stacked else each for each in tensors]
        else:
            together = torch.stack(tensors)
            answers = [together if stacked else together.sum(0).to(tensors[0].dtype)] * len(exchanges)


def _assert_joined(
    case: Case,
    rule: Sharding,
    phase: str,
    axis: str,
    found: list[tuple[Output, ...]],
    bounds: list[Tensors],
    reference: Tensors,
    bound: Tensors,
) -> None:
    """Concatenated along the axis, added where the rule says partial, or else the same on both parts."""
    names = case.spec.phase(phase).outputs
    for number, (name, axes) in enumerate(zip(names, rule.pattern(phase).outputs, strict=True)):
        whole, allowed = reference[number], bound[number]
        if name in rule.stays or FLAT in axes.dims:
            continue
        pieces = [parts.tensor_of(outputs[number]).double() for outputs in found]
        each_bound = [one[number] for one in bounds]
        named = axes.named(whole.dim())
        dim = dim_of(named, axis, bool(rule.tiles)) if len(named) == whole.dim() else None
        part = Part((axis,), (0,), (PARTS,), {})
        what = f"{phase}, split along {'rows' if kind(axis) == ROWS else axis}: "
        if dim is not None:
            results, allowed = [torch.cat(pieces, dim)], allowed + torch.cat(each_bound, dim)
        else:
            results = [sum(pieces[1:], pieces[0])] if _is_sum(rule, phase, number, found, part) else pieces
            # A sum over the parts has the errors of all of them, whoever took it.
            together = torch.stack(each_bound)
            allowed = allowed + (together.sum(0) if kind(axis) in axes.sums else together.amax(0))
        for result in results:
            assert_within([name], (result,), (whole,), (allowed,), what, case.agree)


def _is_sum(rule: Sharding, phase: str, number: int, found: list[tuple[Output, ...]], part: Part) -> bool:
    return bool(parts.partial_along(rule, phase, number, found[0][number], part))
