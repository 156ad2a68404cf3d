"""Reading configurations of aihwkit-lightning: here from stand-ins, in tests/parity from the real one."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import asdict, dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from triptych.analog.config import AnalogConfig
from triptych.analog.lightning import from_lightning
from triptych.errors import ArgumentError


class Noise(Enum):
    NONE = "None"
    PER_CHANNEL = "AddNormalPerChannel"


class Quantization(Enum):
    NONE = "None"
    PER_CHANNEL = "DiscretizePerChannel"


class Clip(Enum):
    NONE = "None"
    GAUSSIAN = "LayerGaussian"


class Old(Enum):
    NONE = "None"
    BOTH = "DiscretizeAddNormal"


@dataclass
class IO:
    inp_res: float = -1
    out_noise: float = 0.0
    out_bound: float = 0.0
    out_res: float = -1
    out_asymmetry: float = 0.0  # a setting that Triptych does not have


@dataclass
class Modifier:
    std_dev: float = 0.0
    res: float = 0.0
    enable_during_test: bool = False
    type: Old = Old.NONE
    noise_type: Noise = Noise.NONE
    quantization_type: Quantization = Quantization.NONE


@dataclass
class ClipParameter:
    sigma: float = -1.0
    type: Clip = Clip.NONE


@dataclass
class Range:
    enable: bool = False
    decay: float = 0.001
    init_from_data: int = 100


@dataclass
class PrePost:
    input_range: Range = field(default_factory=Range)


@dataclass
class Config:
    forward: IO = field(default_factory=IO)
    clip: ClipParameter = field(default_factory=ClipParameter)
    modifier: Modifier = field(default_factory=Modifier)
    pre_post: PrePost = field(default_factory=PrePost)
    drift: list[int] = field(default_factory=list)  # another


def in_use() -> Config:
    return Config(
        forward=IO(inp_res=254, out_bound=14, out_res=254),
        clip=ClipParameter(2.5, Clip.GAUSSIAN),
        modifier=Modifier(std_dev=0.03, noise_type=Noise.PER_CHANNEL),
        pre_post=PrePost(Range(enable=True, decay=0.01, init_from_data=500)),
    )


CHANGED = {
    "forward.inp_res": 254.0,
    "forward.out_bound": 14.0,
    "forward.out_res": 254.0,
    "clip.sigma": 2.5,
    "clip.type": "LayerGaussian",
    "modifier.std_dev": 0.03,
    "modifier.noise_type": "AddNormalPerChannel",
    "pre_post.input_range.enable": True,
    "pre_post.input_range.decay": 0.01,
    "pre_post.input_range.init_from_data": 500,
}


def without_enums(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: without_enums(value) for name, value in data.items() if name not in ("drift", "out_asymmetry")}
    return data.value if isinstance(data, Enum) else data


def test_defaults_are_defaults() -> None:
    assert from_lightning(Config()) == AnalogConfig()


def test_reads_objects_and_leaves_them_as_they_are() -> None:
    config = in_use()
    before = copy.deepcopy(config)
    assert from_lightning(config).changed() == CHANGED
    assert config == before


def test_reads_dictionaries_with_enums_or_plain_values() -> None:
    plain = without_enums(asdict(in_use()))
    assert from_lightning(plain).changed() == CHANGED
    assert from_lightning(json.loads(json.dumps(plain))).changed() == CHANGED
    assert from_lightning(from_lightning(in_use()).to_dict()).changed() == CHANGED


def test_reads_objects_that_are_no_dataclasses() -> None:
    config = SimpleNamespace(forward=SimpleNamespace(inp_res=30), pre_post=PrePost(Range(enable=True)))
    assert from_lightning(config).changed() == {"forward.inp_res": 30.0, "pre_post.input_range.enable": True}


def test_what_is_off_there_is_off_here() -> None:
    config = Config(
        forward=IO(inp_res=0, out_res=-3, out_bound=-1.0),
        clip=ClipParameter(sigma=-7.0),
        modifier=Modifier(res=-1.0),
    )
    assert from_lightning(config) == AnalogConfig()


@pytest.mark.parametrize(
    ("old", "noise", "quantization"),
    [
        ("Discretize", "None", "Discretize"),
        ("DiscretizePerChannel", "None", "DiscretizePerChannel"),
        ("AddNormal", "AddNormal", "None"),
        ("AddNormalPerChannel", "AddNormalPerChannel", "None"),
        ("DiscretizeAddNormal", "AddNormal", "Discretize"),
        ("DiscretizeAddNormalPerChannel", "AddNormalPerChannel", "DiscretizePerChannel"),
    ],
)
def test_a_modifier_of_version_1_becomes_a_pair(old: str, noise: str, quantization: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"type='{old}' is deprecated"):
        modifier = from_lightning({"modifier": {"type": old, "res": 254, "std_dev": 0.1}}).modifier
    assert (modifier.noise_type.value, modifier.quantization_type.value) == (noise, quantization)
    assert modifier.res == 254


def test_a_modifier_that_its_layers_have_adjusted_already() -> None:
    adjusted = {"type": "AddNormal", "noise_type": "AddNormal", "std_dev": 0.1}
    with pytest.warns(DeprecationWarning, match="type='AddNormal' is deprecated"):
        assert from_lightning({"modifier": adjusted}).modifier.noise_type.value == "AddNormal"


def test_noise_in_evaluation_is_not_there_any_more() -> None:
    with pytest.warns(DeprecationWarning, match="enable_during_test"):
        from_lightning({"modifier": {"enable_during_test": True}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_lightning({"modifier": {"enable_during_test": False, "type": "None"}})


def test_settings_that_triptych_does_not_have() -> None:
    config = in_use()
    config.forward.out_asymmetry = 0.25
    config.drift.append(3)
    with pytest.raises(ArgumentError) as caught:
        from_lightning(config)
    assert str(caught.value) == (
        "from_lightning: Triptych has no setting for forward.out_asymmetry = 0.25, drift = [3]. Set each to its default, or leave it out, if the layers can do without."
    )
    with pytest.raises(ArgumentError, match=r"has no setting for forward\.ir_drop = 1"):
        from_lightning({"forward": {"ir_drop": 1}})


@pytest.mark.parametrize("nothing", [None, 3, {}, {"forwards": {}}, SimpleNamespace()])
def test_what_is_no_configuration(nothing: Any) -> None:
    with pytest.raises(ArgumentError, match="that has none of forward, clip, modifier, mapping, pre_post"):
        from_lightning(nothing)


def test_contradictions_are_said_at_once() -> None:
    with pytest.raises(ArgumentError, match=r"forward\.inp_res is 254.0 but pre_post\.input_range\.enable is False"):
        from_lightning(Config(forward=IO(inp_res=254)))
    with pytest.raises(ArgumentError, match="std_dev is nan"):
        from_lightning(Config(modifier=Modifier(std_dev=float("nan"))))
    with pytest.raises(ArgumentError, match="forward"):
        from_lightning({"forward": 3, "clip": {"sigma": 1.0}})
    with pytest.raises(ArgumentError, match=r"sigma is -1\.0"):
        from_lightning({"clip": {"type": "LayerGaussian"}})
