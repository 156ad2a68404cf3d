"""For the tests of weight clipping: the least that is an analog layer, the clipping restated, steps of a few kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from triptych.analog import AnalogConfig, WeightClipParameter, WeightClipType, clipping
from triptych.layers.naming import Layer

SIGMA = 1.5
WHOLE = AnalogConfig(clip=WeightClipParameter(sigma=SIGMA, type=WeightClipType.LAYER_GAUSSIAN))
ROWS = AnalogConfig(clip=WeightClipParameter(sigma=SIGMA, type=WeightClipType.LAYER_GAUSSIAN_PER_CHANNEL))
LEARNED = AnalogConfig(clip=WeightClipParameter(type=WeightClipType.LEARNABLE_PER_CHANNEL))
NONE = AnalogConfig()


class Clipped(Layer):
    """What clipping needs of a layer, and no more: an analog layer without the crossbar."""

    def __init__(
        self, n: int = 8, m: int = 6, config: AnalogConfig = ROWS, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(m, n, generator=generator).to(dtype))
        self.learnable_weight_clip = nn.Parameter(torch.ones(2, m, dtype=dtype)) if config is LEARNED else None
        self.rpu_config = config
        clipping.watch(self)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        clipping.watch(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            clipping.settle(self)
        weight = self.weight if self.learnable_weight_clip is None else self.weight * self.learnable_weight_clip[0, 0]
        return F.linear(x, weight)


def clipped(weight: Tensor, rows: bool = True, sigma: float = SIGMA) -> Tensor:
    """The reference, in float64."""
    exact = weight.detach().double()
    flat = exact.reshape(len(exact), -1)
    mean = flat.mean(1, keepdim=True) if rows else flat.mean()
    squares = (flat - mean).square()
    std = (squares.sum(1, keepdim=True) / (flat.shape[1] - 1) if rows else squares.sum() / (flat.numel() - 1)).sqrt()
    return flat.clamp(-sigma * std, sigma * std).reshape(exact.shape)


def x_of(n: int = 8, rows: int = 5, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def backward(model: nn.Module, seed: int = 1, scale: float = 1.0) -> None:
    (model(x_of(seed=seed, dtype=next(model.parameters()).dtype)).square().sum() * scale).backward()


def pair(config: AnalogConfig = ROWS) -> tuple[Clipped, Clipped]:
    """Two equal layers; the second is clipped by hand, and by nothing else."""
    ours, manual = Clipped(config=config), Clipped(config=config)
    manual.rpu_config = NONE
    clipping.watch(manual)
    return ours, manual


def by_hand(manual: Clipped, config: AnalogConfig) -> None:
    manual.rpu_config = config
    clipping.clip_weights(manual)
    manual.rpu_config = NONE


def assert_same(ours: Clipped, manual: Clipped) -> None:
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, manual.get_parameter(name)), name


def subtract(p: nn.Parameter, lr: float) -> None:
    p.data.sub_(lr * p.grad)  # type: ignore[operator]


def copy_new(p: nn.Parameter, lr: float) -> None:
    with torch.no_grad():
        p.copy_(p - lr * p.grad)  # type: ignore[operator]


def replace_data(p: nn.Parameter, lr: float) -> None:
    p.data = p.data - lr * p.grad  # type: ignore[operator]


PLAIN = [subtract, copy_new, replace_data]
