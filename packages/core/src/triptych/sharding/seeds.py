"""The seed of each part's noise.

Noise is a function of a seed and of places counted within the call that draws it. Parts of one tensor count from 0
each, and with one seed would draw the same noise. So each folds its number into the seed; parts that hold the same
values (replicas) have the same number, and draw the same. Part 0 keeps the seed as it is.
"""

from __future__ import annotations

import torch

_ODD = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: no multiple of it by a small number looks like another one."""


def of_part(seed: torch.Tensor, place: int) -> torch.Tensor:
    """The seed of the part with this number; int64 [1], on the device that `seed` is on."""
    if place == 0:
        return seed
    folded = (place * _ODD) % 2**64
    return seed ^ (folded - 2**64 if folded >= 2**63 else folded)
