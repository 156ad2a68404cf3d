"""From where the operands of a call lie to the axis that each dimension of the mesh splits, and where the rest must be.

For each dimension of the mesh: of the axes along which a deciding tensor is sharded there, the one for which the fewest
bytes move; none, if that is the fewest. Gathering a shard costs the bytes of the whole, a sum twice that (once, if only
a shard of it is wanted), from one shard to another a share, from a replica nothing. The answer is the same on every
process, and the same in backward as in forward, since both look at the same tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.errors import ArgumentError
from triptych.sharding.rule import FLAT, ROWS, Axes, Sharding, kind
from triptych.sharding.tiles import cut_text, whole_tiles

PARTIAL, ELSEWHERE = "partial", "elsewhere"
Where = int | str | None
"""Along one dimension of the mesh: the dimension of the tensor that it shards; None where it is replicated; PARTIAL; or
ELSEWHERE: sharded in a way that no rule speaks of."""


@dataclass(frozen=True)
class Operand:
    """A tensor of a call, seen as a whole.

    Attributes:
        name, axes: as the rule has them.
        shape: of the whole tensor.
        bytes: of the whole tensor.
        where: for each dimension of the mesh.
    """

    name: str
    axes: Axes
    shape: tuple[int, ...]
    bytes: int
    where: tuple[Where, ...]

    @property
    def named(self) -> tuple[str, ...]:
        return self.axes.named(len(self.shape))


def sizes(op: str, operands: tuple[Operand, ...]) -> dict[str, int]:
    """The size of each axis of the whole call.

    Raises:
        ArgumentError: two tensors disagree.
    """
    found: dict[str, tuple[int, str]] = {}
    for operand in operands:
        if len(operand.named) != len(operand.shape):
            raise ArgumentError(
                f"{op}: {operand.name} has shape {list(operand.shape)}. It must have {len(operand.named)} dimensions."
            )
        for axis, size in zip(operand.named, operand.shape, strict=True):
            known, name = found.setdefault(axis, (size, operand.name))
            if known != size and axis not in (FLAT, "1"):
                raise ArgumentError(
                    f"{op}: {operand.name} has shape {list(operand.shape)}, and {name} has {known} where it has {size}."
                )
    return {axis: size for axis, (size, _) in found.items()}


def dim_of(named: tuple[str, ...], axis: str, tiles: bool) -> int | None:
    """Which dimension of a tensor a split of `axis` shards; None where the tensor has no part of it."""
    for dim, own in enumerate(named):
        if own == axis or (own == FLAT and kind(axis) == ROWS) or (tiles and own == "t" and axis == "n"):
            return dim
    return None


def choose(
    op: str, rule: Sharding, operands: tuple[Operand, ...], counts: tuple[int, ...], tiles: int
) -> tuple[str, ...]:
    """The axis that each dimension of the mesh splits; "" for none.

    Args:
        op: its name, for errors.
        rule: its rule.
        operands: its tensors, those that are there.
        counts: the sizes of the mesh.
        tiles: how many tiles axis n is split into; 0 where it may be split anywhere.

    Raises:
        ArgumentError: tiles are cut, and making them whole would gather a weight.
    """
    deciding = tuple(each for each in operands if each.name in rule.decides)
    axes = _cheapest(rule, deciding, counts, frozenset(rule.splits))
    along = tuple(count for axis, count in zip(axes, counts, strict=True) if axis == "n")
    wanted = {i for each in deciding if each.name in rule.weights for i, at in enumerate(each.where) if _is_n(each, at)}
    if not tiles or not (along or wanted):
        return axes
    n = next(size for each in operands for axis, size in zip(each.named, each.shape, strict=True) if axis == "n")
    if along and whole_tiles(n, tiles, along) is not None:
        return axes
    for each in deciding:
        cut = tuple(counts[i] for i, at in enumerate(each.where) if _is_n(each, at))
        if cut and each.name in rule.weights and whole_tiles(n, tiles, cut) is None:
            raise ArgumentError(cut_text(op, each.name, n, tiles, cut))
    return _cheapest(rule, deciding, counts, frozenset(rule.splits) - {"n"}) if along else axes


def _is_n(operand: Operand, at: Where) -> bool:
    return isinstance(at, int) and operand.named[at] == "n"


def _cheapest(
    rule: Sharding, deciding: tuple[Operand, ...], counts: tuple[int, ...], allowed: frozenset[str]
) -> tuple[str, ...]:
    chosen = []
    for i, count in enumerate(counts):
        options = [
            axis
            for each in deciding
            if isinstance(at := each.where[i], int) and kind(axis := each.named[at]) in allowed
        ]
        costs = {
            axis: sum(_cost(each, i, axis, count, bool(rule.tiles)) for each in deciding) for axis in (*options, "")
        }
        chosen.append(min(costs, key=lambda axis: costs[axis]))  # the first of several: that of the first tensor
    return tuple(chosen)


def _cost(operand: Operand, i: int, axis: str, count: int, tiles: bool) -> float:
    """The bytes that must move for the operand to be where a split of `axis` wants it."""
    at, wanted = operand.where[i], dim_of(operand.named, axis, tiles) if axis else None
    if at is None or at == wanted:
        return 0.0
    if at == PARTIAL:
        return operand.bytes * (1.0 if wanted is not None else 2.0)
    return operand.bytes / count if wanted is not None and isinstance(at, int) else float(operand.bytes)
