"""tile_abs_max: the largest magnitude in each tile of each row.

    abs_max_s[row] = max |x[row, j]| over the columns j of tile s; NaN if there is one among them, 0 for no column

The dynamic input range of an analog layer, and (of its weight) the largest weight of a tile and channel.

Shapes: T = tiles, N = columns, the last dimension; x [..., N]; abs_max [T, ...]. `triptych.tiling` has the tiles.
No gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from triptych import samples as make
from triptych.call import TensorMeta
from triptych.dispatch import define
from triptych.errors import ArgumentError
from triptych.ops._norm_bounds import statistics_dtype
from triptych.ops.rms_norm import FLOATS, check_plain
from triptych.opspec import OpSpec, Phase, Sample, Tensors
from triptych.sharding.rule import Sharding
from triptych.tiling import check_tiles, tile_slices

Tensor = torch.Tensor


# --- the public function --------------------------------------------------------------------------------------------


def tile_abs_max(x: Tensor, *, tiles: int = 1, layer: str = "") -> Tensor:
    """The largest magnitude in each tile of the last dimension of `x`, row by row.

    Args:
        x: [..., N]; float32, bfloat16, float16 or float64; any strides.
        tiles: T, how many tiles of nearly equal size the columns are split into; at most N.
        layer: the name under which policies and reports know the caller.

    Returns:
        [T, ...], contiguous, float32 (float64 for float64). NaN where the tile holds one, 0 where it has no column.
        It carries no gradient.

    Raises:
        ArgumentError: the arguments do not fit together.
        Refused: the policy allows no backend that can run it.
    """
    abs_max: Tensor = _tile_abs_max(layer, x, tiles)
    return abs_max


# --- what every backend may rely on ---------------------------------------------------------------------------------


def check(x: Tensor, tiles: int) -> None:
    """Raise ArgumentError unless the arguments of `tile_abs_max` fit together."""
    check_tiled("tile_abs_max", x, tiles)


def check_tiled(op: str, x: Tensor, tiles: int) -> None:
    """Raise ArgumentError unless `x` holds rows of floating-point numbers that can be split into `tiles` tiles."""
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{op}: x is a {type(x).__name__}. It must be a torch.Tensor.")
    check_plain(op, "x", x)
    if x.dtype not in FLOATS:
        raise ArgumentError(
            f"{op}: x has dtype {x.dtype}. It must be float32, bfloat16, float16 or float64; convert it with x.to(...)."
        )
    if x.dim() == 0:
        raise ArgumentError(
            f"{op}: x is a scalar tensor. It needs at least one dimension, the one to split into tiles."
        )
    check_tiles(op, tiles, x.shape[-1])


def fake_forward(x: Tensor, tiles: int) -> Tensors:
    """An empty abs_max, contiguous."""
    return (torch.empty((tiles, *x.shape[:-1]), dtype=statistics_dtype(x.dtype), device=x.device),)


# --- the reference, its bound, and plain PyTorch ----------------------------------------------------------------------


def _abs_max(x: Tensor, tiles: int) -> Tensor:
    """In x's own dtype: torch.amax propagates NaN, and knows no maximum of nothing."""
    if x.shape[-1] == 0:
        return x.new_zeros((tiles, *x.shape[:-1]))
    return torch.stack([x[..., columns].abs().amax(-1) for columns in tile_slices(x.shape[-1], tiles)])


def reference_forward(x: Tensor, tiles: int) -> Tensors:
    """In float64."""
    return (_abs_max(x.double(), tiles),)


def bound_forward(x: Tensor, tiles: int) -> Tensors:
    """Zero: nothing is rounded."""
    return (torch.zeros((tiles, *x.shape[:-1]), dtype=torch.float64, device=x.device),)


def composite_forward(x: Tensor, tiles: int) -> Tensors:
    """The maximum in x's own dtype, then wider: neither rounds."""
    return (_abs_max(x, tiles).to(statistics_dtype(x.dtype)).contiguous(),)


# --- the cases of the conformance suite -----------------------------------------------------------------------------


def tiled_cases() -> Iterator[tuple[str, make.Maker, int]]:
    """Cases that the ops over tiles share: (name, maker of x, tiles). Three tiles, if there are columns for them."""
    yield "tiles_of_86_86_85", make.normal(6, 257), 3
    for name, (maker,), columns in make.row_cases(1):
        yield name, maker, max(min(columns, 3), 1)
    yield "one_tile", make.normal(6, 72), 1
    yield "one_tile_one_dimension", make.normal(300), 1
    yield "tiles_of_one_column", make.normal(9, 13), 13
    yield "many_tiles", make.normal(3, 515), 64
    yield "one_element", make.normal(1, 1), 1
    yield "zeros", with_values(make.normal(6, 72), 0.0), 3
    yield "nan", with_values(make.normal(6, 72), float("nan"), row=2, columns=slice(30, 31)), 3
    yield "nan_after_infinity", _nan_after_infinity(make.normal(6, 72)), 3
    yield "infinite", with_values(make.normal(6, 72), float("inf"), row=2, columns=slice(30, 31)), 3
    yield "minus_infinite", with_values(make.normal(6, 72), float("-inf"), row=0, columns=slice(0, 1)), 3


def with_values(
    maker: make.Maker, value: float, row: int | slice = slice(None), columns: slice = slice(None)
) -> make.Maker:
    """The same tensor with `value` in some of its elements, or in all."""

    def changed(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Tensor:
        x = maker(generator, dtype, device)
        x[row, columns] = value
        return x

    return changed


def _nan_after_infinity(maker: make.Maker) -> make.Maker:
    """A NaN behind the largest value there is: no comparison finds it."""
    infinite = with_values(maker, float("inf"), row=1, columns=slice(3, 4))
    return with_values(infinite, float("nan"), row=1, columns=slice(7, 8))


def samples() -> Iterator[Sample]:
    """Lengths, layouts and tiles; empty tensors; values that are not finite."""
    for name, maker, tiles in tiled_cases():
        yield Sample(name, lambda *how, maker=maker: (maker(*how),), (tiles,))


# --- the spec -------------------------------------------------------------------------------------------------------


def typical(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """The arguments of an ordinary call: a contiguous x of `shape`, one tile."""
    return (TensorMeta.contiguous(shape, dtype, device), 1)


SPEC = OpSpec(
    name="tile_abs_max",
    summary="the largest magnitude in each tile of each row",
    forward=Phase(
        tensors=("x",),
        scalars=(("tiles", int),),
        outputs=("abs_max",),
        reference=reference_forward,
        composite=composite_forward,
        fake=fake_forward,
        bound=bound_forward,
    ),
    backward=None,
    check=check,
    typical=typical,
    samples=samples,
    sharding=Sharding("... n -> t ...", splits=("...", "n"), tiles="tiles"),
)

_tile_abs_max = define(SPEC).call
