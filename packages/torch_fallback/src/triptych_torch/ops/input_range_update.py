"""input_range_update in PyTorch operations; what is done is decided on the device, so that nothing waits for it.

Shapes: N = columns, T = tiles; x [..., N]; input_range, count, x_min, x_max [T].
"""

from __future__ import annotations

import torch

from triptych_torch.ops import _tiles, tile_std

Tensor = torch.Tensor
Update = tuple[Tensor, Tensor, Tensor, Tensor]


def forward(
    x: Tensor,
    input_range: Tensor,
    count: Tensor,
    x_min: Tensor | None,
    x_max: Tensor | None,
    tiles: int,
    mode: str,
    init_from_data: int,
    init_std_alpha: float,
    act_range_momentum: float,
) -> Update:
    """range, count, x_min and x_max after this batch; fresh tensors also where nothing changed."""
    if x_min is None or x_max is None:
        return _by_std(x, input_range, count, tiles, init_from_data, init_std_alpha)
    return _by_extremes(x, input_range, count, x_min, x_max, init_from_data, act_range_momentum)


def _by_std(x: Tensor, input_range: Tensor, count: Tensor, tiles: int, init_from_data: int, alpha: float) -> Update:
    (std,) = tile_std.forward(x, tiles)
    before = input_range.to(std.dtype)
    calibrating = count < init_from_data
    # NaN is neither; a deviation that overflowed would make the range infinite for good.
    counted = (std > 0).logical_and_(std < float("inf")).logical_and_(calibrating)
    new_count = count + counted
    mean = (before * count).add_(std, alpha=alpha).div_(count + 1)
    new = torch.where(counted, mean, before).abs_().clamp_(max=torch.finfo(input_range.dtype).max)
    after = torch.where(calibrating, new, before)
    return after.to(input_range.dtype), new_count, std.new_empty(0), std.new_empty(0)


def _by_extremes(
    x: Tensor, input_range: Tensor, count: Tensor, x_min: Tensor, x_max: Tensor, init_from_data: int, momentum: float
) -> Update:
    low, high = _extremes(x, x_min.shape[0])
    # NaN and infinities show in an extreme; so do tiles without elements, which have NaN for one.
    counted = (low.isfinite() & high.isfinite()).logical_and_(count < init_from_data)
    if momentum == -1:
        merged = torch.minimum(x_min, low), torch.maximum(x_max, high)
    else:
        share = 1 - momentum
        merged = x_min * momentum + low * share, x_max * momentum + high * share
    new_min, new_max = (
        torch.where(counted, torch.where(count == 0, seen, after), before)
        for seen, after, before in zip((low, high), merged, (x_min, x_max), strict=True)
    )
    new = torch.maximum(new_min.abs(), new_max.abs()).clamp_(max=torch.finfo(input_range.dtype).max)
    after = torch.where(counted, new, input_range.to(low.dtype))
    return after.to(input_range.dtype), count + counted, new_min, new_max


def _extremes(x: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """The smallest and the largest element of each tile; NaN where there is a NaN or no element."""
    low, high = (
        torch.full((tiles,), float("nan"), dtype=_tiles.wide_dtype(x.dtype), device=x.device) for _ in range(2)
    )
    if x.numel():
        rows = _tiles.matrix(x)
        for run in _tiles.runs(x.shape[-1], tiles):
            part = run.of(rows)
            low[run.slice] = part.amin((0, 2))
            high[run.slice] = part.amax((0, 2))
    return low, high
