"""The output side of analog_linear: noise and the ADC of one tile, and which outputs the ADC clipped, in bits.

Shapes: R rows, C channels, T tiles, B = ceil(C / 8); y [R, C]; wmax [T, C]; ranges [T, 1] or [T, R];
scale, bound [1 or R, 1 or C]; bytes of clipped [R, B].
"""

from __future__ import annotations

import sys

import torch

from triptych_torch.ops import _philox, _quantizer

Tensor = torch.Tensor

_PACK = {"little": 0x0102040810204080, "big": 0x8040201008040201 - (1 << 64)}[sys.byteorder]
"""Times eight bytes of 0 or 1, seen as one number: puts the first byte into bit 56, the eighth into bit 63."""


def scales(ranges: Tensor, factor: float, wmax: Tensor, per_channel: bool) -> tuple[Tensor, ...]:
    """For each tile (IR * factor) * wmax, with its channels' maxima or the largest of them."""
    maxima = wmax if per_channel else wmax.amax(1, keepdim=True)
    return tuple(
        (bound * factor).unsqueeze(1) * largest.unsqueeze(0) for bound, largest in zip(ranges, maxima, strict=True)
    )


def add_noise_(y: Tensor, scale: Tensor, seed: Tensor, tile: int) -> None:
    """In place, normal numbers of the tile's own stream."""
    rows, channels = y.shape
    scale = scale.expand(rows, channels)
    for first, count in _philox.blocks(rows, channels, y.device):
        drawn = _philox.normal(seed, 1 + tile, first, count, channels, y.dtype)
        y.narrow(0, first, count).addcmul_(drawn, scale.narrow(0, first, count))


def convert_(y: Tensor, bound: Tensor, res: float, clipped: Tensor) -> None:
    """In place, what the ADC makes of y; and into `clipped` where it clipped.

    With a resolution that is decided on the level: the last level is the bound, and no rounding may put it beyond.
    """
    if res <= 0:
        _pack(y.abs() > bound, clipped)
        y.clamp_(-bound, bound)
        return
    step, limit = _quantizer.step_of(bound, res), _quantizer.levels(res) / 2
    y.div_(_quantizer.safe(step)).round_()
    _pack(y.abs() > limit, clipped)
    y.clamp_(-limit, limit).mul_(step)


def _pack(bits: Tensor, into: Tensor) -> None:
    """Eight columns to a byte, the first one lowest."""
    if bits.shape[1] % 8:
        bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8))
    into.copy_((bits.view(torch.int64) * _PACK) >> 56)


def masked(gradient: Tensor, clipped: Tensor) -> Tensor:
    """`gradient` [R, C] with 0 where the ADC clipped."""
    rows, channels = gradient.shape
    places = torch.arange(8, dtype=torch.uint8, device=clipped.device)
    bits = (clipped.unsqueeze(-1) >> places).bitwise_and_(1).reshape(rows, 8 * clipped.shape[1])[:, :channels]
    return torch.where(bits != 0, 0, gradient)
