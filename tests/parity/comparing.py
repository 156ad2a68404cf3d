"""Comparing two float32 results within what float32 arithmetic of the formula explains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from triptych.tiling import tile_slices

UNIT = 2.0**-24
"""The unit roundoff of float32."""


@dataclass
class Worst:
    """The largest deviations so far, by what was compared: in itself, and as a share of what is tolerated."""

    shares: dict[str, float] = field(default_factory=dict)
    deviations: dict[str, float] = field(default_factory=dict)
    compared: int = 0

    def compare(self, name: str, ours: Tensor | None, theirs: Tensor | None, tolerance: Tensor) -> None:
        assert (ours is None) == (theirs is None), f"{name}: only one of the two has it"
        if ours is None or theirs is None:
            return
        theirs = theirs.reshape(ours.shape).double()
        deviation = (ours.double() - theirs).abs()
        tolerance = tolerance.double().expand_as(deviation)
        wrong = ~(deviation <= tolerance)
        if wrong.any():
            at = tuple(int(i) for i in wrong.nonzero()[0])
            raise AssertionError(
                f"{name} at {at}: ours is {ours[at].item()!r}, the reference's {theirs[at].item()!r}, apart by "
                f"{deviation[at].item():.3g}, more than {tolerance[at].item():.3g}; {int(wrong.sum())} of {wrong.numel()} "
                f"elements are wrong"
            )
        share = torch.where(deviation > 0, deviation / tolerance, 0.0)
        if share.numel():
            self.shares[name] = max(self.shares.get(name, 0.0), share.max().item())
            self.deviations[name] = max(self.deviations.get(name, 0.0), deviation.max().item())
            self.compared += share.numel()


@dataclass(frozen=True)
class Tolerances:
    """What is tolerated of each result, from the magnitudes that enter its sums.

    Two computations of a sum of n products, in any order, differ by at most 2 (n + k) roundings of the sum of the products'
    magnitudes, where each factor or the sum itself went through k roundings before or after. k is 48: 21 are those of a
    normal number (`triptych.noise.normal_bound`), a quantiser has 8, an input range that was just calibrated 16.

    Attributes and shapes: R rows, N inputs, C outputs, T tiles. x [R, N] and weight [C, N] as large as what quantisers and noise may
    make of them; g [R, C] the gradient of the output; clipped [R, N] where the gradient of the ranges comes from; full_scale the largest input range times the largest weight.
    """

    x: Tensor
    g: Tensor
    weight: Tensor
    bias: Tensor | None
    ranges: Tensor
    clipped: Tensor
    fast: bool
    full_scale: float
    levels: float

    @property
    def y(self) -> Tensor:
        sums = self.x @ self.weight.T + 2 * len(self.ranges) * self.full_scale
        return _of(self.x.shape[1], sums if self.bias is None else sums + self.bias)

    @property
    def dx(self) -> Tensor:
        return _of(self.g.shape[1], self.g @ self.weight)

    @property
    def dweight(self) -> Tensor:
        return _of(len(self.x), self.g.T @ self.x)

    @property
    def dbias(self) -> Tensor:
        return _of(len(self.g), self.g.sum(0))

    @property
    def drange(self) -> Tensor:
        gx = (self.g @ self.weight) * self.clipped
        sums = torch.stack([gx[:, columns].sum() for columns in self._tiles()])
        if self.fast:
            return _of(int(self.clipped.sum()) + self.g.shape[1], sums)
        return _of(int(self.clipped.sum()) + self.g.shape[1], sums * self.ranges) + relative(8, self.ranges)

    @property
    def dclip(self) -> Tensor:
        """kappa is at most 1 without rounding; with it, kappa Q / L = kappa / 2 is at most the root of L."""
        products = self.g.T @ self.x
        sums = torch.stack([products[:, columns].sum(1) for columns in self._tiles()])
        return _of(len(self.x) + products.shape[1], sums * max(1.0, self.levels**0.5))

    def _tiles(self) -> Any:
        return tile_slices(self.x.shape[1], len(self.ranges))


def _of(count: int, sums: Tensor) -> Tensor:
    return 2 * (count + 48) * UNIT * sums


def relative(roundings: float, value: Tensor) -> Tensor:
    """So many roundings of a value."""
    return roundings * UNIT * value.detach().abs()
