"""Configurations and checkpoints of the real aihwkit-lightning."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import grid
import pytest
import torch
from peer import LAYERS, config_of, configs, parameters, twins
from torch import nn

import aihwkit_lightning  # isort: skip (peer skips where it is not installed)
from triptych.analog import AnalogConfig, AnalogConv1d, AnalogConv2d, AnalogConv3d, AnalogLinear
from triptych.analog.lightning import from_lightning
from triptych.errors import ArgumentError

pytestmark = pytest.mark.parity


def test_the_reference_is_the_version_that_is_meant() -> None:
    assert aihwkit_lightning.__version__ == "2.1.0"


def test_the_defaults_are_the_same() -> None:
    assert from_lightning(configs.TorchInferenceRPUConfig()) == AnalogConfig()


@pytest.mark.parametrize("case", grid.cases()[::4], ids=str)
def test_a_configuration_comes_back_as_it_was(case: grid.Case) -> None:
    theirs = config_of(case.config)
    before = copy.deepcopy(theirs)
    assert from_lightning(theirs) == case.config
    assert theirs == before


def test_every_setting_of_the_reference_is_known() -> None:
    theirs = configs.TorchInferenceRPUConfig()
    names = {
        f"{group}.{name}"
        for group in ("forward", "clip", "modifier", "mapping")
        for name in vars(getattr(theirs, group))
    }
    names |= {f"pre_post.input_range.{name}" for name in vars(theirs.pre_post.input_range)}
    assert names == {*AnalogConfig.PATHS, "modifier.type", "modifier.enable_during_test"}


@pytest.mark.parametrize("kind", list(parameters.WeightModifierType), ids=lambda kind: kind.name)
def test_modifiers_of_version_1_mean_what_they_meant(kind: Any) -> None:
    theirs = configs.TorchInferenceRPUConfig()
    theirs.modifier.type, theirs.modifier.res, theirs.modifier.std_dev = kind, 254, 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = from_lightning(theirs)
        LAYERS[AnalogLinear](3, 2, rpu_config=theirs)  # sets the pair
    assert ours.modifier.noise_type.value == theirs.modifier.noise_type.value
    assert ours.modifier.quantization_type.value == theirs.modifier.quantization_type.value


def test_a_setting_that_only_they_have_is_named() -> None:
    theirs = configs.TorchInferenceRPUConfig()
    theirs.forward.w_noise = 0.1
    with pytest.raises(ArgumentError, match=r"no setting for forward\.w_noise = 0\.1"):
        from_lightning(theirs)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (AnalogLinear, {"in_features": 23, "out_features": 4}),
        (AnalogConv1d, {"in_channels": 8, "out_channels": 4, "kernel_size": 3}),
        (AnalogConv2d, {"in_channels": 3, "out_channels": 4, "kernel_size": 3}),
        (AnalogConv3d, {"in_channels": 3, "out_channels": 4, "kernel_size": 2}),
    ],
)
@pytest.mark.parametrize("case", grid.cases()[5:200:20], ids=str)
def test_their_checkpoint_loads(kind: type[nn.Module], arguments: dict[str, Any], case: grid.Case) -> None:
    theirs, _ = twins(kind, arguments, case.config, seed=1)
    if theirs.input_range is not None:
        theirs.input_range.data.add_(0.25)
        theirs.input_range_update_idx += 2
        theirs.x_min -= 1.5
    state = theirs.state_dict()
    ours = kind(**arguments, rpu_config=case.config)
    # With one tile, its Conv1d writes a learned clip as [out]: it takes whatever has "weight" in its name for a kernel.
    ours.load_state_dict(state)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor.double().flatten(), state[name].double().flatten()), name
