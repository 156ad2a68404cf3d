"""input_range_update: one step of the calibration of an analog layer's input ranges.

    a tile is calibrating while count_s < init_from_data; one that is done keeps its range, count and extremes

    mode "std", the learned range, with s the standard deviation of the tile as in tile_std:
        0 < s < infinity:     range = |(range * count + init_std_alpha * s) / (count + 1)|,   count + 1
        otherwise:            range = |range|
        then                  range = min(range, the largest finite number of its dtype)

    mode "extremes", for tiles whose elements exist and are all finite, with lo and hi their extremes, m the momentum:
        count = 0:            x_min, x_max = lo, hi
        m = -1:               x_min, x_max = min(x_min, lo), max(x_max, hi)
        otherwise:            x_min, x_max = x_min * m + lo * (1 - m), x_max * m + hi * (1 - m)
        then                  range = min(max(|x_min|, |x_max|), the largest finite number of its dtype),   count + 1

So no finite batch makes a range infinite, which no later one could undo. s is not finite, and the batch does not count,
where an element is not, or where the squares of the distances from the mean overflow: beyond 1.8e19 in float32. A range
in x's dtype need not exceed that dtype's largest number: no input does.

Counts are whole numbers: one in bfloat16 would never get past 256. Which tiles change is decided on the device.

Shapes: T = tiles, N = columns, the last dimension; x [..., N]; input_range, count, x_min, x_max and all outputs [T].
No gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from triptych import samples as make
from triptych.call import TensorMeta
from triptych.dispatch import define
from triptych.errors import ArgumentError
from triptych.ops import tile_std
from triptych.ops._norm_bounds import smallest, statistics_dtype, unit
from triptych.ops.rms_norm import check_plain
from triptych.ops.tile_abs_max import check_tiled, tiled_cases, with_values
from triptych.opspec import OpSpec, Phase, Sample, Tensors
from triptych.sharding import calibration
from triptych.sharding.rule import Sharding

Tensor = torch.Tensor
Mode = Literal["std", "extremes"]
MODES: tuple[str, ...] = ("std", "extremes")


# --- the public function --------------------------------------------------------------------------------------------


def input_range_update(
    x: Tensor,
    input_range: Tensor,
    count: Tensor,
    x_min: Tensor | None = None,
    x_max: Tensor | None = None,
    *,
    tiles: int = 1,
    mode: Mode = "std",
    init_from_data: int = 100,
    init_std_alpha: float = 3.0,
    act_range_momentum: float = 0.95,
    layer: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The input ranges after one more batch, for the tiles that are still calibrating. Changes none of its arguments.

    Args:
        x: [..., N], the batch; float32, bfloat16, float16 or float64; any strides.
        input_range: [T], of x's dtype, or float32 beside a 16-bit x.
        count: int64 [T], how many batches each tile has seen.
        x_min, x_max: [T], float32 (float64 beside a float64 x), the running extremes of mode "extremes"; None in
            mode "std".
        tiles: T, how many tiles of nearly equal size the columns are split into; at most N.
        mode: "std" for a running mean of `init_std_alpha` standard deviations, "extremes" for running extremes. A
            tile's batch counts if its deviation is greater than 0 and finite in float32 (float64 for float64), or if
            its elements exist and are all finite.
        init_from_data: how many batches a tile counts before it is done.
        init_std_alpha: for mode "std".
        act_range_momentum: for mode "extremes": the weight of what was, 0 to 1, or -1 for the extremes of all batches.
        layer: the name under which policies and reports know the caller.

    Returns:
        (range, count, x_min, x_max), fresh tensors of the dtypes of the arguments, also where nothing changed; x_min
        and x_max are [0] in mode "std". Arithmetic is float32 (float64 for float64). A range that is set is at most
        the largest finite number of its dtype. They carry no gradient.

    Raises:
        ArgumentError: the arguments do not fit together.
        Refused: the policy allows no backend that can run it.
    """
    updated: tuple[Tensor, Tensor, Tensor, Tensor] = _input_range_update(
        layer, x, input_range, count, x_min, x_max, tiles, mode, init_from_data, init_std_alpha, act_range_momentum
    )
    return updated


# --- what every backend may rely on ---------------------------------------------------------------------------------


