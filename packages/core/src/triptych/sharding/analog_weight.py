"""What a part of analog_weight does where its output channels are split.

The maximum m of a tile is that over all channels, also those of other parts: one exchange of [T] numbers. The op takes
maxima as a learned clip, with one difference: without quantisation a clip clamps. So weights are quantised with m in
the place of the clip, and noise that is relative to m is drawn on weights of zero, and added.
"""

from __future__ import annotations

from typing import Any

import torch

from triptych.sharding.rule import Asking, Calls, Exchange, Part, Stacked


def forward(calls: Calls, part: Part, args: tuple[Any, ...]) -> Exchange:
    """The modified weights and the maxima of the channels of this part."""
    weight, clip, seed, tiles, quantization, res, noise, std_dev = args
    if not part.splits("c") or "per_tensor" not in (quantization, noise):
        return calls.phase(*args)
    own = calls.op("tile_abs_max", weight, tiles) if clip is None else clip.to(_wide(weight))
    largest = yield from largest_of_channels(own)
    everywhere = largest.unsqueeze(1).expand(tiles, weight.shape[0]).contiguous()
    modified, wmax = weight, own
    if quantization == "per_tensor":  # there is no learned clip then
        modified, _ = calls.phase(weight, everywhere, None, tiles, "per_channel", res, "none", 0.0)
    elif quantization == "per_channel" or clip is not None:
        modified, wmax = calls.phase(weight, clip, None, tiles, quantization, res, "none", 0.0)
    if noise != "none":
        scale = everywhere if noise == "per_tensor" else own
        # In the dtype of the arithmetic, so that the sum is rounded once, as in the op.
        zeros = torch.zeros(weight.shape, dtype=_wide(weight), device=weight.device)
        drawn, _ = calls.phase(zeros, scale, seed, tiles, "none", 0.0, "per_channel", std_dev)
        modified = (modified + drawn).to(weight.dtype)
    return modified.clone() if modified is weight else modified, wmax


def backward(calls: Calls, part: Part, args: tuple[Any, ...]) -> Exchange:
    """dweight, and dclip, whose scale is by the number of all channels."""
    dweight, dclip = calls.phase(*args)
    weight = args[1]
    if part.splits("c") and dclip.numel():
        dclip = (dclip * (weight.shape[0] / part.sizes["c"]) ** 0.5).to(dclip.dtype)
    return dweight, dclip
    yield  # asks the other parts nothing


def largest_of_channels(maxima: torch.Tensor) -> Asking:
    """[T], the largest of [T, C] over the channels of all parts."""
    own = maxima.amax(1) if maxima.shape[1] else maxima.new_zeros(maxima.shape[0])
    stacked = yield Stacked(own, ("c",))
    return stacked.amax(0)


def _wide(weight: torch.Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype is torch.float64 else torch.float32
