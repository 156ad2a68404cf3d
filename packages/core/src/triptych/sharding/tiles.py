"""Which parts of N inputs, split over processes, are whole tiles (`triptych.tiling`)."""

from __future__ import annotations

import itertools

from triptych.tiling import tile_sizes, tile_starts


def chunks(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """(start, size) of each part, as torch.chunk and DTensor split: all of the same size but the last ones."""
    step = -(-size // parts)
    starts = [min(part * step, size) for part in range(parts)]
    return tuple((start, min(step, size - start)) for start in starts)


def whole_tiles(n: int, tiles: int, counts: tuple[int, ...]) -> dict[tuple[int, ...], int] | None:
    """How many tiles each part of n inputs has; None if some part is not made of whole tiles.

    Args:
        n, tiles: how many inputs, and into how many tiles they are split.
        counts: how many processes split them, and those parts again, and so on.

    Returns:
        By place along each of `counts`.
    """
    starts, sizes = tile_starts(n, tiles), tile_sizes(n, tiles)
    found: dict[tuple[int, ...], int] = {}
    for place in itertools.product(*map(range, counts)):
        first, columns, first_tile, number = 0, n, 0, tiles
        for at, count in zip(place, counts, strict=True):
            offset, columns = chunks(columns, count)[at]
            offset_tile, number = chunks(number, count)[at]
            first, first_tile = first + offset, first_tile + offset_tile
        if number < 1 or starts[first_tile] != first:
            return None
        if number > max(columns, 1) or tile_sizes(columns, number) != sizes[first_tile : first_tile + number]:
            return None
        found[place] = number
    return found


def cut_text(op: str, name: str, n: int, tiles: int, counts: tuple[int, ...]) -> str:
    """The refusal of a tensor whose shards cut tiles."""
    parts = 1
    for count in counts:
        parts *= count
    shards = [size for _, size in chunks(n, parts)]
    sizes = sorted(set(tile_sizes(n, tiles)), reverse=True)
    fitting = _size_that_fits(n, parts, sizes[0])
    advice = f"choose mapping.max_input_size {fitting}, so that every rank has whole tiles, or " if fitting else ""
    return (
        f"{op}: {name} is sharded along its {n} inputs over {parts} ranks, {' + '.join(map(str, shards))}, and the "
        f"inputs are split into {tiles} {'tile' if tiles == 1 else 'tiles'} of {' or '.join(map(str, sizes))}. A tile "
        f"is one crossbar and cannot be split: {advice}shard the outputs instead (ColwiseParallel, Shard(0))."
    )


def _size_that_fits(n: int, parts: int, largest: int) -> int:
    """The largest size of tiles, at most `largest`, of which each of the parts holds a whole number; 0 if none."""
    share, rest = divmod(n, parts)
    return 0 if rest else max((size for size in range(1, min(largest, share) + 1) if share % size == 0), default=0)
