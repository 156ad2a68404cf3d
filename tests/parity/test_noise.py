"""Noise as each of the two draws it by itself: the same distribution.

The seeds are fixed, so a test passes always or never. As statistical statements: with draws that do have the expected
distribution, a mean lies beyond 5 standard errors with probability 6e-7, a standard deviation likewise, and a two-sample
Kolmogorov-Smirnov distance beyond 1.95 sqrt(2 / n) with probability 1e-3.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from peer import twins
from torch import Tensor

import triptych
from triptych.analog import (
    AnalogConfig,
    AnalogLinear,
    InputRangeParameter,
    IOParameters,
    MappingParameter,
    PrePostProcessingParameter,
    WeightModifierParameter,
)

pytestmark = pytest.mark.parity
INPUTS, OUTPUTS, DRAWS = 12, 5, 600
ERRORS = 5.0
BACKENDS = ["torch", "cuda"]


def samples(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """What training forwards add to the output of evaluation, [DRAWS, rows, OUTPUTS], and that output."""
    with torch.no_grad():
        exact = layer.eval()(x)
        layer.train()
        return torch.stack([layer(x) - exact for _ in range(DRAWS)]), exact


def compare(theirs: Any, ours: Any, x: Tensor, scale: Tensor, backend: str) -> None:
    """`scale` [rows, OUTPUTS]: the standard deviation that the noise on the output should have."""
    torch.manual_seed(20)
    with triptych.use(backend):
        mine, my_exact = samples(ours, x)
    other, exact = samples(theirs, x)
    torch.testing.assert_close(my_exact, exact, rtol=1e-5, atol=1e-5)
    for z in (mine / scale, other / scale):
        for part in (z.flatten(), *z.flatten(0, 1).unbind(-1)):  # all, and each channel
            assert abs(part.mean()) < ERRORS / math.sqrt(len(part))
            assert abs(part.std() - 1) < ERRORS / math.sqrt(2 * len(part))
    assert distance((mine / scale).flatten(), (other / scale).flatten()) < 1.95 * math.sqrt(2 / mine.numel())
    fresh = mine.flatten(1)
    neighbours = (fresh[1:] * fresh[:-1]).mean() / fresh.square().mean()
    assert abs(neighbours) < ERRORS / math.sqrt(fresh.numel()), "each forward must draw anew"


def distance(one: Tensor, two: Tensor) -> float:
    """Kolmogorov and Smirnov's: the largest difference of the two distribution functions."""
    one, two = one.sort().values, two.sort().values
    at = torch.cat([one, two])
    share_one = torch.searchsorted(one, at, right=True) / len(one)
    share_two = torch.searchsorted(two, at, right=True) / len(two)
    return (share_one - share_two).abs().max().item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("kind", ["AddNormal", "AddNormalPerChannel"])
def test_weight_noise(kind: str, tiles: int, backend: str) -> None:
    config = AnalogConfig(
        modifier=WeightModifierParameter(std_dev=0.1, noise_type=kind),  # type: ignore[arg-type]
        mapping=MappingParameter(INPUTS // tiles),
    )
    theirs, ours = twins(AnalogLinear, {"in_features": INPUTS, "out_features": OUTPUTS}, config, seed=3)
    # One input at a time: the noise on an output is that on one weight.
    x = torch.eye(INPUTS)
    rows = ours.weight.detach().view(OUTPUTS, tiles, INPUTS // tiles).abs().amax(-1)
    largest = rows if kind == "AddNormalPerChannel" else rows.amax(0, keepdim=True).expand_as(rows)
    compare(theirs, ours, x, 0.1 * largest.T.repeat_interleave(INPUTS // tiles, 0), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_output_noise(dynamic: bool, per_channel: bool, tiles: int, backend: str) -> None:
    range_ = InputRangeParameter(enable=True, dynamic=dynamic, init_value=1.7, init_from_data=0)
    config = AnalogConfig(
        forward=IOParameters(out_noise=0.2, out_noise_per_channel=per_channel),
        mapping=MappingParameter(INPUTS // tiles),
        pre_post=PrePostProcessingParameter(range_),
    )
    theirs, ours = twins(AnalogLinear, {"in_features": INPUTS, "out_features": OUTPUTS}, config, seed=4)
    x = torch.randn(7, INPUTS, generator=torch.Generator().manual_seed(1))
    rows = ours.weight.detach().view(OUTPUTS, tiles, INPUTS // tiles).abs().amax(-1)
    largest = rows if per_channel else rows.amax(0, keepdim=True).expand_as(rows)
    ranges = x.view(7, tiles, -1).abs().amax(-1) if dynamic else torch.full((7, tiles), 1.7)
    # Independent tiles: variances add.
    scale = 0.2 / math.sqrt(tiles) * torch.einsum("rt,ct->rc", ranges.square(), largest.square()).sqrt()
    compare(theirs, ours, x, scale, backend)
