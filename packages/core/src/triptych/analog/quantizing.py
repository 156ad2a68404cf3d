"""quantize_weights: round the weights of a model for good, before they are programmed or exported."""

from __future__ import annotations

from torch import nn

from triptych.analog.layer import named_analog_layers


def quantize_weights(model: nn.Module) -> None:
    """Put in the place of each analog layer's weights what its forward pass makes of them: clipped by the learned clip,
    discretised as `rpu_config.modifier` says, without noise. Layers that do neither are left as they are.

    Parameters stay the same objects and configurations stay as they are, so that the forward pass goes on rounding what
    is already rounded; for an even number of levels that changes nothing but the last bits.
    """
    for _, layer in named_analog_layers(model):
        layer.quantize_weights()
