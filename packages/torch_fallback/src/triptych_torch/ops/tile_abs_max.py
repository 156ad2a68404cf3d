"""tile_abs_max in PyTorch operations.

Shapes: N = columns, T = tiles; x [..., N]; abs_max [T, ...].
"""

from __future__ import annotations

import torch

from triptych_torch.ops import _tiles

Tensor = torch.Tensor


def forward(x: Tensor, tiles: int) -> tuple[Tensor]:
    """The largest magnitude of each tile of each row, in float32 (float64 for float64); NaN where there is one."""
    result = torch.empty((tiles, *x.shape[:-1]), dtype=_tiles.wide_dtype(x.dtype), device=x.device)
    for run in _tiles.runs(x.shape[-1], tiles):
        result[run.slice] = _abs_max(run.of(x)).movedim(-1, 0)
    return (result,)


def _abs_max(values: Tensor) -> Tensor:
    """Over the last dimension; exact in any dtype."""
    if values.shape[-1] == 0 or values.numel() == 0:
        return values.new_zeros(values.shape[:-1])
    if values.is_cuda:  # one pass; on the CPU this reduction is not vectorised and takes ten times as long
        result: Tensor = torch.linalg.vector_norm(values, float("inf"), -1)
        return result
    return torch.maximum(values.amax(-1), values.amin(-1).neg_())
