"""Layouts in which a gradient, or any tensor, may arrive: the same values, stored another way."""

from __future__ import annotations

from collections.abc import Callable

import torch

Layout = Callable[[torch.Tensor], torch.Tensor]
"""From a contiguous tensor to one of the same values, shape and dtype."""


def contiguous(values: torch.Tensor) -> torch.Tensor:
    """Row-major."""
    return values.contiguous()


def transposed(values: torch.Tensor) -> torch.Tensor:
    """The last two dimensions stored the other way round, as backward of a transpose hands out."""
    return values.transpose(-1, -2).contiguous().transpose(-1, -2) if values.dim() > 1 else values


def permuted(values: torch.Tensor) -> torch.Tensor:
    """The first two dimensions stored the other way round: rows do not collapse to one stride."""
    return values.transpose(0, 1).contiguous().transpose(0, 1) if values.dim() > 1 else values


def _around(values: torch.Tensor) -> float:
    """What fills the gaps: NaN, or the largest integer."""
    return float("nan") if values.is_floating_point() else torch.iinfo(values.dtype).max


def narrowed_columns(values: torch.Tensor) -> torch.Tensor:
    """A slice of longer rows, as backward of a concatenation of columns hands out (M3)."""
    wide = values.new_full((*values.shape[:-1], values.shape[-1] + 5), _around(values))
    wide[..., 2:-3] = values
    return wide[..., 2:-3]


def narrowed_rows(values: torch.Tensor) -> torch.Tensor:
    """A slice along the second to last dimension: leading dimensions do not collapse."""
    if values.dim() < 2:
        return values
    tall = values.new_full((*values.shape[:-2], values.shape[-2] + 2, values.shape[-1]), _around(values))
    tall[..., 1:-1, :] = values
    return tall[..., 1:-1, :]


def offset(values: torch.Tensor) -> torch.Tensor:
    """One element into its storage: not aligned to 16 bytes."""
    flat = values.new_full((values.numel() + 1,), _around(values))
    flat[1:] = values.reshape(-1)
    return flat[1:].view(values.shape)


def every_other(values: torch.Tensor) -> torch.Tensor:
    """Last stride 2."""
    wide = values.new_full((*values.shape[:-1], 2 * values.shape[-1]), _around(values))
    wide[..., ::2] = values
    return wide[..., ::2]


SAME_VALUES: tuple[Layout, ...] = (
    contiguous,
    transposed,
    permuted,
    narrowed_columns,
    narrowed_rows,
    offset,
    every_other,
)
"""Layouts that can hold any values."""


def expanded(values: torch.Tensor) -> torch.Tensor:
    """One element repeated by strides of 0, as backward of a sum hands out (M2). Takes the first value."""
    return values.reshape(-1)[:1].squeeze(0).expand(values.shape) if values.numel() else values


def expanded_rows(values: torch.Tensor) -> torch.Tensor:
    """One row repeated by stride 0, as backward of a sum over rows hands out. Takes the first row."""
    return values.reshape(-1, values.shape[-1])[:1].squeeze(0).expand(values.shape) if values.numel() else values


def expanded_columns(values: torch.Tensor) -> torch.Tensor:
    """One column repeated by stride 0, as backward of a sum over columns hands out. Takes the first column."""
    return values[..., :1].contiguous().expand(values.shape) if values.numel() else values


REPEATED_VALUES: tuple[Layout, ...] = (expanded, expanded_rows, expanded_columns)
"""Layouts that repeat some of the values they are given."""


def drawn(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A random order of the dimensions in memory, a random gap after each, a random offset."""
    if values.dim() == 0 or values.numel() == 0:
        return values
    strides = [0] * values.dim()
    step = int(torch.randint(1, 4, (), generator=generator))
    for dim in torch.randperm(values.dim(), generator=generator).tolist():
        strides[dim] = step
        step = step * values.shape[dim] + int(torch.randint(0, 4, (), generator=generator))
    start = int(torch.randint(0, 9, (), generator=generator))
    copy = values.new_full((start + step,), _around(values)).as_strided(values.shape, strides, start)
    return copy.copy_(values)
