"""Sums in an order in which the number of CPU threads has no part.

torch splits a sum between threads by its results, which changes none of them, unless there is one result only: then by
terms, from 32768 terms on. So a sum with one result is made of one with many. Under a compiler, which makes its own
loops and should not compile for each size, it is not.

Shapes: R rows, N columns, T tiles; values [R, N].
"""

from __future__ import annotations

import torch

from triptych_torch.ops import _tiles, _tracing

Tensor = torch.Tensor

_LANES = 1024


def over_rows(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of each column: [N]."""
    if values.shape[1] == 1 and not _tracing.traced():
        return _all(values.to(dtype)).view(1)
    return values.sum(0, dtype=dtype)


def over_last(values: Tensor) -> Tensor:
    """The sum over the last dimension, of whatever else there is."""
    if values.numel() == values.shape[-1] and not _tracing.traced():
        return _all(values).view(values.shape[:-1])
    return values.sum(-1)


def over_tiles(values: Tensor, tiles: int) -> Tensor:
    """The sum of each tile over all rows: [T]."""
    columns = over_rows(values, values.dtype)
    result = torch.empty(tiles, dtype=values.dtype, device=values.device)
    for run in _tiles.runs(values.shape[1], tiles):
        result[run.slice] = over_last(run.of(columns))
    return result


def _all(values: Tensor) -> Tensor:
    """The sum of all elements."""
    flat = values.reshape(-1)
    even = flat.numel() // _LANES * _LANES
    if even == 0:
        return flat.sum()
    lanes = flat[:even].view(-1, _LANES).sum(0)
    return torch.cat((lanes, flat[even:])).sum()