def check(
    x: Tensor,
    input_range: Tensor,
    count: Tensor,
    x_min: Tensor | None,
    x_max: Tensor | None,
    tiles: int,
    mode: str,
    init_from_data: int,
    init_std_alpha: float,
    act_range_momentum: float,
) -> None:
    """Raise ArgumentError unless the arguments of `input_range_update` fit together."""
    op = "input_range_update"
    check_tiled(op, x, tiles)
    if not isinstance(mode, str) or mode not in MODES:
        raise ArgumentError(f"{op}: mode is {mode!r}. It must be 'std' or 'extremes'.")
    wide = statistics_dtype(x.dtype)
    _check_of_tiles(op, "input_range", input_range, x, tiles, tuple(dict.fromkeys((x.dtype, wide))))
    _check_of_tiles(op, "count", count, x, tiles, (torch.int64,))
    for name, extreme in (("x_min", x_min), ("x_max", x_max)):
        if mode == "extremes":
            _check_of_tiles(op, name, extreme, x, tiles, (wide,))
        elif extreme is not None:
            raise ArgumentError(f"{op}: mode is 'std' and {name} is given. Leave it out, or use mode 'extremes'.")
    if init_from_data < 0:
        raise ArgumentError(f"{op}: init_from_data is {init_from_data}. It must be 0 or greater.")
    if not 0 <= init_std_alpha < float("inf"):
        raise ArgumentError(f"{op}: init_std_alpha is {init_std_alpha}. It must be a finite number, 0 or greater.")
    if not (act_range_momentum == -1 or 0 <= act_range_momentum <= 1):
        raise ArgumentError(
            f"{op}: act_range_momentum is {act_range_momentum}. It must be between 0 and 1, or -1 for the extremes of "
            f"all batches."
        )


