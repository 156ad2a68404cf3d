"""What memory cells make of the weights that are programmed into them: noise and drift.

A weight is stored as the conductance of a pair of cells, one for each sign, of which the other is at zero. With g in
[0, 1] its magnitude relative to wmax, the largest weight of the same tile that leads to the same output:

    noise   w + strength * wmax * N(0, 1)                         the cell is not quite what was asked for
    drift   w * (t / 20 s)^-nu,  nu = |mu + sigma * N(0, 1)|      drawn for each cell
            mu    = clamp(0.0244 - 0.0155 ln g, 0.049, 0.1)
            sigma = clamp(-0.0059 - 0.0125 ln g, 0.008, 0.045)

The drift is the fit to measured phase-change memory of Nandakumar et al., "Phase-Change Memory Models for Deep Learning
Training and Inference" (ICECS 2019), in the form that IBM's aihwkit gives it (PCMLikeNoiseModel); its read noise is
left out. What all cells of a layer lose together is compensated, as in Joshi et al., "Accurate deep neural network
inference using computational phase-change memory" (Nature Communications 11, 2020): one factor for each layer brings
the mean magnitude back to where it was. What remains is that cells drift differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from triptych.analog import AnalogLayer, named_analog_layers
from triptych.ops.analog_weight import analog_weight
from triptych.ops.tile_abs_max import tile_abs_max

FIRST_READ = 20.0
"""Seconds after programming from which drift counts."""

Change = Callable[[AnalogLayer, Tensor, torch.Generator], Tensor]
"""What becomes of a weight of a layer: another tensor."""


def noise(strength: float) -> Change:
    """Programming noise, with the ops' own generator of normal numbers."""

    def change(layer: AnalogLayer, weight: Tensor, generator: torch.Generator) -> Tensor:
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), generator=generator).to(weight.device)
        tiles, name = layer.tiles, layer.layer_name
        return analog_weight(weight, None, seed, tiles=tiles, noise="per_channel", std_dev=strength, layer=name)[0]

    return change


def drift(seconds: float) -> Change:
    """The weights so long after programming, compensated."""

    def change(layer: AnalogLayer, weight: Tensor, generator: torch.Generator) -> Tensor:
        largest = tile_abs_max(weight, tiles=layer.tiles, layer=layer.layer_name)  # [tiles, outputs]
        sizes = torch.tensor(layer.in_sizes, device=weight.device)
        conductance = weight.abs() / largest.clamp(min=1e-30).t().repeat_interleave(sizes, dim=1)
        log = conductance.clamp(min=1e-7).log()
        normal = torch.randn(weight.shape, generator=generator).to(weight.device)
        mean, deviation = (0.0244 - 0.0155 * log).clamp(0.049, 0.1), (-0.0059 - 0.0125 * log).clamp(0.008, 0.045)
        drifted = weight * (max(seconds, FIRST_READ) / FIRST_READ) ** -(mean + deviation * normal).abs()
        return drifted * (weight.abs().sum() / drifted.abs().sum().clamp(min=1e-30))

    return change


@contextmanager
def programmed(model: nn.Module, changes: Sequence[Change], draw: int) -> Iterator[None]:
    """For the block, the weights of the analog layers are what cells make of them.

    Args:
        changes: what happens to them, one after the other: `noise(...)`, `drift(...)`.
        draw: which of all chips this is: the seed of what is random.
    """
    generators = [torch.Generator().manual_seed(draw) for _ in changes]
    ideal = {layer: layer.weight.detach().clone() for _, layer in named_analog_layers(model)}
    try:
        with torch.no_grad():
            for layer, weight in ideal.items():
                for change, generator in zip(changes, generators, strict=True):
                    weight = change(layer, weight, generator)
                layer.weight.copy_(weight)
        yield
    finally:
        with torch.no_grad():
            for layer, weight in ideal.items():
                layer.weight.copy_(weight)
