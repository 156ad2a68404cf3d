"""The block table and the collapsing of strides, for which no GPU is needed."""

import pytest
import torch

pytest.importorskip("triton")

from triptych_triton.rows import as_rows, collapsed_stride
from triptych_triton.tiles import backward_walk, forward_tile

LENGTHS = (1, 2, 3, 31, 64, 1000, 1024, 4097, 8192, 16384, 16385, 40000, 65536, 1_000_000)


@pytest.mark.parametrize("accumulator_bytes", [4, 8])
@pytest.mark.parametrize("n", LENGTHS)
def test_blocks_are_what_triton_can_hold(n: int, accumulator_bytes: int) -> None:
    for tile in (forward_tile(n, accumulator_bytes), backward_walk(n, accumulator_bytes)):
        for size in (tile.rows, tile.columns, tile.warps):
            assert size > 0
            assert size & (size - 1) == 0, f"{size} is not a power of two"
        assert tile.rows * tile.columns <= 2**20
        assert tile.warps <= 32
        assert tile.whole_row == (tile.columns >= n)
        assert tile.whole_row or tile.rows == 1


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((4, 8), (8, 1), 8),
        ((4, 8), (11, 1), 11),  # narrowed
        ((4, 8), (0, 1), 0),  # one row, expanded
        ((4, 8), (0, 0), None),  # the gradient of a sum
        ((8, 4), (1, 8), None),  # transposed
        ((8, 1), (8, 8), 8),  # the last stride is never stepped along
        ((2, 3, 8), (24, 8, 1), 8),
        ((2, 3, 8), (30, 10, 1), 10),
        ((2, 3, 8), (8, 16, 1), None),  # leading dimensions swapped
        ((2, 3, 8), (999, 8, 1), None),  # a gap between the slices
        ((2, 1, 8), (999, 5, 1), 999),
        ((1, 1, 8), (7, 3, 1), 8),
        ((8,), (1,), 8),
        ((2, 3, 8), (0, 0, 1), 0),
        ((2, 3, 8), (0, 8, 1), None),  # a slice expanded
    ],
)
def test_collapsed_stride(shape: tuple[int, ...], strides: tuple[int, ...], expected: int | None) -> None:
    assert collapsed_stride(shape, strides) == expected


def test_a_copy_is_made_only_where_rows_cannot_be_walked() -> None:
    base = torch.randn(6, 10)
    narrowed, stride = as_rows(base[:, 2:7])
    assert (narrowed.data_ptr(), stride) == (base[:, 2:7].data_ptr(), 10)
    copied, stride = as_rows(base.t())
    assert torch.equal(copied, base.t())
    assert (copied.is_contiguous(), stride) == (True, 6)
