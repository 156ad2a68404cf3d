"""The noise of the analog layers: Philox bit for bit, normals that are normal, places that decide alone.

The statistics are of fixed seeds, so that they hold always or never. Each limit is derived from the confidence that is
stated with it: a generator without fault exceeds it with that probability.
"""

from __future__ import annotations

import math

import pytest
import torch

from triptych import noise

CONFIDENT = 5.0
"""Limits are this many standard deviations: 6e-7 for a normal variable, on both sides."""

SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0)


def drawn(
    seed: int,
    stream: int = 0,
    rows: int = 64,
    columns: int = 64,
    dtype: torch.dtype = torch.float32,
    row_start: int = 0,
) -> torch.Tensor:
    return noise.normal(torch.tensor([seed]), stream, rows, columns, dtype, row_start)


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


# --- Philox ---------------------------------------------------------------------------------------------------------

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = words(*counter)
    k0, k1 = words(*key)
    assert tuple(int(word) for word in noise.philox((c0, c1, c2, c3), (k0, k1))) == expected


def python_philox(counter: list[int], key: list[int]) -> list[int]:
    """The same in Python's own integers, word by word as the paper has it."""
    for _ in range(10):
        p0, p1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(p1 >> 32) ^ counter[1] ^ key[0], p1 & ONES, (p0 >> 32) ^ counter[3] ^ key[1], p0 & ONES]
        key = [(key[0] + 0x9E3779B9) & ONES, (key[1] + 0xBB67AE85) & ONES]
    return counter


@pytest.mark.parametrize("seed", SEEDS)
def test_a_normal_belongs_to_its_seed_stream_row_and_column(seed: int) -> None:
    """Element by element from the specification: counter, key, lanes, the two uniform numbers, Box-Muller."""
    stream, start = 7, 2**33 + 2**32 - 2  # rows on both sides of a carry into the third word
    found = drawn(seed, stream, 4, 11, torch.float64, start)
    for i in range(4):
        for column in range(11):
            row = start + i
            unsigned = seed % 2**64
            r = python_philox([column >> 2, row & ONES, row >> 32, stream], [unsigned & ONES, unsigned >> 32])
            ra, rb = (r[0], r[1]) if column & 3 < 2 else (r[2], r[3])
            radius = math.sqrt(-2 * math.log(((ra >> 8) + 1) / 2**24))
            turn = 2 * math.pi * (rb >> 8) / 2**24
            expected = radius * (math.cos(turn) if column % 2 == 0 else math.sin(turn))
            assert found[i, column].item() == pytest.approx(expected, rel=1e-13, abs=1e-15), (row, column)


# --- places decide alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_of_rows_and_fewer_columns_are_cut_from_the_same_numbers(dtype: torch.dtype) -> None:
    whole = drawn(5, 3, 50, 37, dtype)
    for start, rows, columns in ((0, 50, 37), (0, 1, 37), (13, 20, 37), (49, 1, 2), (7, 9, 4), (7, 9, 5), (3, 2, 1)):
        block = drawn(5, 3, rows, columns, dtype, start)
        assert torch.equal(block, whole[start : start + rows, :columns]), (start, rows, columns)
        assert block.is_contiguous()
        assert block.dtype is dtype


def test_the_same_call_gives_the_same_bits_with_any_number_of_threads() -> None:
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found += [drawn(11, 2, 301, 203), drawn(11, 2, 301, 203)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], each) for each in found)


def test_other_seeds_and_streams_give_other_numbers() -> None:
    """Also seeds that differ in the upper half alone, and rows that differ beyond 2^32."""
    several = [drawn(seed) for seed in SEEDS] + [drawn(2**32), drawn(2**40)]
    several += [drawn(1, stream) for stream in (1, 2, 2**31, 2**32 - 1)] + [drawn(1, row_start=2**32)]
    for i, one in enumerate(several):
        for other in several[:i]:
            assert int((one == other).sum()) < 4  # of 4096: two of 2^24 radii and angles may coincide
            correlation = (one.double() * other.double()).mean().item()
            assert abs(correlation) < CONFIDENT / math.sqrt(one.numel())


