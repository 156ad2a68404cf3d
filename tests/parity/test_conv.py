"""The analog convolutions against the reference, where it has them: one group, zeros padding, dilation in 2-D only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grid
import pytest
import torch
from comparing import Worst
from peer import twins
from running import backends_that_ran, ran, train
from torch import nn

import triptych
from triptych.analog import AnalogConfig, AnalogConv1d, AnalogConv2d, AnalogConv3d

pytestmark = pytest.mark.parity
KINDS: dict[type[nn.Module], int] = {AnalogConv1d: 1, AnalogConv2d: 2, AnalogConv3d: 3}
GEOMETRIES: tuple[dict[str, Any], ...] = (
    {"kernel_size": 3},
    {"kernel_size": 2, "stride": 2, "padding": 1},
    {"kernel_size": 3, "padding": 1, "stride": 2},
    {"kernel_size": 1},
)
PLANAR: tuple[dict[str, Any], ...] = (
    {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 1), "dilation": (2, 1)},
    {"kernel_size": 2, "dilation": 2},
)
SIDES = {1: (6,), 2: (4, 3), 3: (3, 3, 3)}
CHANNELS = {1: 4, 2: 3, 3: 2}


@dataclass(frozen=True)
class ConvCase:
    """A convolution, the configuration of one of the grid's cases, and whether there is a batch."""

    kind: type[nn.Module]
    geometry: dict[str, Any]
    case: grid.Case
    batched: bool

    def __str__(self) -> str:
        geometry = ",".join(f"{name}={value}" for name, value in self.geometry.items())
        return f"{self.kind.__name__}-{geometry}-{self.case}{'' if self.batched else '-unbatched'}"

    @property
    def arguments(self) -> dict[str, Any]:
        channels = CHANNELS[KINDS[self.kind]]
        return {"in_channels": channels, "out_channels": 5, "bias": self.case["bias"], **self.geometry}

    @property
    def config(self) -> AnalogConfig:
        inputs = self.kind(**self.arguments).weight[0].numel()  # type: ignore[operator]
        size = {"one": -1, "even": max(1, inputs // 2), "uneven": max(1, inputs // 3 + 1)}[self.case["tiles"]]
        return self.case.config.replaced("mapping.max_input_size", size)

    @property
    def shape(self) -> tuple[int, ...]:
        dimensions = KINDS[self.kind]
        shape = (CHANNELS[dimensions], *SIDES[dimensions])
        return (1 + self.case.number % 2, *shape) if self.batched else shape


def cases(step: int, offset: int = 0) -> list[ConvCase]:
    made = []
    for kind, dimensions in KINDS.items():
        geometries = GEOMETRIES + PLANAR if dimensions == 2 else GEOMETRIES
        for index, case in enumerate(grid.cases()[offset + dimensions :: step]):
            made.append(ConvCase(kind, geometries[index % len(geometries)], case, batched=index % 3 != 0))
    return made


def run(case: ConvCase, backend: str) -> None:
    theirs, ours = twins(case.kind, case.arguments, case.config, seed=case.case.number)
    before = triptych.report()

    def draw(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(case.shape, generator=generator)

    with triptych.use(backend):
        train(theirs, ours, draw, case.case.number, grid.CALIBRATION + 1, Worst())
    assert backends_that_ran(before) == {backend}
    assert ran(before, "analog_linear", "backward", backend)


@pytest.mark.parametrize("case", cases(10), ids=str)
def test_torch(case: ConvCase) -> None:
    run(case, "torch")


@pytest.mark.parametrize("case", cases(60), ids=str)
def test_cuda(case: ConvCase) -> None:
    """Its C++ kernels for the CPU."""
    run(case, "cuda")


@pytest.mark.parametrize("case", cases(120, 40), ids=str)
def test_triton(case: ConvCase) -> None:
    """In Triton's interpreter."""
    run(case, "triton")
