"""How tiles lie in a row: runs of tiles of one size, at most two, each a view with a dimension of its own for tiles.

base, extra = divmod(N, T): the first `extra` tiles have base + 1 columns, the others base. What is done to all tiles of
a run is thus one operation, whether or not T divides N.

Shapes: N = columns, T = tiles; values [..., N].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Run:
    """`tiles` tiles of `size` columns each, of which the first is tile `first` and begins at column `start`."""

    first: int
    tiles: int
    start: int
    size: int

    def of(self, values: Tensor) -> Tensor:
        """Their columns of `values` [..., N], a view [..., tiles, size] whatever the strides."""
        columns = values.narrow(-1, self.start, self.tiles * self.size)
        return torch.unflatten(columns, -1, (self.tiles, self.size))

    def numbers(self, of_tiles: Tensor) -> Tensor:
        """Their numbers in `of_tiles` [T, M], a view [M, tiles, 1] that broadcasts against `of`."""
        return of_tiles.narrow(0, self.first, self.tiles).T.unsqueeze(-1)

    @property
    def slice(self) -> slice:
        """Their indices among all tiles."""
        return slice(self.first, self.first + self.tiles)


def runs(columns: int, tiles: int) -> tuple[Run, ...]:
    """The tiles of a row of `columns` columns."""
    base, extra = divmod(columns, tiles)
    longer = Run(0, extra, 0, base + 1)
    others = Run(extra, tiles - extra, extra * (base + 1), base)
    return (longer, others) if extra else (others,)


def bounds(columns: int, tiles: int) -> tuple[tuple[int, int], ...]:
    """First column and one past the last of each tile."""
    return tuple(
        (run.start + number * run.size, run.start + (number + 1) * run.size)
        for run in runs(columns, tiles)
        for number in range(run.tiles)
    )


def matrix(values: Tensor) -> Tensor:
    """`values` with its leading dimensions as rows: [R, N], a view where strides allow it."""
    rows = 1
    for size in values.shape[:-1]:
        rows *= size
    return values.reshape(rows, values.shape[-1])


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which arithmetic is done."""
    return torch.float64 if dtype is torch.float64 else torch.float32
