"""Tensors that are made again for backward instead of being kept.

A weight with noise on it is as large as the weight and follows from it and a seed. `attach` marks such a tensor with a
function that makes the same values again; an op that declares the input in `OpSpec.remade` then keeps that function for
backward, and not the tensor. Where the mark is lost (torch.compile, torch.export, a copy of the tensor) the tensor is
kept, as autograd always does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from triptych import scope
from triptych.errors import ChangedError

ATTRIBUTE = "_triptych_remake"


def attach(tensor: torch.Tensor, make: Callable[[], torch.Tensor], *sources: torch.Tensor | None) -> None:
    """Say how to make the values of `tensor` again.

    Args:
        tensor: what an op is about to be given.
        make: called in backward, without gradients and under the policy in force now, perhaps more than once; returns
            a tensor of the same values bit for bit.
        sources: the tensors that `make` reads. Changing one in place before backward is an error, as for any tensor
            that autograd keeps.
    """
    setattr(tensor, ATTRIBUTE, _Recipe(make, tuple(source for source in sources if source is not None)))


class _Recipe:
    """A function to make a tensor again, with the state of what it reads."""

    __slots__ = ("_make", "_scope", "_sources", "_versions")

    def __init__(self, make: Callable[[], torch.Tensor], sources: tuple[torch.Tensor, ...]) -> None:
        self._make = make
        self._sources = sources
        self._versions = tuple(source._version for source in sources)
        self._scope = scope.current()

    def __call__(self) -> torch.Tensor:
        """The tensor, made again.

        Raises:
            ChangedError: a source was changed in place since.
        """
        for source, version in zip(self._sources, self._versions, strict=True):
            if source._version != version:
                raise ChangedError(
                    f"A tensor of shape {list(source.shape)} was changed in place between forward and backward "
                    f"(version {version}, now {source._version}); backward needs the values that forward had. Run "
                    f"backward before the optimizer's step, or change a copy."
                )
        with scope.within(self._scope), torch.no_grad():
            return self._make()
