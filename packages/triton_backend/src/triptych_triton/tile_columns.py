# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803 (compile-time constants of kernels are in capitals)
"""Tiles of columns: where they begin, how many columns they have, and how programs are laid over them.

    N columns in T tiles: base, extra = divmod(N, T)
    tile s begins at s * base + min(s, extra) and has base + (s < extra) columns

N and T belong to a layer, so kernels may specialise base and extra. EVEN says that extra is 0: then the compiler sees
that tiles begin where `base` is a multiple of, and loads stay wide.
"""

from dataclasses import dataclass
from functools import cache

import triton
import triton.language as tl

from triptych_triton.rounding import INTERPRETED
from triptych_triton.tiles import ceil_div


@dataclass(frozen=True, slots=True)
class Split:
    """N columns in T tiles.

    Attributes:
        tiles: T.
        base, extra: divmod(N, T).
        longest: columns of the longest tile.
    """

    tiles: int
    base: int
    extra: int

    @property
    def even(self) -> bool:
        return self.extra == 0

    @property
    def longest(self) -> int:
        return self.base + (self.extra > 0)

    def columns(self, tile: int) -> slice:
        """The columns of a tile."""
        start = tile * self.base + min(tile, self.extra)
        return slice(start, start + self.base + (tile < self.extra))


@cache
def split(n: int, tiles: int) -> Split:
    """`n` columns in `tiles` tiles."""
    return Split(tiles, *divmod(n, tiles))


@dataclass(frozen=True, slots=True)
class Block:
    """What one program holds at a time: `rows` by `columns` elements of one tile, both powers of two."""

    rows: int
    columns: int

    def column_blocks(self, columns: int) -> int:
        return ceil_div(columns, self.columns)

    def row_blocks(self, rows: int) -> int:
        return ceil_div(rows, self.rows)


@cache
def block_of(longest: int, elements: int, most_columns: int = 1024, fewest_columns: int = 1) -> Block:
    """A block of about `elements` elements for tiles of up to `longest` columns; the interpreter's are larger."""
    columns = max(min(triton.next_power_of_2(max(longest, 1)), most_columns), fewest_columns)
    if INTERPRETED:  # a block costs the same whatever its size
        return Block(max(1, min(256, 4 * elements // columns)), columns)
    return Block(max(1, min(64, elements // columns)), columns)


@triton.jit
def tile_start(tile, base, extra, EVEN: tl.constexpr):
    """The first column of `tile`."""
    if EVEN:
        return tile * base
    else:
        return tile * base + tl.minimum(tile, extra)


@triton.jit
def tile_size(tile, base, extra, EVEN: tl.constexpr):
    """The number of columns of `tile`."""
    if EVEN:
        return base + tile * 0
    else:
        return base + (tile < extra).to(tl.int32)
