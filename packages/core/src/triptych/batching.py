"""torch.func.vmap over a phase of an op: one call for each element of the batch.

An op is a function of its tensors, so that this is right for all of them, whichever tensors carry the batch: an
ensemble has a batch of weights, gradients of single samples one of everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from triptych.errors import ArgumentError
from triptych.opspec import Tensors


def one_by_one(
    name: str, info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...], run: Callable[..., Tensors]
) -> tuple[Tensors, tuple[int, ...]]:
    """Results of `run` for each element, stacked, and where the batch stands in them: a rule for vmap.

    Args:
        name: of the operator, for the error.
        info: torch's description of the vmap.
        in_dims: for each argument which dimension is the batch's; None where it has none.
        args: the arguments of `run`.
        run: called with the arguments of one element; returns tensors.
    """
    if info.batch_size == 0:
        raise ArgumentError(
            f"{name} was called inside torch.func.vmap over a dimension of size 0. It is run once for each element, "
            f"and there is none to learn the results' shapes from. Skip an empty batch."
        )
    columns = [
        [arg] * info.batch_size if dim is None else arg.unbind(dim) for arg, dim in zip(args, in_dims, strict=True)
    ]
    results = [run(*row) for row in zip(*columns, strict=True)]
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)
