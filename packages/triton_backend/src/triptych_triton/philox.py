# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803, SIM300 (compile-time constants of kernels are in capitals)
"""Normal numbers by place: Philox 4x32-10 and Box-Muller, as triptych.noise specifies them.

One call of Philox gives the numbers of four neighbouring columns, and all four are used.
"""

import triton
import triton.language as tl

_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_KEY_STEP_0 = tl.constexpr(0x9E3779B9)
_KEY_STEP_1 = tl.constexpr(0xBB67AE85)


@triton.jit
def load_key(seed):
    """The two words of the key, as blocks of one, from a pointer to an int64 seed."""
    value = tl.load(seed + tl.arange(0, 1)).to(tl.uint64, bitcast=True)
    return value.to(tl.uint32), (value >> 32).to(tl.uint32)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four random words for each counter; all are uint32 blocks that broadcast against each other."""
    for _ in tl.static_range(10):
        # A product of 64 bits is one instruction; its halves by mul.hi and mul.lo are two.
        p0 = c0.to(tl.uint64) * _MULTIPLIER_0
        p1 = c2.to(tl.uint64) * _MULTIPLIER_1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = tl.add(k0, _KEY_STEP_0, sanitize_overflow=False)
        k1 = tl.add(k1, _KEY_STEP_1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def normals(k0, k1, stream, row, first, COLUMNS: tl.constexpr, ACC: tl.constexpr):
    """[rows, COLUMNS] normal numbers of the columns from `first` on.

    `row` is an int64 block of rows; `first` a multiple of 4; `stream` an integer.
    """
    group = first // 4 + tl.arange(0, COLUMNS // 4)
    zero = tl.zeros([row.shape[0], COLUMNS // 4], dtype=tl.uint32)
    c0 = group.to(tl.uint32)[None, :] + zero
    c1 = row.to(tl.uint32)[:, None] + zero
    c2 = (row >> 32).to(tl.uint32)[:, None] + zero
    c3 = zero + tl.full([1], stream, tl.int32).to(tl.uint32)[:, None]
    r0, r1, r2, r3 = philox(c0, c1, c2, c3, k0[:, None], k1[:, None])
    n0, n1 = _box_muller(r0, r1, ACC)
    n2, n3 = _box_muller(r2, r3, ACC)
    return tl.interleave(tl.interleave(n0, n2), tl.interleave(n1, n3))


@triton.jit
def _box_muller(a, b, ACC: tl.constexpr):
    """Two normal numbers from two words."""
    u = ((a >> 8) + 1).to(tl.int32).to(ACC) * (2.0**-24)
    radius = tl.sqrt(-2.0 * tl.log(u))
    turn = (b >> 8).to(tl.int32)
    if ACC == tl.float64:
        angle = turn.to(ACC) * (2.0**-24 * 6.283185307179586)
        return radius * tl.cos(angle), radius * tl.sin(angle)
    else:
        cosine, sine = _of_turn(turn)
        return radius * cosine, radius * sine


@triton.jit
def _of_turn(turn):
    """cos and sin of 2 pi turn / 2^24, to 1.5 units of 2^-24 (all 2^24 arguments were tried).

    The quarter turn is taken off exactly, in integers. What is left is within an eighth of a turn, where the
    polynomials in x = angle / pi hold: those of N. Juffa for cospi and sinpi on -1/4 to 1/4.
    """
    quarter = (turn + (1 << 21)) >> 22
    x = (turn - (quarter << 22)).to(tl.float32) * (2.0**-23)
    xx = x * x
    cosine = xx * 0.231384277 - 1.33502197
    cosine = cosine * xx + 4.05870390
    cosine = cosine * xx - 4.93480206
    cosine = cosine * xx + 1.0
    sine = xx * -0.595703125 + 2.55039954
    sine = sine * xx - 5.16772413
    sine = x * xx * sine + x * 3.14159274
    swapped = (quarter & 1) != 0
    even = tl.where(swapped, sine, cosine)
    odd = tl.where(swapped, cosine, sine)
    return tl.where(((quarter + 1) & 2) != 0, -even, even), tl.where((quarter & 2) != 0, -odd, odd)
