"""What a part of analog_linear does beside the op itself.

Inputs split (row-parallel): tiles are split with them. The bias is added by the first part only, and output noise,
which the op divides by the root of its number of tiles, is scaled from this part's number to that of all.

Channels split (column-parallel): a range of noise or ADC that is relative to the largest weight of a tile takes the
largest of all channels: one exchange of [T] numbers.

The gradient of a learned range is not linear in that of the inputs. Where channels are split, that is summed over them
first, which the next layer down would have asked for anyway. Where rows are split, the decay, which is decided on the
share of all rows, is added once, by counts of [T] that are exchanged.
"""

from __future__ import annotations

from typing import Any

import torch

from triptych.errors import ArgumentError
from triptych.ops import _analog_product as product
from triptych.ops._analog_product import Settings
from triptych.ops._norm_bounds import statistics_dtype
from triptych.sharding.analog_weight import largest_of_channels
from triptych.sharding.rule import ROWS, Asking, Calls, Exchange, Part, Summed, Whole
from triptych.tiling import tile_slices

Tensor = torch.Tensor


def forward(calls: Calls, part: Part, args: tuple[Any, ...]) -> Exchange:
    """y, partial where inputs are split, and clipped."""
    x, weight, bias, input_range, wmax, seed = args[:6]
    settings = Settings(*args[6:])
    relative = _relative(settings)
    if part.splits("c") and wmax is not None and relative and not all(relative.values()):
        if any(relative.values()):
            raise ArgumentError(
                f"analog_linear: the channels are sharded, and out_noise and out_bound are relative to different "
                f"maxima: {', '.join(f'{name} is {value}' for name, value in relative.items())}. Give both the same "
                f"value, or shard the inputs instead (RowwiseParallel, Shard(1))."
            )
        largest = yield from largest_of_channels(wmax)
        wmax = largest.unsqueeze(1).expand(wmax.shape).contiguous()
    if part.splits("n"):
        bias = bias if part.place("n") == 0 else None
    if part.splits("n") and not part.all_tiles:  # the plain product: its tiles are none
        wmax, settings = None, settings._replace(tiles=1)
    elif part.splits("n"):
        settings = settings._replace(out_noise=settings.out_noise * (settings.tiles / part.all_tiles) ** 0.5)
    return calls.phase(x, weight, bias, input_range, wmax, seed, *settings)


def is_plain(*scalars: Any) -> bool:
    """Whether the call is a plain product, without converters and noise, which tiles have no part in."""
    return Settings(*scalars[: len(Settings._fields)]).input_range_mode == "none"


def _relative(settings: Settings) -> dict[str, bool]:
    """Of noise and ADC, those that there are: whether they are relative to the maximum of each channel."""
    found = {}
    if settings.out_noise > 0:
        found["out_noise_per_channel"] = settings.out_noise_per_channel
    if settings.out_bound > 0:
        found["out_bound_per_channel"] = settings.out_bound_per_channel
    return found


def backward(calls: Calls, part: Part, args: tuple[Any, ...]) -> Exchange:
    """The gradients."""
    dy, x, weight, bias, input_range, clipped = args[:6]
    settings, (need_dx, need_dweight, need_dbias, need_drange) = Settings(*args[6:-4]), args[-4:]
    if part.splits("n") and not part.all_tiles:
        return calls.phase(*args[:6], *settings._replace(tiles=1), *args[-4:])
    if settings.input_range_mode != "learned" or not need_drange or not part.splits("c", ROWS):
        return calls.phase(*args)
    decay = yield from _decay(part, x, input_range, settings)
    still = settings._replace(decay=0.0)
    if not part.splits("c"):
        *others, drange = calls.phase(*args[:6], *still, *args[-4:])
        return (*others, (drange + decay).to(drange.dtype))
    _, dweight, dbias, _ = calls.phase(*args[:6], *still, False, need_dweight, need_dbias, False)
    # A dynamic range lets the whole gradient of the inputs through, of which the learned one's is made.
    dynamic = still._replace(input_range_mode="dynamic")
    dx, *_ = calls.phase(dy, x, weight, bias, None, clipped, *dynamic, True, False, False, False)
    dx = yield Summed(dx, ("c",))
    drange = torch.zeros(settings.tiles, dtype=statistics_dtype(x.dtype), device=x.device)
    bounds, rows, gradients = input_range.to(drange.dtype), product.matrix(x).to(drange.dtype), product.matrix(dx)
    outside = torch.zeros_like(rows, dtype=torch.bool)
    for tile, columns in enumerate(tile_slices(rows.shape[1], settings.tiles)):
        gx = gradients[:, columns].to(drange.dtype)
        drange[tile] = product.range_gradient(gx, rows[:, columns], bounds[tile], still)
        outside[:, columns] = product.outside(rows[:, columns], bounds[tile])
    dx = torch.where(outside.view(dx.shape), 0, dx) if need_dx else dx.new_empty(0)
    return Whole(dx, ("c",)), dweight, dbias, Whole((drange + decay).to(input_range.dtype), ("c",))


def _decay(part: Part, x: Tensor, input_range: Tensor, settings: Settings) -> Asking:
    """[T]: what the decay adds to the gradient of the range, on the first of the parts of the rows; 0 on the others."""
    wide = statistics_dtype(x.dtype)
    bounds, rows = input_range.to(wide), product.matrix(x).to(wide)
    if settings.decay <= 0:
        return torch.zeros_like(bounds)
    parts = list(zip(tile_slices(rows.shape[1], settings.tiles), bounds, strict=True))
    beyond = [((rows[:, columns] >= bound) | (rows[:, columns] <= -bound)).sum() for columns, bound in parts]
    sizes = [
        torch.full_like(count, rows[:, columns].numel()) for count, (columns, _) in zip(beyond, parts, strict=True)
    ]
    counts = yield Summed(torch.stack([torch.stack(beyond), torch.stack(sizes)]), (ROWS,))
    inside, all_of_them = counts[1] - counts[0], counts[1]
    shrinks = (inside.double() > settings.input_min_percentage * all_of_them) & (all_of_them > 0)
    mine = part.place(ROWS) == 0
    return bounds * settings.decay * shrinks * mine
