"""The comparison itself: with one setting changed, or one gradient, it must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import Worst
from peer import twins
from running import train

import triptych
from triptych.analog import (
    AnalogConfig,
    AnalogLinear,
    InputRangeParameter,
    IOParameters,
    MappingParameter,
    PrePostProcessingParameter,
    WeightClipParameter,
    WeightClipType,
    WeightModifierParameter,
    WeightNoiseInjectionType,
    WeightQuantizationType,
)

pytestmark = pytest.mark.parity

FULL = AnalogConfig(
    forward=IOParameters(inp_res=254, out_noise=0.05, out_bound=1.1, out_res=254),
    clip=WeightClipParameter(sigma=1.5, type=WeightClipType.LAYER_GAUSSIAN_PER_CHANNEL),
    modifier=WeightModifierParameter(
        std_dev=0.1,
        res=254,
        noise_type=WeightNoiseInjectionType.ADD_NORMAL,
        quantization_type=WeightQuantizationType.DISCRETIZE,
    ),
    mapping=MappingParameter(max_input_size=9),
    pre_post=PrePostProcessingParameter(
        InputRangeParameter(enable=True, init_from_data=3, init_std_alpha=1.4, decay=0.1, input_min_percentage=0.7)
    ),
)
FAST = FULL.replaced({"pre_post.input_range.fast_mode": True, "pre_post.input_range.act_range_momentum": 0.9})
LEARNED = FULL.replaced({"clip.type": "LearnablePerChannel", "modifier.quantization_type": "DiscretizePerChannel"})

CHANGES: list[tuple[AnalogConfig, str, Any]] = [
    (FULL, "forward.inp_res", 252),
    (FULL, "forward.out_noise", 0.051),
    (FULL, "forward.out_noise_per_channel", True),
    (FULL, "forward.out_bound", 1.11),
    (FULL, "forward.out_res", -1),
    (FULL, "clip.sigma", 1.51),
    (FULL, "clip.type", "LayerGaussian"),
    (FULL, "modifier.std_dev", 0.0999),
    (FULL, "modifier.res", 252),
    (FULL, "modifier.noise_type", "AddNormalPerChannel"),
    (FULL, "modifier.quantization_type", "DiscretizePerChannel"),
    (FULL, "modifier.quantization_type", "None"),
    (FULL, "pre_post.input_range.init_from_data", 2),
    (FULL, "pre_post.input_range.init_std_alpha", 1.4001),
    (FULL, "pre_post.input_range.decay", 0.1001),
    (FULL, "pre_post.input_range.input_min_percentage", 0.99),
    (FAST, "pre_post.input_range.act_range_momentum", 0.901),
    (FAST, "pre_post.input_range.act_range_momentum", -1),
    (LEARNED, "modifier.res", 253),
]


def compare(config: AnalogConfig, change: Callable[[Any], None]) -> None:
    arguments = {"in_features": 23, "out_features": 6}
    theirs, ours = twins(AnalogLinear, arguments, config, seed=5)
    change(ours)
    with triptych.use("torch"):
        train(theirs, ours, lambda generator: torch.randn(5, 23, generator=generator), 5, 5, Worst())


@pytest.mark.parametrize("config", [FULL, FAST, LEARNED], ids=["full", "fast", "learned"])
def test_unchanged(config: AnalogConfig) -> None:
    compare(config, lambda ours: None)


@pytest.mark.parametrize(("config", "path", "value"), CHANGES, ids=[f"{path}={value}" for _, path, value in CHANGES])
def test_a_changed_setting_is_noticed(config: AnalogConfig, path: str, value: Any) -> None:
    def change(ours: Any) -> None:
        ours.rpu_config = config.replaced(path, value)

    with pytest.raises(AssertionError):
        compare(config, change)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (FULL, "weight"),
        (FULL, "bias"),
        (FULL, "input_range"),
        (LEARNED, "learnable_weight_clip"),
        (FAST, "input_range"),
    ],
)
@pytest.mark.parametrize("factor", [1.001, 0.0])
def test_a_changed_gradient_is_noticed(config: AnalogConfig, name: str, factor: float) -> None:
    def change(ours: Any) -> None:
        getattr(ours, name).register_hook(lambda gradient: gradient * factor)

    with pytest.raises(AssertionError, match=f"d {name}"):
        compare(config, change)


def test_a_changed_gradient_of_the_input_is_noticed() -> None:
    def change(ours: Any) -> None:
        ours.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 1.001,))

    with pytest.raises(AssertionError, match="dx"):
        compare(FULL, change)