def _check_of_tiles(
    op: str, name: str, tensor: Tensor | None, x: Tensor, tiles: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{op}: {name} is a {type(tensor).__name__}. It must be a torch.Tensor.")
    check_plain(op, name, tensor)
    if tensor.shape != (tiles,):
        raise ArgumentError(
            f"{op}: {name} has shape {list(tensor.shape)} and tiles is {tiles}. It must have shape [{tiles}], a number "
            f"for each tile."
        )
    if tensor.dtype not in dtypes:
        raise ArgumentError(
            f"{op}: {name} has dtype {tensor.dtype} and x has dtype {x.dtype}. {name} must be "
            f"{' or '.join(str(dtype) for dtype in dtypes)}; convert it with {name}.to(...)."
        )
    if tensor.device != x.device:
        raise ArgumentError(
            f"{op}: {name} is on {tensor.device} and x is on {x.device}. Move one to the other's device."
        )


def fake_forward(x: Tensor, input_range: Tensor, count: Tensor, *rest: Any) -> Tensors:
    """Empty outputs, contiguous; [0] for the extremes in mode "std"."""
    tiles, mode = rest[2:4]
    extremes = tiles if mode == "extremes" else 0
    wide = statistics_dtype(x.dtype)
    return (
        torch.empty((tiles,), dtype=input_range.dtype, device=x.device),
        torch.empty((tiles,), dtype=torch.int64, device=x.device),
        torch.empty((extremes,), dtype=wide, device=x.device),
        torch.empty((extremes,), dtype=wide, device=x.device),
    )


# --- the update, in float64 for the reference, in the dtype of the statistics for the composite ----------------------


def _by_std(
    std: Tensor, input_range: Tensor, count: Tensor, init_from_data: int, init_std_alpha: float
) -> tuple[Tensor, Tensor]:
    """range, in the dtype of std, and count."""
    before = input_range.to(std.dtype)
    calibrating = count < init_from_data
    counted = calibrating & (std > 0) & (std < float("inf"))
    mean = (before * count.to(std.dtype) + init_std_alpha * std) / (count + 1).to(std.dtype)
    new = torch.where(counted, mean, before).abs().clamp(max=torch.finfo(input_range.dtype).max)
    return torch.where(calibrating, new, before), count + counted.to(torch.int64)


def _by_extremes(
    x: Tensor, input_range: Tensor, count: Tensor, x_min: Tensor, x_max: Tensor, tiles: int, init: int, momentum: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """range, in the dtype of x_min and x_max, count, and these two."""
    dtype = x_min.dtype
    lows, highs, finite = [], [], []
    for values in tile_std.elements(x, tiles, dtype):
        low, high = torch.aminmax(values) if values.numel() else (values.new_full((), float("nan")),) * 2
        lows.append(low)
        highs.append(high)
        finite.append(torch.isfinite(low) & torch.isfinite(high))  # NaN propagates into both
    low, high = torch.stack(lows), torch.stack(highs)
    counted = torch.stack(finite) & (count < init)
    if momentum == -1:
        merged_min, merged_max = torch.minimum(x_min, low), torch.maximum(x_max, high)
    else:
        merged_min = x_min * momentum + low * (1 - momentum)
        merged_max = x_max * momentum + high * (1 - momentum)
    new_min = torch.where(counted, torch.where(count == 0, low, merged_min), x_min)
    new_max = torch.where(counted, torch.where(count == 0, high, merged_max), x_max)
    new = torch.maximum(new_min.abs(), new_max.abs()).clamp(max=torch.finfo(input_range.dtype).max)
    after = torch.where(counted, new, input_range.to(dtype))
    return after, count + counted.to(torch.int64), new_min, new_max


def reference_forward(
    x: Tensor,
    input_range: Tensor,
    count: Tensor,
    x_min: Tensor | None,
    x_max: Tensor | None,
    tiles: int,
    mode: str,
    init_from_data: int,
    init_std_alpha: float,
    act_range_momentum: float,
) -> Tensors:
    """In float64 throughout; range is not rounded to its dtype at the end. A deviation is infinite where the sum of its
    squares is beyond the dtype of the statistics, as it is in that dtype."""
    if mode == "std":
        (std,) = tile_std.reference_forward(x, tiles)
        std = torch.where(_squares(std, x, tiles) > torch.finfo(statistics_dtype(x.dtype)).max, float("inf"), std)
        nothing = torch.empty(0, dtype=torch.float64, device=x.device)
        return (*_by_std(std, input_range, count, init_from_data, init_std_alpha), nothing, nothing.clone())
    assert x_min is not None and x_max is not None
    return _by_extremes(
        x, input_range, count, x_min.double(), x_max.double(), tiles, init_from_data, act_range_momentum
    )


def _squares(std: Tensor, x: Tensor, tiles: int) -> Tensor:
    """The sum of the squared distances from the mean that std was made of; NaN where std is."""
    elements = [each.numel() for each in tile_std.elements(x, tiles, x.dtype)]
    return std.square() * (torch.tensor(elements, dtype=std.dtype, device=std.device) - 1)


def composite_forward(
    x: Tensor,
    input_range: Tensor,
    count: Tensor,
    x_min: Tensor | None,
    x_max: Tensor | None,
    tiles: int,
    mode: str,
    init_from_data: int,
    init_std_alpha: float,
    act_range_momentum: float,
) -> Tensors:
    """In the dtype of the statistics; range is rounded once. A range that does not change keeps its bits."""
    if mode == "std":
        (std,) = tile_std.composite_forward(x, tiles)
        after, counts = _by_std(std, input_range, count, init_from_data, init_std_alpha)
        return after.to(input_range.dtype).contiguous(), counts, std.new_empty(0), std.new_empty(0)
    assert x_min is not None and x_max is not None
    after, counts, new_min, new_max = _by_extremes(
        x, input_range, count, x_min, x_max, tiles, init_from_data, act_range_momentum
    )
    return after.to(input_range.dtype).contiguous(), counts, new_min.contiguous(), new_max.contiguous()


# --- how far from the reference a correct implementation may lie ------------------------------------------------------


def bound_forward(
    x: Tensor,
    input_range: Tensor,
    count: Tensor,
    x_min: Tensor | None,
    x_max: Tensor | None,
    tiles: int,
    mode: str,
    init_from_data: int,
    init_std_alpha: float,
    act_range_momentum: float,
) -> Tensors:
    """What does not change is exact, and so are counts and the extremes of one batch or of all. The rest, in units u:

    - a running mean: std's own error, 6 u of its two terms (a product each, the sum, the quotient, and count + 1 and
      count, which may be rounded on the way to a float), and one rounding to range's dtype; where the two terms'
      sum overflows before it is divided, whatever lies between the mean and the largest range;
    - a running extreme: 4 u of its two terms (two products, their sum, and the rounding of the momentum, which 1 - m
      inherits whole), and one rounding to range's dtype.

    Where the reference's std is not 0 but within its error of it, an implementation may find 0 and not count the batch.
    Nor need it count one where a partial result may overflow: merging means makes numbers of up to n times the sum of
    the n squares. Where that sum overflows and no square does, an implementation that sums in float64 may count it.
    """
    args = (x, input_range, count, x_min, x_max, tiles, mode, init_from_data, init_std_alpha, act_range_momentum)
    after, counts, new_min, new_max = reference_forward(*args)
    u, before = unit(statistics_dtype(x.dtype)), input_range.double()
    rounding = after.abs() * unit(input_range.dtype) + smallest(input_range.dtype)
    counted = counts > count
    none = torch.zeros_like(after)
    if mode == "std":
        (std,), (std_bound,) = tile_std.reference_forward(x, tiles), tile_std.bound_forward(x, tiles)
        squares, largest = _squares(std, x, tiles), torch.finfo(statistics_dtype(x.dtype)).max
        sums, batches = before.abs() * count.double() + init_std_alpha * std, (count + 1).double()
        error = rounding + sums / batches * 6 * u + init_std_alpha * std_bound / batches
        error += torch.where(sums > largest, torch.finfo(input_range.dtype).max - after, none)
        elements = x.numel() / tiles + x.numel() / max(x.shape[-1], 1)  # of the largest tile, or more
        skipped = counted & ((std <= std_bound) | (squares * elements > largest))
        taken = (count < init_from_data) & ~counted & (squares > largest) & (_distance(x, tiles) < largest**0.5 * 1.01)
        undecided = skipped | taken
        other, _ = _by_std(torch.where(taken, std, 0.0), input_range, count, init_from_data, init_std_alpha)
        range_bound = torch.where(counted | taken, error, none) + torch.where(undecided, (after - other).abs(), none)
        return range_bound, undecided.double(), new_min, new_max
    assert x_min is not None and x_max is not None
    previous, seen = torch.maximum(x_min.double().abs(), x_max.double().abs()), _largest(x, tiles)
    error = (previous + seen) * 4 * u + smallest(statistics_dtype(x.dtype))
    merged = counted & (count > 0) if act_range_momentum != -1 else torch.zeros_like(counted)
    extreme_bound = torch.where(merged, error, none)
    return torch.where(counted, rounding + extreme_bound, none), none, extreme_bound, extreme_bound.clone()


def _largest(x: Tensor, tiles: int) -> Tensor:
    """The largest magnitude of each tile; 0 of nothing."""
    values = tile_std.elements(x, tiles, torch.float64)
    return torch.stack([each.abs().amax() if each.numel() else each.new_zeros(()) for each in values])


def _distance(x: Tensor, tiles: int) -> Tensor:
    """The largest distance of an element from the mean of its tile; 0 of nothing."""
    values = tile_std.elements(x, tiles, torch.float64)
    return torch.stack([(each - each.mean()).abs().amax() if each.numel() else each.new_zeros(()) for each in values])


# --- the cases of the conformance suite -----------------------------------------------------------------------------

USUAL: tuple[Any, ...] = (100, 3.0, 0.95)
MIXED = (0, 1, 99, 100, 103)
"""Counts of a fresh tile, two that are calibrating, one that has just been done and one that was done long ago."""


def _calibration_cases() -> Iterator[tuple[str, make.Maker, int, tuple[int, ...]]]:
    """(name, maker of x, tiles, counts in turn)."""
    lengths = ("columns_1", "columns_2", "columns_3", "columns_33", "columns_128", "columns_1000", "columns_4097")
    for name, maker, tiles in tiled_cases():
        if not name.startswith("columns_") or name in (*lengths, "columns_65536"):
            yield name, maker, tiles, (0, 3, 100)
    yield "fresh", make.normal(6, 72), 3, (0,)
    yield "calibrating", make.normal(6, 72), 3, (1, 42, 99)
    yield "done", make.normal(6, 72), 3, (100,)
    yield "mixed", make.normal(6, 257), 5, MIXED
    yield "mixed_layouts", make.permuted(3, 4, 40), 5, MIXED
    yield "constant_tiles", tile_std.constant_tiles, 3, (0, 7, 7)
    yield "far_from_zero", tile_std.far_from_zero(make.normal(6, 72)), 3, (0, 7, 100)
    yield "nan_in_tiles_done", with_values(make.normal(6, 72), float("nan"), columns=slice(48, 72)), 3, (0, 7, 100)


def _overflowing(columns: slice) -> make.Maker:
    """[6, 72], finite; in `columns`, 3 deviations are beyond the dtype: an element whose square overflows, in float16,
    whose squares do not, -40000 and 40000 in turn."""

    def changed(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Tensor:
        x = make.normal(6, 72)(generator, dtype, device)
        if dtype is torch.float16:
            x[::2, columns], x[1::2, columns] = 40000.0, -40000.0
        else:
            x[2, columns][5::24] = 1e200 if dtype is torch.float64 else 3e19
        return x

    return changed


def _largest_number(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[6, 72] with the largest finite number of the dtype in the first of three tiles, its negative in the second."""
    x = make.normal(6, 72)(generator, dtype, device)
    x[2, 5], x[3, 30] = torch.finfo(dtype).max, torch.finfo(dtype).min
    return x


def samples() -> Iterator[Sample]:
    """Both modes over lengths, layouts and tiles; counts of every kind; both momenta; settings at their ends; finite
    batches too large for the range or for the statistics."""
    for mode in reversed(MODES):
        for name, maker, tiles, counts in _calibration_cases():
            yield _sample(f"{mode}_{name}", maker, tiles, counts, mode, USUAL)
        more = make.normal(6, 72)
        yield _sample(f"{mode}_float32_range", more, 3, (0, 7, 100), mode, USUAL, ranges=make.in_float32)
        yield _sample(f"{mode}_strided_range", more, 3, (0, 7, 100), mode, USUAL, ranges=lambda _: make.every_other(3))
        yield _sample(f"{mode}_no_calibration", more, 3, (0,), mode, (0, 3.0, 0.95))
        yield _sample(f"{mode}_long_calibration", more, 5, (0, 255, 256, 257, 2**24 + 1), mode, (2**40, 3.0, 0.95))
    more = make.normal(6, 257)
    yield _sample("std_other_alpha", more, 5, MIXED, "std", (100, 0.25, 0.95))
    yield _sample("std_alpha_0", more, 5, MIXED, "std", (100, 0.0, 0.95))
    yield _sample("std_alpha_3e38", lambda *how: more(*how) * 100, 5, MIXED, "std", (100, 3e38, 0.95))
    yield _sample("std_of_one_element_a_tile", make.normal(1, 5), 5, MIXED, "std", USUAL)
    everywhere, one_tile = _overflowing(slice(0, 72)), _overflowing(slice(24, 48))
    yield _sample("std_overflow", everywhere, 3, (0, 7, 100), "std", USUAL)
    yield _sample("std_overflow_float32_range", everywhere, 3, (0, 7, 100), "std", USUAL, ranges=make.in_float32)
    yield _sample("std_overflow_beside_good_tiles", one_tile, 3, (0, 7, 42), "std", USUAL)
    yield _sample("std_of_the_largest_number", _largest_number, 3, (0, 7, 42), "std", USUAL)
    for name, momentum in (("all_batches", -1.0), ("last_batch", 0.0), ("first_batch", 1.0), ("other_momentum", 0.3)):
        yield _sample(f"extremes_of_{name}", more, 5, MIXED, "extremes", (100, 3.0, momentum))
        largest = f"extremes_of_{name}_with_the_largest_number"
        yield _sample(largest, _largest_number, 3, (0, 7, 42), "extremes", (100, 3.0, momentum))


def _same(maker: make.Maker) -> make.Maker:
    return maker


def _sample(
    name: str,
    maker: make.Maker,
    tiles: int,
    counts: tuple[int, ...],
    mode: str,
    settings: tuple[Any, ...],
    ranges: Callable[[make.Maker], make.Maker] = _same,
) -> Sample:
    """A case: ranges of both signs, as a gradient step leaves them, and extremes that some batches stay inside of."""

    def tensors(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, ...]:
        x = maker(generator, dtype, device)
        input_range = ranges(make.normal(tiles))(generator, dtype, device)
        count = torch.tensor([counts[tile % len(counts)] for tile in range(tiles)], dtype=torch.int64, device=device)
        if mode == "std":
            return x, input_range, count, None, None
        x_min, x_max = (make.in_float32(make.normal(tiles))(generator, dtype, device).abs() for _ in range(2))
        return x, input_range, count, -2 * x_min, 2 * x_max

    return Sample(name, tensors, (tiles, mode, *settings))


# --- the spec -------------------------------------------------------------------------------------------------------


def typical(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """The arguments of an ordinary call: a contiguous x of `shape`, one tile, the learned range."""
    x = TensorMeta.contiguous(shape, dtype, device)
    input_range = TensorMeta.contiguous((1,), dtype, device)
    return (x, input_range, TensorMeta.contiguous((1,), torch.int64, device), None, None, 1, "std", *USUAL)


SPEC = OpSpec(
    name="input_range_update",
    summary="one step of the calibration of an analog layer's input ranges",
    forward=Phase(
        tensors=("x", "input_range", "count", "x_min?", "x_max?"),
        scalars=(
            ("tiles", int),
            ("mode", str),
            ("init_from_data", int),
            ("init_std_alpha", float),
            ("act_range_momentum", float),
        ),
        outputs=("range", "new_count", "new_min", "new_max"),
        reference=reference_forward,
        composite=composite_forward,
        fake=fake_forward,
        bound=bound_forward,
    ),
    backward=None,
    check=check,
    typical=typical,
    samples=samples,
    sharding=Sharding(
        "... n, t, t, t, t -> t, t, t, t",
        splits=("...", "n"),
        tiles="tiles",
        local_forward=calibration.forward(_by_std),
    ),
)

_input_range_update = define(SPEC).call
