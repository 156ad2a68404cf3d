"""Normal numbers from Philox 4x32-10 and Box-Muller, as `triptych.noise` specifies them, in few passes over memory.

A call of Philox makes four words, and those four adjacent columns: (radius, angle) of columns 0 and 1, of 2 and 3.
Words are int64 tensors of which the low 32 bits count: what a product leaves above them is cut off only where the word
is multiplied next. In the first two rounds they are rows or columns that broadcast, not matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from triptych_torch.ops import _tracing

Tensor = torch.Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LANES = 4

_ELEMENTS = {"cuda": 1 << 22, "cpu": 1 << 18}
"""How many elements to draw at once: temporaries take 16 bytes an element, 64 MiB on CUDA, where smaller ones would
wait for launches; on the CPU they stay in the cache."""


def blocks(rows: int, columns: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Blocks of rows, as (first, number), small enough to draw at once; a compiler that fuses gets all of them."""
    if _tracing.traced():
        yield 0, rows
        return
    step = max(1, _ELEMENTS.get(device.type, _ELEMENTS["cpu"]) // max(columns, 1))
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


def normal(seed: Tensor, stream: int, first_row: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns] in `dtype`, float32 or float64, for the rows from `first_row` on."""
    groups = -(-columns // _LANES)
    r0, r1, r2, r3 = _words(seed, stream, first_row, rows, groups)
    shape = (rows, groups, 2)
    radius = torch.empty(shape, dtype=dtype, device=seed.device)
    angle = torch.empty(shape, dtype=dtype, device=seed.device)
    for pair, (ra, rb) in enumerate(((r0, r1), (r2, r3))):
        radius[..., pair] = (ra.to(torch.int32) >> 8).bitwise_and_(0xFFFFFF).add_(1)
        # With a sign: a turn less from half a turn on, which is the same place, with an angle right to half as much.
        angle[..., pair] = rb.to(torch.int32) >> 8
    radius.mul_(2.0**-24).log_().mul_(-2).sqrt_()
    angle.mul_(2 * math.pi * 2.0**-24)
    lanes = torch.empty((*shape, 2), dtype=dtype, device=seed.device)
    torch.mul(torch.cos(angle), radius, out=lanes[..., 0])
    torch.mul(angle.sin_(), radius, out=lanes[..., 1])
    return lanes.view(rows, groups * _LANES)[:, :columns]


def _words(seed: Tensor, stream: int, first_row: int, rows: int, groups: int) -> tuple[Tensor, ...]:
    """Four words for each row and group of columns; of each the low 32 bits count."""
    device = seed.device
    row = torch.arange(first_row, first_row + rows, device=device).unsqueeze(1)
    c0, c1, c2 = torch.arange(groups, device=device), row & _MASK, row >> 32
    c3 = torch.full((1,), stream, dtype=torch.int64, device=device)
    keys = _keys(seed)
    for number in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1).bitwise_xor_(keys[0, number]).bitwise_and_(_MASK)
        c2 = ((p0 >> 32) ^ c3).bitwise_xor_(keys[1, number]).bitwise_and_(_MASK)
        c1, c3 = p1, p0
    return c0, c1, c2, c3


def _keys(seed: Tensor) -> Tensor:
    """Both halves of the key in every round: [2, rounds]."""
    rounds = torch.arange(_ROUNDS, device=seed.device)
    return torch.stack((rounds * _KEY_STEPS[0] + seed, rounds * _KEY_STEPS[1] + (seed >> 32))) & _MASK