def test_nothing_is_drawn_for_no_rows_and_no_columns() -> None:
    assert drawn(0, rows=0, columns=5).shape == (0, 5)
    assert drawn(0, rows=5, columns=0).shape == (5, 0)


def test_the_seed_is_not_read_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meta tensor has no value to read; a host that asks for one raises."""
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    with pytest.raises(RuntimeError):
        seed.item()
    assert noise.normal(seed, 1, 3, 5, torch.float32).device.type == "meta"


# --- they are normal --------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 2048, 512
COUNT = ROWS * COLUMNS


@pytest.fixture(scope="module", params=[(0, 0), (12345, 3)], ids=["seed_0", "seed_12345"])
def many(request: pytest.FixtureRequest) -> torch.Tensor:
    return drawn(request.param[0], request.param[1], ROWS, COLUMNS, torch.float64)


def test_mean_variance_skewness_and_kurtosis(many: torch.Tensor) -> None:
    """The variance of the mean of z^k is (E z^2k - (E z^k)^2) / n: 1, 2, 15 and 96 for k = 1 to 4."""
    for power, expected, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        error = many.pow(power).mean().item() - expected
        assert abs(error) < CONFIDENT * math.sqrt(variance / COUNT), power


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 8, 64])
def test_neighbours_are_uncorrelated(many: torch.Tensor, lag: int) -> None:
    """Along rows and along columns, in value and in magnitude: the two of a pair share their radius."""
    magnitude = many.square() - 1  # of variance 2
    for one, other in ((many[:, lag:], many[:, :-lag]), (many[lag:], many[:-lag])):
        assert abs((one * other).mean().item()) < CONFIDENT / math.sqrt(one.numel())
    for one, other in ((magnitude[:, lag:], magnitude[:, :-lag]), (magnitude[lag:], magnitude[:-lag])):
        assert abs((one * other).mean().item()) < CONFIDENT * 2 / math.sqrt(one.numel())


def test_lanes_are_alike_and_the_distribution_is_normal(many: torch.Tensor) -> None:
    """Kolmogorov and Smirnov: sup |F_n - F| > c / sqrt(n) with probability below 2 exp(-2 c^2) (Massart): 2e-8."""
    limit = 3.04
    for part in (many, *(many[:, lane::4] for lane in range(4))):
        ordered = part.reshape(-1).sort().values
        normal = torch.special.ndtr(ordered)
        steps = torch.arange(ordered.numel() + 1, dtype=torch.float64) / ordered.numel()
        distance = torch.maximum((steps[1:] - normal).max(), (normal - steps[:-1]).max()).item()
        assert distance < limit / math.sqrt(ordered.numel())


def test_the_tail_is_there_and_ends_where_it_must(many: torch.Tensor) -> None:
    """Beyond 4 lie 6.33e-5 of all: 66 of a million, give or take a Poisson variable's 5 standard deviations."""
    expected = COUNT * 2 * torch.special.ndtr(torch.tensor(-4.0, dtype=torch.float64)).item()
    found = int((many.abs() > 4).sum())
    assert abs(found - expected) < CONFIDENT * math.sqrt(expected)
    assert many.abs().max().item() <= noise.LARGEST


# --- float32 against float64 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_float32_lies_within_the_bound_of_float64(seed: int) -> None:
    single, double = drawn(seed, 1, 512, 259), drawn(seed, 1, 512, 259, torch.float64)
    bound = noise.normal_bound(torch.tensor([seed]), 1, 512, 259, torch.float32)
    assert bound.dtype is torch.float64
    assert bool(((single.double() - double).abs() <= bound).all())
    assert bound.max().item() <= noise.LARGEST * 2**-24 * 21
    blunt = double * (1 + 2**-18)  # six of the 24 bits lost, as a fast logarithm does
    assert not bool(((blunt - double).abs() <= bound).all())
