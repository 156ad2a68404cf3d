"""tile_std in PyTorch operations: two passes on the CPU, torch.std's Welford sums on CUDA.

Shapes: R rows, N = columns, T = tiles; x [..., N]; std [T].
"""

from __future__ import annotations

import torch

from triptych_torch.ops import _sums, _tiles

Tensor = torch.Tensor


def forward(x: Tensor, tiles: int) -> tuple[Tensor]:
    """The unbiased standard deviation of each tile, in float32 (float64 for float64)."""
    rows = _tiles.matrix(x)
    if rows.shape[0] == 0 or rows.shape[1] == 0:
        return (torch.full((tiles,), float("nan"), dtype=_tiles.wide_dtype(x.dtype), device=x.device),)
    return (_welford(rows, tiles) if x.is_cuda else _two_passes(rows, tiles),)


def _welford(x: Tensor, tiles: int) -> Tensor:
    """Running means merged in a fixed order: elements that are all equal give 0, as each of them is their mean."""
    wide = x.to(_tiles.wide_dtype(x.dtype))
    result = torch.empty(tiles, dtype=wide.dtype, device=x.device)
    for run in _tiles.runs(x.shape[1], tiles):
        if x.shape[0] * run.size < 2:
            result[run.slice] = float("nan")  # torch.std warns of it
        else:
            result[run.slice] = run.of(wide).std((0, 2), correction=1)
    return result


def _two_passes(x: Tensor, tiles: int) -> Tensor:
    """Distances from an element of the tile, then from their mean.

    With s the sum of the n distances from a mean that was rounded, the squares are too large by s^2 / n: a correction
    that counts when that element lies far from all others. torch.std is scalar code on the CPU, ten times slower.
    """
    distance = torch.empty(x.shape, dtype=_tiles.wide_dtype(x.dtype), device=x.device)
    sizes = torch.empty(tiles, dtype=distance.dtype, device=x.device)
    for run in _tiles.runs(x.shape[1], tiles):
        part = run.of(x)
        torch.sub(part, part[:1, :, :1].to(distance.dtype), out=run.of(distance))
        sizes[run.slice] = x.shape[0] * run.size
    _subtract(distance, _sums.over_tiles(distance, tiles) / sizes)
    rest = _sums.over_tiles(distance, tiles)
    squares = _sums.over_tiles(distance.square_(), tiles)
    return squares.sub_(rest.square_() / sizes).clamp_(min=0).div_(sizes - 1).sqrt_()


def _subtract(values: Tensor, of_tiles: Tensor) -> None:
    for run in _tiles.runs(values.shape[1], of_tiles.shape[0]):
        run.of(values).sub_(run.numbers(of_tiles.unsqueeze(1)))
