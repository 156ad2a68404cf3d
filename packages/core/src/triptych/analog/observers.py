"""What calibrate_input_ranges remembers of the inputs of a layer, and the range that it makes of that for each tile."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from triptych.analog.layer import AnalogLayer
from triptych.tiling import tile_slices


class InputRangeCalibrationType(Enum):
    """What an input range is set to. Quantiles and maxima are those of |x|."""

    NONE = "None"
    """Nothing: the ranges stay as they are."""

    MOVING_STD = "MovingStd"
    """The mean over the batches of `std_alpha` standard deviations."""

    MOVING_QUANTILE = "MovingQuantile"
    """The mean over the batches of the quantile."""

    CACHE_QUANTILE = "CacheQuantile"
    """The quantile of a sample of all tokens, kept in main memory."""

    MAX = "Max"
    """The largest magnitude."""


class Observer(ABC):
    """Sees the inputs of a layer's crossbars, in rows without padding, and makes a range of them for each tile."""

    def __init__(self, layer: AnalogLayer) -> None:
        self.groups, self.tiles = layer.crossbars, layer.tiles
        self.batches = 0

    def observe(self, group: int, rows: Tensor) -> None:
        """Take in [R, N] of a group: R > 0."""
        self.batches += 1
        self.see(group, rows)

    def parts(self, rows: Tensor) -> list[Tensor]:
        """The columns of each tile."""
        return [rows[:, columns] for columns in tile_slices(rows.shape[1], self.tiles)]

    @abstractmethod
    def see(self, group: int, rows: Tensor) -> None: ...

    @abstractmethod
    def seen(self) -> tuple[Any, ...]:
        """What it remembers, in a form that travels; the first is the number of batches."""

    @abstractmethod
    def take(self, parts: list[Any]) -> None:
        """Remember what several have seen, instead of what it has. The same parts in the same order give the same."""

    @abstractmethod
    def ranges(self) -> list[float]:
        """One for each tile, group by group."""


class _Mean(Observer):
    """The mean over the batches of a statistic of each tile."""

    def __init__(self, layer: AnalogLayer, statistic: Callable[[Tensor], float]) -> None:
        super().__init__(layer)
        self.statistic = statistic
        self.sums = [0.0] * (self.groups * self.tiles)
        self.counts = [0] * self.groups

    def see(self, group: int, rows: Tensor) -> None:
        self.counts[group] += 1
        for tile, part in enumerate(self.parts(rows), start=group * self.tiles):
            self.sums[tile] += self.statistic(part)

    def seen(self) -> tuple[Any, ...]:
        return self.batches, self.sums, self.counts

    def take(self, parts: list[Any]) -> None:
        batches, sums, counts = zip(*parts, strict=True)
        self.batches = sum(batches)
        self.sums = [sum(each) for each in zip(*sums, strict=True)]
        self.counts = [sum(each) for each in zip(*counts, strict=True)]

    def ranges(self) -> list[float]:
        return [total / max(self.counts[tile // self.tiles], 1) for tile, total in enumerate(self.sums)]


class _Largest(Observer):
    """The largest magnitude of each tile."""

    def __init__(self, layer: AnalogLayer) -> None:
        super().__init__(layer)
        self.largest = [0.0] * (self.groups * self.tiles)

    def see(self, group: int, rows: Tensor) -> None:
        for tile, part in enumerate(self.parts(rows), start=group * self.tiles):
            self.largest[tile] = max(self.largest[tile], float(part.abs().max()))

    def seen(self) -> tuple[Any, ...]:
        return self.batches, self.largest

    def take(self, parts: list[Any]) -> None:
        batches, largest = zip(*parts, strict=True)
        self.batches = sum(batches)
        self.largest = [max(each) for each in zip(*largest, strict=True)]

    def ranges(self) -> list[float]:
        return self.largest


class _Sample(Observer):
    """The quantile of a uniform sample of the rows: those with the smallest of random numbers, one drawn for each."""

    def __init__(self, layer: AnalogLayer, quantile: float, size: int) -> None:
        super().__init__(layer)
        self.quantile, self.size = quantile, size
        self.generator = torch.Generator().manual_seed(0)
        self.kept: list[Tensor | None] = [None] * self.groups
        self.keys = [torch.empty(0, dtype=torch.float64)] * self.groups

    def see(self, group: int, rows: Tensor) -> None:
        keys = torch.rand(rows.shape[0], generator=self.generator, dtype=torch.float64)
        keys, chosen = keys.sort()
        keys, chosen = keys[: self.size], chosen[: self.size]  # no more than that can stay
        rows = rows[chosen.to(rows.device)].cpu()
        kept = self.kept[group]
        if kept is not None:
            keys, chosen = torch.cat((self.keys[group], keys)).sort()
            rows = torch.cat((kept, rows))[chosen[: self.size]]
        self.keys[group], self.kept[group] = keys[: self.size], rows

    def seen(self) -> tuple[Any, ...]:
        rows = [None if each is None else (each.dtype, each.double().tolist()) for each in self.kept]
        return self.batches, [each.tolist() for each in self.keys], rows

    def take(self, parts: list[Any]) -> None:
        self.batches = sum(batches for batches, _, _ in parts)
        for group in range(self.groups):
            given = [(keys[group], *rows[group]) for _, keys, rows in parts if rows[group] is not None]
            if given:
                # The processes drew the same numbers: those of equal ones go by the order of the processes.
                keys = torch.tensor([key for each in given for key in each[0]], dtype=torch.float64)
                kept = torch.tensor([row for each in given for row in each[2]], dtype=given[0][1])
                self.keys[group], chosen = keys.sort(stable=True)
                self.keys[group], self.kept[group] = self.keys[group][: self.size], kept[chosen[: self.size]]

    def ranges(self) -> list[float]:
        found: list[float] = []
        for kept in self.kept:
            parts = [] if kept is None else self.parts(kept)
            found += [quantile_of(each, self.quantile) for each in parts] or [0.0] * self.tiles
        return found


def quantile_of(x: Tensor, quantile: float) -> float:
    """The quantile of |x| over all elements, interpolated linearly; unlike torch.quantile, of any number of them."""
    magnitudes = x.abs().flatten()
    place = quantile * (magnitudes.numel() - 1)
    below = min(int(place), magnitudes.numel() - 1)
    low = float(magnitudes.kthvalue(below + 1).values)
    if place == below:
        return low
    return low + (float(magnitudes.kthvalue(below + 2).values) - low) * (place - below)


def _deviation(part: Tensor) -> float:
    wide = part.double() if part.dtype is torch.float64 else part.float()
    if wide.numel() < 2:
        return 0.0
    found = float(wide.std())
    if math.isfinite(found):
        return found
    # The elements are finite, their squares are not: from 1.8e19 on in float32 on a GPU.
    scale = float(wide.abs().max())
    return float((wide / scale).std()) * scale


def observer_of(
    kind: InputRangeCalibrationType, layer: AnalogLayer, quantile: float, max_samples: int, std_alpha: float | None
) -> Observer:
    if kind is InputRangeCalibrationType.MOVING_STD:
        alpha = layer.rpu_config.pre_post.input_range.init_std_alpha if std_alpha is None else std_alpha
        return _Mean(layer, lambda part: alpha * _deviation(part))
    if kind is InputRangeCalibrationType.MOVING_QUANTILE:
        return _Mean(layer, lambda part: quantile_of(part, quantile))
    if kind is InputRangeCalibrationType.CACHE_QUANTILE:
        return _Sample(layer, quantile, max_samples)
    return _Largest(layer)
