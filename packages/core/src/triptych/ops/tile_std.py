"""tile_std: the standard deviation of each tile, over all rows.

    std_s = sqrt( sum (x - mean_s)^2 / (n - 1) )        over the n elements of tile s in all rows
    NaN for fewer than two elements, and where one of them is NaN or infinite

Elements that are all equal give exactly 0, which tells a tile without information from one with little. A rounded mean
would not; subtracting one of the elements first does, and so does Welford's update. The difference of two sums,
E[x^2] - E[x]^2, is never good enough.

Shapes: T = tiles, N = columns, the last dimension; x [..., N]; std [T]. `triptych.tiling` has the tiles. No gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from triptych import samples as make
from triptych.dispatch import define
from triptych.ops._norm_bounds import statistics_dtype, sum_error
from triptych.ops.tile_abs_max import check_tiled, tiled_cases, typical, with_values
from triptych.opspec import OpSpec, Phase, Sample, Tensors
from triptych.sharding.rule import Sharding
from triptych.tiling import tile_slices

Tensor = torch.Tensor


def tile_std(x: Tensor, *, tiles: int = 1, layer: str = "") -> Tensor:
    """The unbiased standard deviation of each tile of the last dimension of `x`, over all rows.

    Args:
        x: [..., N]; float32, bfloat16, float16 or float64; any strides.
        tiles: T, how many tiles of nearly equal size the columns are split into; at most N.
        layer: the name under which policies and reports know the caller.

    Returns:
        [T], contiguous, float32 (float64 for float64). NaN for a tile of fewer than two elements, or with one that is
        not finite; exactly 0 for one whose elements are all equal. It carries no gradient.

    Raises:
        ArgumentError: the arguments do not fit together.
        Refused: the policy allows no backend that can run it.
    """
    std: Tensor = _tile_std(layer, x, tiles)
    return std


def check(x: Tensor, tiles: int) -> None:
    """Raise ArgumentError unless the arguments of `tile_std` fit together."""
    check_tiled("tile_std", x, tiles)


def fake_forward(x: Tensor, tiles: int) -> Tensors:
    """An empty std, contiguous."""
    return (torch.empty((tiles,), dtype=statistics_dtype(x.dtype), device=x.device),)


# --- the reference and its bound --------------------------------------------------------------------------------------


def elements(x: Tensor, tiles: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """All elements of each tile, flat and in `dtype`."""
    return tuple(x[..., columns].to(dtype).reshape(-1) for columns in tile_slices(x.shape[-1], tiles))


def _std64(values: Tensor) -> Tensor:
    if values.numel() < 2:
        return values.new_full((), float("nan"))
    distance = values - values[0]
    return ((distance - distance.mean()).square().sum() / (values.numel() - 1)).sqrt()


def reference_forward(x: Tensor, tiles: int) -> Tensors:
    """In float64 throughout: distances from an element, then from their mean."""
    return (torch.stack([_std64(values) for values in elements(x, tiles, torch.float64)]),)


def bound_forward(x: Tensor, tiles: int) -> Tensors:
    """The error of a sum of n terms, relative to the root mean square of the elements; 0 where they are all equal.

    A running mean has errors relative to the magnitude of the elements, not to their distance from it: Welford's update
    is right to n u rms/std relative to std (Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance,
    1983), with the root of n where errors are independent, as in `sum_error`. Two passes do better. Squares below the
    smallest normal number are lost, which is worth its root.
    """
    (std,) = reference_forward(x, tiles)
    tiny = torch.finfo(statistics_dtype(x.dtype)).smallest_normal
    bounds = []
    for values in elements(x, tiles, torch.float64):
        count = max(values.numel(), 2)
        rms = (values.square().sum() / count).sqrt()
        bounds.append(rms * sum_error(count, x.dtype) + (tiny * count / (count - 1)) ** 0.5)
    return (torch.where(std > 0, torch.stack(bounds), 0.0),)


# --- plain PyTorch, one operation after the other -------------------------------------------------------------------

_BLOCK = 4096  # torch splits a sum to one number between threads from 32768 elements on


def _sum(values: Tensor) -> Tensor:
    """The sum of a flat tensor, in an order that the number of threads has no part in: blocks, then their sums."""
    while values.numel() > _BLOCK:
        padding = -values.numel() % _BLOCK
        values = torch.nn.functional.pad(values, (0, padding)).view(-1, _BLOCK).sum(-1)
    return values.sum()


def _std(values: Tensor) -> Tensor:
    if values.numel() < 2:
        return values.new_full((), float("nan"))
    distance = values - values[0]
    return torch.sqrt(_sum((distance - _sum(distance) / values.numel()).square()) / (values.numel() - 1))


def composite_forward(x: Tensor, tiles: int) -> Tensors:
    """Distances from the tile's first element, then from their mean, in the dtype of the statistics."""
    return (torch.stack([_std(values) for values in elements(x, tiles, statistics_dtype(x.dtype))]),)


# --- the cases of the conformance suite -----------------------------------------------------------------------------


def far_from_zero(maker: make.Maker) -> make.Maker:
    """The same tensor plus 1000: the squares of its elements hide their distances."""
    return lambda generator, dtype, device: maker(generator, dtype, device) + 1000


def constant_tiles(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[7, 74]; in the first two of three tiles all elements are equal, to a number whose sum rounds."""
    first = with_values(make.normal(7, 74), 0.1, columns=slice(0, 25))
    return with_values(first, -1.7e3, columns=slice(25, 50))(generator, dtype, device)


def samples() -> Iterator[Sample]:
    """Those of tile_abs_max; tiles that are constant, or constant but for little."""
    undefined = ("no_rows", "no_rows_three_dimensions", "no_columns", "one_element")
    for name, maker, tiles in tiled_cases():
        yield Sample(name, lambda *how, maker=maker: (maker(*how),), (tiles,), nan=name in undefined)
    yield Sample("one_row_tiles_of_one_column", lambda *how: (make.normal(1, 5)(*how),), (5,), nan=True)
    yield Sample("one_row_tiles_of_two_and_one", lambda *how: (make.normal(5)(*how),), (3,), nan=True)
    yield Sample("constant_tiles", lambda *how: (constant_tiles(*how),), (3,))
    yield Sample("far_from_zero", lambda *how: (far_from_zero(make.normal(6, 72))(*how),), (3,))


# --- the spec -------------------------------------------------------------------------------------------------------

SPEC = OpSpec(
    name="tile_std",
    summary="the unbiased standard deviation of each tile, over all rows",
    forward=Phase(
        tensors=("x",),
        scalars=(("tiles", int),),
        outputs=("std",),
        reference=reference_forward,
        composite=composite_forward,
        fake=fake_forward,
        bound=bound_forward,
    ),
    backward=None,
    check=check,
    typical=typical,
    samples=samples,
    sharding=Sharding("... n -> t", splits=("n",), tiles="tiles"),  # split rows are gathered
)

_tile_std = define(SPEC).call
