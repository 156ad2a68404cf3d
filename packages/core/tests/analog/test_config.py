"""The configuration: what it refuses and how it says so, how it is changed, copied and written."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import triptych
from triptych.analog import (
    AnalogConfig,
    InputRangeParameter,
    IOParameters,
    MappingParameter,
    PrePostProcessingParameter,
    TorchInferenceRPUConfig,
    WeightClipParameter,
    WeightClipType,
    WeightModifierParameter,
    WeightNoiseInjectionType,
    WeightQuantizationType,
)

RANGE = PrePostProcessingParameter(InputRangeParameter(enable=True))

REAL_USE = {
    "forward.inp_res": 254,
    "forward.out_res": 254,
    "forward.out_bound": 14,
    "clip.type": "LayerGaussianPerChannel",
    "clip.sigma": 2.5,
    "modifier.noise_type": "AddNormalPerChannel",
    "modifier.std_dev": 0.03,
    "mapping.max_input_size": 512,
    "pre_post.input_range.enable": True,
    "pre_post.input_range.init_from_data": 500,
    "pre_post.input_range.decay": 0.01,
}


def test_the_defaults_are_those_of_the_peer() -> None:
    assert AnalogConfig().to_dict() == {
        "forward": {
            "inp_res": -1.0,
            "out_noise": 0.0,
            "out_noise_per_channel": False,
            "out_bound": 0.0,
            "out_res": -1.0,
        },
        "clip": {"sigma": -1.0, "type": "None"},
        "modifier": {"std_dev": 0.0, "res": 0.0, "noise_type": "None", "quantization_type": "None"},
        "mapping": {"max_input_size": -1},
        "pre_post": {
            "input_range": {
                "enable": False,
                "dynamic": False,
                "learn_input_range": True,
                "init_value": 3.0,
                "init_from_data": 100,
                "init_std_alpha": 3.0,
                "decay": 0.001,
                "input_min_percentage": 0.95,
                "fast_mode": False,
                "act_range_momentum": 0.95,
            }
        },
    }
    assert TorchInferenceRPUConfig is AnalogConfig


def test_a_configuration_is_a_value() -> None:
    config = AnalogConfig().replaced(REAL_USE)
    assert config == AnalogConfig().replaced(dict(reversed(REAL_USE.items())))
    assert len({config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))}) == 1
    assert AnalogConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.changed() == REAL_USE
    assert AnalogConfig().changed() == {}
    assert AnalogConfig.from_dict({"forward": {}}) == AnalogConfig()
    assert set(REAL_USE) < set(AnalogConfig.PATHS)


def test_replaced_leaves_the_rest_and_the_original() -> None:
    config = AnalogConfig(pre_post=RANGE)
    other = config.replaced("forward.inp_res", 254).replaced("mapping", MappingParameter(8))
    assert other.changed() == {
        "forward.inp_res": 254.0,
        "mapping.max_input_size": 8,
        "pre_post.input_range.enable": True,
    }
    assert config == AnalogConfig(pre_post=RANGE)


def test_a_value_of_an_enumeration_is_as_good_as_its_member() -> None:
    assert WeightClipParameter(2.5, "LayerGaussian") == WeightClipParameter(2.5, WeightClipType.LAYER_GAUSSIAN)  # type: ignore[arg-type]
    modifier = WeightModifierParameter(0.1, 254, "AddNormal", "Discretize")  # type: ignore[arg-type]
    assert modifier.noise_type is WeightNoiseInjectionType.ADD_NORMAL
    assert modifier.quantization_type is WeightQuantizationType.DISCRETIZE


@pytest.mark.parametrize("value", [254, 254.0, np.float32(254), np.int64(254), Fraction(254)])
def test_any_real_number_is_a_number(value: Any) -> None:
    assert IOParameters(inp_res=value) == IOParameters(inp_res=254.0)
    assert type(IOParameters(inp_res=value).inp_res) is float


NO_NUMBERS = [float("nan"), float("inf"), -float("inf"), True, "254", None, torch.tensor(254.0), 1 + 0j, 10**400, [254]]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((IOParameters, name) for name in ("inp_res", "out_noise", "out_bound", "out_res")),
        *((WeightModifierParameter, name) for name in ("std_dev", "res")),
        (WeightClipParameter, "sigma"),
        (MappingParameter, "max_input_size"),
        *(
            (InputRangeParameter, name)
            for name in (
                "init_value",
                "init_from_data",
                "init_std_alpha",
                "decay",
                "input_min_percentage",
                "act_range_momentum",
            )
        ),
    ],
)
def test_what_is_no_finite_number_is_refused(kind: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(triptych.ArgumentError, match=f"^{kind.__name__}: {name} is .*It must be "):  # type: ignore[attr-defined]
        kind(**{name: value})


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (IOParameters, "inp_res", [-2, -0.5, -254]),
        (IOParameters, "out_res", [-2]),
        (IOParameters, "out_noise", [-0.1]),
        (IOParameters, "out_bound", [-1]),
        (IOParameters, "out_noise_per_channel", [0, 1, "True", None]),
        (WeightModifierParameter, "std_dev", [-0.1]),
        (WeightModifierParameter, "res", [-1]),
        (WeightModifierParameter, "noise_type", ["add_normal", 1, None, WeightClipType.NONE]),
        (WeightClipParameter, "sigma", [-2.5]),
        (WeightClipParameter, "type", ["layer", WeightNoiseInjectionType.NONE]),
        (MappingParameter, "max_input_size", [0, -2, 2.5, 512.0]),
        (InputRangeParameter, "enable", [1, "yes", None]),
        (InputRangeParameter, "init_value", [0, -3]),
        (InputRangeParameter, "init_from_data", [-1, 2.5, 100.0]),
        (InputRangeParameter, "init_std_alpha", [0, -1]),
        (InputRangeParameter, "decay", [-0.001]),
        (InputRangeParameter, "input_min_percentage", [-0.1, 1.1]),
        (InputRangeParameter, "act_range_momentum", [-0.5, 1.5, -2]),
        (PrePostProcessingParameter, "input_range", [None, {}, IOParameters()]),
        (AnalogConfig, "forward", [None, {}, MappingParameter()]),
    ],
)
def test_what_is_out_of_range_is_refused(kind: Callable[..., Any], name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(triptych.ArgumentError, match=f"{name} is .*It must be "):
            kind(**{name: value})


def make(**changes: Any) -> Callable[[], AnalogConfig]:
    return lambda: AnalogConfig().replaced({path.replace("__", "."): value for path, value in changes.items()})


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: IOParameters(inp_res=float("nan")),
            "IOParameters: inp_res is nan. It must be a finite number: -1 or 0 for none, else how many levels there are (254 for 8 bits) or the inverse of that.",
        ),
        (
            lambda: WeightClipParameter(2.5, "LayerGausian"),  # type: ignore[arg-type]
            "WeightClipParameter: type is 'LayerGausian'. It must be a member of WeightClipType, or its value. Did you mean 'LayerGaussian' or 'LayerGaussianPerChannel'?",
        ),
        (
            make(forward__inp_res=254),
            "AnalogConfig: forward.inp_res is 254.0 but pre_post.input_range.enable is False: the DAC spreads its levels over the input range. Set pre_post.input_range.enable to True, or forward.inp_res to -1.",
        ),
        (
            make(forward__out_bound=14),
            "AnalogConfig: forward.out_bound is 14.0 but pre_post.input_range.enable is False: the bound of the ADC is relative to the input range. Set pre_post.input_range.enable to True, or forward.out_bound to 0.",
        ),
        (
            make(forward__out_noise=0.1),
            "AnalogConfig: forward.out_noise is 0.1 but pre_post.input_range.enable is False: output noise is relative to the input range. Set pre_post.input_range.enable to True, or forward.out_noise to 0.",
        ),
        (
            make(forward__out_res=254, pre_post__input_range__enable=True),
            "AnalogConfig: forward.out_res is 254.0 but forward.out_bound is 0: the ADC spreads its levels over its bound. Give forward.out_bound a value, such as 14, or set forward.out_res to -1.",
        ),
        (
            make(clip__type="LearnablePerChannel", modifier__quantization_type="Discretize", modifier__res=254),
            "AnalogConfig: clip.type is 'LearnablePerChannel' but modifier.quantization_type is 'Discretize': one step a tile has no use for a bound for each channel. Set modifier.quantization_type to 'DiscretizePerChannel' or 'None', or clip.type to 'None'.",
        ),
        (
            make(modifier__quantization_type="Discretize"),
            "WeightModifierParameter: quantization_type is 'Discretize' but res is 0. Give res the number of levels (254 for 8 bits) or its inverse, or set quantization_type to 'None'.",
        ),
        (
            make(clip__type="LayerGaussian"),
            "WeightClipParameter: type is 'LayerGaussian' but sigma is -1.0. Give sigma how many standard deviations to leave, such as 2.5, or set type to 'None'.",
        ),
        (
            lambda: InputRangeParameter(dynamic=True, fast_mode=True),
            "InputRangeParameter: dynamic and fast_mode are both True. A dynamic range is taken from each token, that of fast mode from the first batches. Set one of them to False.",
        ),
        (make(forward__inp_ress=1), "forward has no setting 'inp_ress'. Did you mean 'inp_res'?"),
        (make(froward__inp_res=1), "AnalogConfig has no setting 'froward'. Did you mean 'forward'?"),
        (
            make(pre_post__input_range__enable=True, pre_post=PrePostProcessingParameter()),
            "AnalogConfig.replaced: 'pre_post.input_range.enable' lies in 'pre_post', which is replaced too. Give the group the value, or call replaced twice.",
        ),
        (
            make(pre_post=PrePostProcessingParameter(), pre_post__input_range__enable=True),
            "AnalogConfig.replaced: 'pre_post.input_range.enable' lies in 'pre_post', which is replaced too. Give the group the value, or call replaced twice.",
        ),
        (
            lambda: AnalogConfig().replaced({3: 1}),  # type: ignore[dict-item]
            "AnalogConfig.replaced: 3 is no path. It must be a string, such as 'modifier.std_dev'.",
        ),
        (
            lambda: AnalogConfig().replaced(3),  # type: ignore[arg-type]
            "AnalogConfig.replaced: changes is a int. It must be a path, such as 'modifier.std_dev', or a dictionary from paths to values.",
        ),
        (
            lambda: AnalogConfig.from_dict({3: 1}),  # type: ignore[dict-item]
            "AnalogConfig has no setting 3. Known: clip, forward, mapping, modifier, pre_post.",
        ),
        (make(modifier__res__bits=1), "modifier.res is a single setting; it has no 'bits'."),
        (
            lambda: AnalogConfig.from_dict({"forward": {"out_bond": 14}}),
            "IOParameters has no setting 'out_bond'. Did you mean 'out_bound'?",
        ),
        (
            lambda: AnalogConfig.from_dict({"forward": 14}),
            "IOParameters: 14 is no dictionary of settings, as to_dict makes it.",
        ),
    ],
)
def test_what_is_wrong_is_said(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(triptych.ArgumentError) as raised:
        call()
    assert str(raised.value) == text


def test_all_contradictions_are_named_at_once() -> None:
    with pytest.raises(triptych.ArgumentError) as raised:
        AnalogConfig(forward=IOParameters(inp_res=254, out_res=254))
    assert "forward.inp_res" in str(raised.value)
    assert "forward.out_res" in str(raised.value)


def test_a_setting_cannot_be_set_and_the_error_says_how_to_change_it() -> None:
    config = AnalogConfig()
    with pytest.raises(dataclasses.FrozenInstanceError) as raised:
        config.forward.inp_res = 254  # type: ignore[misc]
    assert str(raised.value) == (
        "IOParameters.inp_res cannot be set: a configuration does not change once it is made. Make another with "
        "config.replaced(path, value), for example config.replaced('modifier.std_dev', 0.05), and hand that to a layer "
        "with layer.rpu_config = ..."
    )
    with pytest.raises(triptych.ArgumentError, match=r"IOParameters has no setting 'inp_ress'. Did you mean 'inp_res'"):
        config.forward.inp_ress = 254  # type: ignore[attr-defined]
    assert config == AnalogConfig()


@pytest.mark.parametrize(
    ("old", "noise", "quantization"),
    [
        ("None", "None", "None"),
        ("Discretize", "None", "Discretize"),
        ("DiscretizePerChannel", "None", "DiscretizePerChannel"),
        ("AddNormal", "AddNormal", "None"),
        ("AddNormalPerChannel", "AddNormalPerChannel", "None"),
        ("DiscretizeAddNormal", "AddNormal", "Discretize"),
        ("DiscretizeAddNormalPerChannel", "AddNormalPerChannel", "DiscretizePerChannel"),
    ],
)
def test_the_names_of_version_1_stand_for_a_pair(old: str, noise: str, quantization: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"type={old!r} is deprecated. Write noise_type={noise!r}") as warned:
        modifier = WeightModifierParameter(res=254, type=old)
    assert warned[0].filename == __file__
    assert (modifier.noise_type.value, modifier.quantization_type.value) == (noise, quantization)


def test_what_is_wrong_with_a_name_of_version_1_is_said() -> None:
    with pytest.raises(
        triptych.ArgumentError, match=r"type is 'DiscretiseAddNormal', which is no modifier. Did you mean"
    ):
        WeightModifierParameter(type="DiscretiseAddNormal")
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(triptych.ArgumentError, match="Leave type out"),
    ):
        WeightModifierParameter(type="AddNormal", noise_type=WeightNoiseInjectionType.ADD_NORMAL_PER_CHANNEL)
    with pytest.warns(DeprecationWarning, match="enable_during_test is deprecated and has no effect") as warned:
        WeightModifierParameter(enable_during_test=True)
    assert warned[0].filename == __file__
    with pytest.raises(triptych.ArgumentError, match="enable_during_test is 'yes'"):
        WeightModifierParameter(enable_during_test="yes")
