"""Counter-based noise: which normal number belongs to which element. The one specification, for every backend.

A normal number is a function of a seed, a stream and the place (row, column) of its element, and of nothing else: not
of the shape it is drawn for, nor of the block, program or thread that draws it. The same seed thus gives the same noise
on every backend, and backward can draw it again instead of storing it.

    counter = (column >> 2, row mod 2^32, row >> 32, stream)
    key     = (seed mod 2^32, seed >> 32)                         the seed taken as 64 bits without a sign
    r0, r1, r2, r3 = philox4x32-10(counter, key)                  Salmon, Moraes, Dror, Shaw: Parallel Random Numbers:
                                                                  As Easy as 1, 2, 3 (2011)
    ra, rb = (r0, r1) for column & 3 in {0, 1}, (r2, r3) for {2, 3}
    u = ((ra >> 8) + 1) * 2^-24   in (0, 1]                       both exact in float32
    v = (rb >> 8) * 2^-24         in [0, 1)
    radius = sqrt(-2 ln u)                                        at most sqrt(2 * 24 * ln 2) = 5.77
    normal = radius * cos(2 pi v) for an even column, radius * sin(2 pi v) for an odd one          (Box and Muller)

A round of Philox takes (c0, c1, c2, c3) to (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)), with hi
and lo the two halves of a product of 64 bits, M0 = 0xD2511F53 and M1 = 0xCD9E8D57. Before every round but the first,
(0x9E3779B9, 0xBB67AE85) is added to the key.

Streams: 0 is the noise of weights, with row = output channel and column = input of the whole matrix; 1 + s is the
output noise of tile s, with row = flattened row of the input and column = output channel.

The integers are the same bit for bit everywhere. The normals, computed in float32, differ by the rounding of log, sqrt,
cos and sin: `normal_bound` says how far they may lie from `normal` in float64, which is the oracle.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor
Words = tuple[Tensor, Tensor, Tensor, Tensor]

WEIGHT_STREAM = 0
"""The stream of weight noise."""

LARGEST = math.sqrt(48 * math.log(2))
"""No normal is larger than this: the radius of the smallest u, 2^-24."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LANES = 4


def output_stream(tile: int) -> int:
    """The stream of the output noise of a tile."""
    return 1 + tile


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox 4x32-10: four random words for each counter.

    Args:
        counter, key: int64 tensors that broadcast against each other and hold values of 32 bits, 0 to 2^32 - 1.

    Returns:
        Four int64 tensors of values of 32 bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(_ROUNDS):
        if number:
            k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
        # An int64 product keeps the low 64 bits of the exact one: these are all of them, whatever its sign says.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
    return c0, c1, c2, c3


def normal(seed: Tensor, stream: int, rows: int, columns: int, dtype: torch.dtype, row_start: int = 0) -> Tensor:
    """Normal numbers for the elements of `rows` rows, in plain PyTorch, four columns to each call of Philox.

    Args:
        seed: int64 [1]; stays on its device, unread by the host.
        stream: 0 to 2^32 - 1; see above.
        rows, columns: how many of each.
        dtype: that of the computation and of the result: float32 or float64.
        row_start: the first row: rows drawn in blocks are those drawn at once.

    Returns:
        [rows, columns] in `dtype`, contiguous, on the seed's device.
    """
    u, v = _uniform(seed, stream, rows, columns, dtype, row_start)
    radius, angle = _radius(u), v * (2 * math.pi)
    lanes = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)
    return _cut(lanes, rows, columns)


def normal_bound(seed: Tensor, stream: int, rows: int, columns: int, dtype: torch.dtype, row_start: int = 0) -> Tensor:
    """How far a normal computed in `dtype` may lie from the one computed in float64: [rows, columns], float64.

    With w the unit roundoff of `dtype` (2^-24 for float32), relative to the radius:

    - 4 w of the radius: log right to 2 units in the last place is 4 w, of which the root keeps half; one rounding of
      the root, one of the product with cos or sin;
    - 4 pi w of the angle, 2 pi v < 2 pi: one rounding of the constant, one of the product, each 2 pi w at most, and
      neither cos nor sin changes faster than its argument;
    - 4 w of cos and sin, right to 2 units in the last place.

    Every library of float32 functions that is not a "fast" one keeps 2 units. Arguments as of `normal`.
    """
    u, _ = _uniform(seed, stream, rows, columns, torch.float64, row_start)
    roundoff = torch.finfo(dtype).eps / 2
    bound = _radius(u) * (roundoff * (8 + 4 * math.pi))
    return _cut(torch.stack((bound, bound), dim=-1), rows, columns)


def _uniform(
    seed: Tensor, stream: int, rows: int, columns: int, dtype: torch.dtype, row_start: int
) -> tuple[Tensor, Tensor]:
    """u and v, [rows, groups of four columns, 2]: one of each for a pair of columns."""
    device = seed.device
    group = torch.arange(-(-columns // _LANES), dtype=torch.int64, device=device)
    row = torch.arange(row_start, row_start + rows, dtype=torch.int64, device=device).unsqueeze(-1)
    counter = (group, row & _MASK, row >> 32, torch.full((1,), stream, dtype=torch.int64, device=device))
    r0, r1, r2, r3 = philox(counter, (seed & _MASK, (seed >> 32) & _MASK))
    scale = 2.0**-24
    u = ((torch.stack((r0, r2), dim=-1) >> 8) + 1).to(dtype) * scale
    v = (torch.stack((r1, r3), dim=-1) >> 8).to(dtype) * scale
    return u, v


def _radius(u: Tensor) -> Tensor:
    return torch.sqrt(-2 * torch.log(u))


def _cut(lanes: Tensor, rows: int, columns: int) -> Tensor:
    """From [rows, groups, 2, 2] to [rows, columns]: the last group may have more than are wanted."""
    return lanes.reshape(rows, _LANES * lanes.shape[1])[:, :columns].contiguous()
