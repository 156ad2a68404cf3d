"""How the input dimension of an analog layer is split into tiles: T of nearly equal size, the longer ones first.

    base, extra = divmod(N, T);   tile s has base + (s < extra) columns;   T = ceil(N / max_input_size)

Every bound is a whole number, computed here and nowhere else on the host.
"""

from __future__ import annotations

from triptych.errors import ArgumentError


def tiles_for(n: int, max_input_size: int) -> int:
    """How many tiles `n` columns need: ceil(n / max_input_size), at least 1; 1 where `max_input_size` is -1.

    Raises:
        ArgumentError: `max_input_size` is neither -1 nor positive.
    """
    if max_input_size == -1:
        return 1
    if max_input_size < 1:
        raise ArgumentError(
            f"max_input_size is {max_input_size}. It must be 1 or greater, or -1 for one tile of any size."
        )
    return max(-(-n // max_input_size), 1)


def tile_sizes(n: int, tiles: int) -> tuple[int, ...]:
    """The number of columns of each tile: (86, 86, 85) for 257 columns and 3 tiles. They add up to `n`."""
    base, extra = divmod(n, tiles)
    return tuple(base + (tile < extra) for tile in range(tiles))


def tile_starts(n: int, tiles: int) -> tuple[int, ...]:
    """The first column of each tile."""
    base, extra = divmod(n, tiles)
    return tuple(base * tile + min(tile, extra) for tile in range(tiles))


def tile_slices(n: int, tiles: int) -> tuple[slice, ...]:
    """The columns of each tile as a slice of the last dimension: `x[..., slice]`."""
    pairs = zip(tile_starts(n, tiles), tile_sizes(n, tiles), strict=True)
    return tuple(slice(start, start + size) for start, size in pairs)


def check_tiles(op: str, tiles: int, n: int) -> None:
    """Raise ArgumentError unless `n` columns can be split into `tiles` tiles, none of them empty unless `n` is 0."""
    if not 1 <= tiles <= max(n, 1):
        raise ArgumentError(
            f"{op}: tiles is {tiles} and there are {n} columns. It must be at least 1 and at most {max(n, 1)}, so that "
            f"no tile is empty."
        )
