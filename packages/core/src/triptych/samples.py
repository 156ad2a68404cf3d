"""Makers of sample tensors: the layouts in which kernels go wrong, by name.

A maker takes (generator, dtype, device) and returns a tensor of normally distributed values. Values come from the
CPU generator, so that a case has the same values on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

Maker = Callable[[torch.Generator, torch.dtype, torch.device], torch.Tensor]


def normal(*shape: int) -> Maker:
    """Contiguous."""

    def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(device=device, dtype=dtype)

    return make


def transposed(*shape: int) -> Maker:
    """The last two dimensions stored the other way round: the last stride is not 1."""
    stored = normal(*shape[:-2], shape[-1], shape[-2])
    return lambda generator, dtype, device: stored(generator, dtype, device).transpose(-1, -2)


def permuted(*shape: int) -> Maker:
    """The first two dimensions stored the other way round: rows do not collapse to one stride."""
    stored = normal(shape[1], shape[0], *shape[2:])
    return lambda generator, dtype, device: stored(generator, dtype, device).transpose(0, 1)


def narrowed(*shape: int) -> Maker:
    """A slice of longer rows, as the backward of a concatenation hands out: row stride longer than the row."""
    stored = normal(*shape[:-1], shape[-1] + 5)
    return lambda generator, dtype, device: stored(generator, dtype, device)[..., 2 : 2 + shape[-1]]


def offset(*shape: int) -> Maker:
    """Contiguous, beginning one element into its storage: rows are not aligned to 16 bytes."""
    count = 1
    for size in shape:
        count *= size
    stored = normal(count + 1)
    return lambda generator, dtype, device: stored(generator, dtype, device)[1:].view(shape)


def expanded(*shape: int) -> Maker:
    """One row repeated by stride 0."""
    stored = normal(shape[-1])
    return lambda generator, dtype, device: stored(generator, dtype, device).expand(shape)


def every_other(*shape: int) -> Maker:
    """Every second element of rows twice as long: last stride 2."""
    stored = normal(*shape[:-1], 2 * shape[-1])
    return lambda generator, dtype, device: stored(generator, dtype, device)[..., ::2]


def strided_rows(*shape: int) -> Maker:
    """Every second row of twice as many: a row stride that is not the row's length, in every leading dimension."""
    stored = normal(shape[0], *(2 * size for size in shape[1:-1]), shape[-1])
    index = (slice(None), *(slice(None, None, 2) for _ in shape[1:-1]))
    return lambda generator, dtype, device: stored(generator, dtype, device)[index]


def in_float32(maker: Maker) -> Maker:
    """The same in float32 whatever dtype is asked for: a master weight beside 16-bit activations."""
    return lambda generator, dtype, device: maker(
        generator, torch.float64 if dtype is torch.float64 else torch.float32, device
    )


def constant(value: float, *shape: int) -> Maker:
    """Every element the same."""
    return lambda generator, dtype, device: torch.full(shape, value, dtype=dtype, device=device)


def scaled(maker: Maker, factor: float) -> Maker:
    """The same, times a factor."""
    return lambda generator, dtype, device: maker(generator, dtype, device) * factor


def positive(maker: Maker) -> Maker:
    """The same without their signs."""
    return lambda generator, dtype, device: maker(generator, dtype, device).abs()


def seed() -> Maker:
    """A seed of noise: int64 [1], any of the 2^64."""

    def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        ends = torch.iinfo(torch.int64)
        return torch.randint(ends.min, ends.max, (1,), dtype=torch.int64, generator=generator).to(device)

    return make


def row_cases(maker_count: int) -> Iterator[tuple[str, tuple[Maker, ...], int]]:
    """Every layout and row length that has broken a kernel somewhere: (name, makers of `maker_count` inputs, N)."""
    lengths = (1, 2, 3, 7, 8, 31, 32, 33, 100, 127, 128, 1000, 1024, 4096, 4097, 8200, 16384, 20001, 65536)
    for columns in lengths:
        rows = 5 if columns < 8192 else 2
        yield f"columns_{columns}", (normal(rows, columns),) * maker_count, columns
    yield "one_dimension", (normal(64),) * maker_count, 64
    yield "three_dimensions", (normal(2, 3, 48),) * maker_count, 48
    yield "four_dimensions", (normal(2, 3, 2, 48),) * maker_count, 48
    yield "many_rows", (normal(4099, 24),) * maker_count, 24
    yield "no_rows", (normal(0, 16),) * maker_count, 16
    yield "no_rows_three_dimensions", (normal(3, 0, 16),) * maker_count, 16
    yield "no_columns", (normal(3, 0),) * maker_count, 0
    layouts: tuple[Callable[..., Maker], ...] = (
        transposed, permuted, narrowed, offset, expanded, every_other, strided_rows,
    )  # fmt: skip
    for layout in layouts:
        yield layout.__name__, (layout(3, 4, 40),) * maker_count, 40
    if maker_count > 1:
        yield "mixed_layouts", (permuted(3, 4, 40), expanded(3, 4, 40))[:maker_count], 40
