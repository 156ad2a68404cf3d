"""What a part of input_range_update does where the rows of the batch are split: statistics are those of all rows.

Each part computes its own, per tile, and a few numbers a tile are exchanged in each training forward: element count,
mean and squared deviation, merged as Chan, Golub and LeVeque do; or the two extremes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from triptych.ops._norm_bounds import statistics_dtype
from triptych.sharding.rule import ROWS, Asking, Calls, Exchange, Local, Part, Stacked
from triptych.tiling import tile_sizes, tile_slices

Tensor = torch.Tensor
ByDeviation = Callable[[Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor]]
"""The update of ranges and counts by the deviations of a batch, in their dtype: (std, input_range, count, ...)."""


def forward(by_deviation: ByDeviation) -> Local:
    """What a part does, with the op's own update of ranges."""

    def local(calls: Calls, part: Part, args: tuple[Any, ...]) -> Exchange:
        x, input_range, count, _, _, tiles, mode, init_from_data, init_std_alpha, _ = args
        if not part.splits(ROWS):
            return calls.phase(*args)
        if mode == "extremes":
            both = yield from _extremes(x, tiles)
            return calls.phase(both, *args[1:])
        std = yield from _deviation(calls, x, tiles)
        after, counts = by_deviation(std, input_range, count, init_from_data, init_std_alpha)
        return after.to(input_range.dtype).contiguous(), counts, std.new_empty(0), std.new_empty(0)

    return local


def _deviation(calls: Calls, x: Tensor, tiles: int) -> Asking:
    """[T], the standard deviation of each tile over the rows of all parts, in the dtype of the statistics.

    Infinite where the sum of squares is beyond that dtype, as it is when one process computes it. Means are taken as
    distances from an element, so that elements that are all equal give exactly 0.
    """
    wide = statistics_dtype(x.dtype)
    own = calls.op("tile_std", x, tiles).double()
    columns = tile_slices(x.shape[-1], tiles)
    numbers, means = [], []
    for each in columns:
        values = x[..., each].to(wide).reshape(-1)
        numbers.append(values.numel())
        first = values[0] if values.numel() else values.new_zeros(())
        means.append((first + (values - first).mean() if values.numel() else first).double())
    number = torch.tensor(numbers, dtype=torch.float64, device=x.device)
    squares = torch.where(number < 2, torch.zeros_like(own), own.square() * (number - 1))
    stacked = yield Stacked(torch.stack([number, torch.stack(means), squares]), (ROWS,))
    n, mean, m2 = stacked.unbind(1)
    total = n.sum(0)
    first_part = (n > 0).to(torch.int8).argmax(0, keepdim=True)  # the first that has any
    shift = torch.where(n > 0, mean - mean.gather(0, first_part), torch.zeros_like(mean))
    center = (n * shift).sum(0) / total
    merged = m2.sum(0) + torch.where(n > 0, n * (shift - center).square(), torch.zeros_like(n)).sum(0)
    std = (merged / (total - 1)).sqrt()
    std = torch.where(merged > torch.finfo(wide).max, float("inf"), std)
    return torch.where(total < 2, float("nan"), std).to(wide)


def _extremes(x: Tensor, tiles: int) -> Asking:
    """[2, N]: a batch of two rows with the smallest element of each tile over all parts, and the largest."""
    low, high = [], []
    for columns in tile_slices(x.shape[-1], tiles):
        values = x[..., columns].reshape(-1)
        empty = values.new_full((), float("inf")), values.new_full((), float("-inf"))
        least, most = torch.aminmax(values) if values.numel() else empty
        low.append(least)
        high.append(most)
    stacked = yield Stacked(torch.stack([torch.stack(low), torch.stack(high)]), (ROWS,))
    sizes = torch.tensor(tile_sizes(x.shape[-1], tiles), device=x.device)
    both = torch.stack([stacked[:, 0].amin(0), stacked[:, 1].amax(0)])  # NaN propagates into both
    rows = both.repeat_interleave(sizes, dim=1, output_size=x.shape[-1])
    # Without a row anywhere there are no extremes, and infinite ones do not count either.
    return rows
