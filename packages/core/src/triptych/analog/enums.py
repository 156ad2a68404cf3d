"""The words of an analog configuration. Members and values are those of aihwkit-lightning 2.1; a value is also accepted
as a plain string wherever a member is."""

from __future__ import annotations

from enum import Enum


class WeightNoiseInjectionType(Enum):
    """Gaussian noise on the weights, drawn anew in each forward pass of training."""

    NONE = "None"
    """No noise."""

    ADD_NORMAL = "AddNormal"
    """Relative to the largest weight of the tile."""

    ADD_NORMAL_PER_CHANNEL = "AddNormalPerChannel"
    """Relative to the largest weight of the tile that leads to the same output."""


class WeightQuantizationType(Enum):
    """Discretisation of the weights, in training and evaluation."""

    NONE = "None"
    """No discretisation."""

    DISCRETIZE = "Discretize"
    """One step a tile."""

    DISCRETIZE_PER_CHANNEL = "DiscretizePerChannel"
    """One step for each tile and output."""


class WeightClipType(Enum):
    """How weights are kept small."""

    NONE = "None"
    """Not at all."""

    LAYER_GAUSSIAN = "LayerGaussian"
    """After each optimiser step, to sigma standard deviations of the whole matrix."""

    LAYER_GAUSSIAN_PER_CHANNEL = "LayerGaussianPerChannel"
    """After each optimiser step, to sigma standard deviations of the weights of each output."""

    LEARNABLE_PER_CHANNEL = "LearnablePerChannel"
    """In the forward pass, to a learned bound for each tile and output (LSQ, https://arxiv.org/abs/1902.08153)."""


OLD_MODIFIERS: dict[str, tuple[WeightNoiseInjectionType, WeightQuantizationType]] = {
    "None": (WeightNoiseInjectionType.NONE, WeightQuantizationType.NONE),
    "Discretize": (WeightNoiseInjectionType.NONE, WeightQuantizationType.DISCRETIZE),
    "DiscretizePerChannel": (WeightNoiseInjectionType.NONE, WeightQuantizationType.DISCRETIZE_PER_CHANNEL),
    "AddNormal": (WeightNoiseInjectionType.ADD_NORMAL, WeightQuantizationType.NONE),
    "AddNormalPerChannel": (WeightNoiseInjectionType.ADD_NORMAL_PER_CHANNEL, WeightQuantizationType.NONE),
    "DiscretizeAddNormal": (WeightNoiseInjectionType.ADD_NORMAL, WeightQuantizationType.DISCRETIZE),
    "DiscretizeAddNormalPerChannel": (
        WeightNoiseInjectionType.ADD_NORMAL_PER_CHANNEL,
        WeightQuantizationType.DISCRETIZE_PER_CHANNEL,
    ),
}
"""What the one name of version 1 (`modifier.type`) is in the pair of version 2: noise and quantisation."""
