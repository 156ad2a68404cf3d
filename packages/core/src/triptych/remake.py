"""Tensors that are made again for backward instead of being kept.

A weight with noise on it is as large as the weight and follows from it and a seed. `attach` marks such a tensor with a
function that makes the same values again, and with what that function reads; an op that declares the input in
`OpSpec.remade` then keeps those sources for backward, and not the tensor. Where the mark is lost (torch.compile,
torch.export, a copy of the tensor) the tensor is kept, as autograd always does.

Sources are kept as autograd keeps any tensor: hooks on saved tensors see them, activation checkpointing drops them, and
one that is changed in place before backward is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from triptych import scope

ATTRIBUTE = "_triptych_remake"

Tensor = torch.Tensor
Sources = tuple[Tensor | None, ...]


def attach(tensor: Tensor, make: Callable[..., Tensor], *sources: Tensor | None) -> None:
    """Say how to make the values of `tensor` again.

    Args:
        tensor: what an op is about to be given.
        make: called with the sources in backward, without gradients and under the policy in force now, perhaps more
            than once; returns a tensor of the same values bit for bit. It must hold no tensor itself.
        sources: the tensors that `make` reads, detached; None is passed on.
    """
    setattr(tensor, ATTRIBUTE, Recipe(Maker(make, len(sources), scope.current()), sources))


@dataclass(frozen=True, slots=True)
class Maker:
    """A function of `count` sources, and the policy that it runs under."""

    make: Callable[..., Tensor]
    count: int
    policy: scope.Scope

    def __call__(self, sources: Sources) -> Tensor:
        """The tensor, made again."""
        with scope.within(self.policy), torch.no_grad():
            return self.make(*sources)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a marked tensor carries."""

    maker: Maker
    sources: Sources


def made_again(kept: Sources, places: tuple[int, ...], makers: tuple[Maker | None, ...], count: int) -> Sources:
    """The tensors that an op saved, with those that were not kept made again.

    Args:
        kept: `count` saved tensors, None for one that was not kept; behind them the sources of each maker in turn.
        places: where, among the saved ones, the tensors stand that may have a maker.
        makers: theirs; None for one that was kept.
        count: how many the op saves.
    """
    tensors, sources = list(kept[:count]), iter(kept[count:])
    for place, maker in zip(places, makers, strict=True):
        if maker is not None:
            tensors[place] = maker(_take(sources, maker.count))
    return tuple(tensors)


def _take(tensors: Iterator[Tensor | None], count: int) -> Sources:
    return tuple(next(tensors) for _ in range(count))
