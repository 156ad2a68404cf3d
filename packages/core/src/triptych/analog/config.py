"""The configuration of an analog layer: what its crossbars do to inputs, weights and outputs.

Names, meanings and defaults are those of aihwkit-lightning 2.1, so that its users can move. Unlike there, a
configuration is checked when it is made and does not change afterwards: `config.replaced("modifier.std_dev", 0.05)`
makes another. It can be hashed, compared, copied, pickled and, with `to_dict` and `from_dict`, written as JSON.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar, TypeVar

from triptych.analog.enums import OLD_MODIFIERS, WeightClipType, WeightNoiseInjectionType, WeightQuantizationType
from triptych.analog.settings import FLAG, Settings, member, number, part, refuse_changes, setting, unknown, whole
from triptych.errors import ArgumentError, nearest

S = TypeVar("S", bound=Settings)

_RESOLUTION = number(
    "a finite number: -1 or 0 for none, else how many levels there are (254 for 8 bits) or the inverse of that",
    lambda value: value >= 0 or value == -1,
)
_NOT_NEGATIVE = number("a finite number, 0 or greater", lambda value: value >= 0)
_POSITIVE = number("a finite number greater than 0", lambda value: value > 0)


@dataclass(frozen=True)
class IOParameters(Settings):
    """What happens to the inputs (DAC) and outputs (noise, ADC) of each tile.

    Attributes:
        inp_res: how many levels the DAC has, or the inverse of that; -1 means no DAC.
        out_noise: standard deviation of the noise on the outputs, relative to input range times largest weight.
        out_noise_per_channel: whether that is the largest weight of each output, rather than of the tile.
        out_bound: where the ADC saturates, relative to input range times largest weight; 0 means no ADC.
        out_res: how many levels the ADC has, or the inverse of that; -1 means that it only saturates.
    """

    inp_res: float = setting(-1.0, _RESOLUTION)
    out_noise: float = setting(0.0, _NOT_NEGATIVE)
    out_noise_per_channel: bool = setting(False, FLAG)
    out_bound: float = setting(0.0, _NOT_NEGATIVE)
    out_res: float = setting(-1.0, _RESOLUTION)


@dataclass(frozen=True)
class WeightModifierParameter(Settings):
    """What happens to the weights in the forward pass; the Parameter itself is never changed.

    Attributes:
        std_dev: standard deviation of the noise, relative to the largest weight; training only.
        res: how many levels weights are discretised to, or the inverse of that.
        noise_type, quantization_type: whether to do either, and by which maximum.

    Args:
        type, enable_during_test: of version 1 of aihwkit-lightning, deprecated: a name such as "DiscretizeAddNormal",
            which stands for a pair of types, and noise in evaluation, which there is none.
    """

    std_dev: float = setting(0.0, _NOT_NEGATIVE)
    res: float = setting(0.0, _NOT_NEGATIVE)
    noise_type: WeightNoiseInjectionType = field(
        default=WeightNoiseInjectionType.NONE, metadata={"rule": member(WeightNoiseInjectionType)}
    )
    quantization_type: WeightQuantizationType = field(
        default=WeightQuantizationType.NONE, metadata={"rule": member(WeightQuantizationType)}
    )
    type: InitVar[Any] = field(default=None, kw_only=True)
    enable_during_test: InitVar[Any] = field(default=None, kw_only=True)

    def __post_init__(self, type: Any, enable_during_test: Any) -> None:
        super().__post_init__()
        if type is not None:
            self._take_old_type(type.value if isinstance(type, Enum) else type)
        if enable_during_test is not None:
            if not isinstance(enable_during_test, bool):
                raise ArgumentError(
                    f"WeightModifierParameter: enable_during_test is {enable_during_test!r}. It must be True or False."
                )
            warnings.warn(
                "WeightModifierParameter: enable_during_test is deprecated and has no effect: there is no noise in "
                "evaluation, while weights are discretised there too. Leave it out.",
                DeprecationWarning,
                stacklevel=3,
            )
        if self.quantization_type is not WeightQuantizationType.NONE and self.res == 0:
            raise ArgumentError(
                f"WeightModifierParameter: quantization_type is {self.quantization_type.value!r} but res is 0. Give "
                f"res the number of levels (254 for 8 bits) or its inverse, or set quantization_type to 'None'."
            )

    def _take_old_type(self, name: Any) -> None:
        """Set the pair that one name of version 1 stands for."""
        if not isinstance(name, str) or name not in OLD_MODIFIERS:
            raise ArgumentError(
                f"WeightModifierParameter: type is {name!r}, which is no modifier. {nearest(str(name), OLD_MODIFIERS)}"
            )
        noise, quantization = OLD_MODIFIERS[name]
        warnings.warn(
            f"WeightModifierParameter: type={name!r} is deprecated. Write noise_type={noise.value!r}, "
            f"quantization_type={quantization.value!r}.",
            DeprecationWarning,
            stacklevel=4,
        )
        for setting_name, meant in (("noise_type", noise), ("quantization_type", quantization)):
            given = getattr(self, setting_name)
            if given.value not in ("None", meant.value):
                raise ArgumentError(
                    f"WeightModifierParameter: type is {name!r}, which means {setting_name}={meant.value!r}, but "
                    f"{setting_name} is {given.value!r}. Leave type out."
                )
            object.__setattr__(self, setting_name, meant)


@dataclass(frozen=True)
class WeightClipParameter(Settings):
    """How weights are kept small.

    Attributes:
        sigma: how many standard deviations the Gaussian types leave; -1 while it is not set.
        type: which clipping.
    """

    sigma: float = setting(
        -1.0,
        number("a finite number, greater than 0, or -1 while no clipping uses it", lambda v: v > 0 or v in (-1, 0)),
    )
    type: WeightClipType = field(default=WeightClipType.NONE, metadata={"rule": member(WeightClipType)})

    def __post_init__(self) -> None:
        super().__post_init__()
        gaussian = self.type in (WeightClipType.LAYER_GAUSSIAN, WeightClipType.LAYER_GAUSSIAN_PER_CHANNEL)
        if gaussian and self.sigma <= 0:
            raise ArgumentError(
                f"WeightClipParameter: type is {self.type.value!r} but sigma is {self.sigma}. Give sigma how many "
                f"standard deviations to leave, such as 2.5, or set type to 'None'."
            )


@dataclass(frozen=True)
class MappingParameter(Settings):
    """How a weight matrix is laid onto tiles.

    Attributes:
        max_input_size: the most inputs that a tile has; a wider matrix is split into tiles of nearly equal size. -1
            means one tile of any size.
    """

    max_input_size: int = setting(
        -1, whole("an integer, 1 or greater, or -1 for one tile of any size", lambda n: n > 0 or n == -1)
    )


@dataclass(frozen=True, kw_only=True)
class InputRangeParameter(Settings):
    """The range that inputs are clipped to, one for each tile.

    Attributes:
        enable: whether there is one.
        dynamic: whether it is the largest magnitude of each token, rather than a Parameter.
        learn_input_range: whether the Parameter has a gradient.
        init_value: where it starts.
        init_from_data: over how many batches of training it is first set from the inputs; 0 means never.
        init_std_alpha: to how many of their standard deviations.
        decay: pulls a range down that clips too little.
        input_min_percentage: what clips too little: more than this share of the inputs lies inside.
        fast_mode: follow the extremes of the inputs instead of their deviation, with the plain gradient of a clamp.
        act_range_momentum: how much of the extremes so far is kept, in fast mode; -1 keeps the true extremes.
    """

    enable: bool = setting(False, FLAG)
    dynamic: bool = setting(False, FLAG)
    learn_input_range: bool = setting(True, FLAG)
    init_value: float = setting(3.0, _POSITIVE)
    init_from_data: int = setting(100, whole("an integer, 0 or greater: how many batches", lambda n: n >= 0))
    init_std_alpha: float = setting(3.0, _POSITIVE)
    decay: float = setting(0.001, _NOT_NEGATIVE)
    input_min_percentage: float = setting(0.95, number("a share, from 0 to 1", lambda value: 0 <= value <= 1))
    fast_mode: bool = setting(False, FLAG)
    act_range_momentum: float = setting(
        0.95, number("a share, from 0 to 1, or -1 for the true extremes", lambda value: 0 <= value <= 1 or value == -1)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dynamic and self.fast_mode:
            raise ArgumentError(
                "InputRangeParameter: dynamic and fast_mode are both True. A dynamic range is taken from each token, "
                "that of fast mode from the first batches. Set one of them to False."
            )

    @property
    def is_static(self) -> bool:
        """Whether there is a Parameter that holds the range."""
        return self.enable and not self.dynamic


@dataclass(frozen=True)
class PrePostProcessingParameter(Settings):
    """What is done digitally before and after a tile: the input range."""

    input_range: InputRangeParameter = field(
        default=InputRangeParameter(), metadata={"rule": part(InputRangeParameter)}
    )


@dataclass(frozen=True)
class AnalogConfig(Settings):
    """Everything about the crossbars of a layer. The defaults are ideal crossbars: an ordinary layer."""

    forward: IOParameters = field(default=IOParameters(), metadata={"rule": part(IOParameters)})
    clip: WeightClipParameter = field(default=WeightClipParameter(), metadata={"rule": part(WeightClipParameter)})
    modifier: WeightModifierParameter = field(
        default=WeightModifierParameter(), metadata={"rule": part(WeightModifierParameter)}
    )
    mapping: MappingParameter = field(default=MappingParameter(), metadata={"rule": part(MappingParameter)})
    pre_post: PrePostProcessingParameter = field(
        default=PrePostProcessingParameter(), metadata={"rule": part(PrePostProcessingParameter)}
    )

    PATHS: ClassVar[tuple[str, ...]]
    """The path of each single setting: "forward.inp_res" ... "pre_post.input_range.act_range_momentum"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = list(self._contradictions())
        if problems:
            raise ArgumentError("AnalogConfig: " + " ".join(problems))

    def _contradictions(self) -> Iterator[str]:
        io = self.forward
        if not self.pre_post.input_range.enable:
            needs = (
                ("inp_res", io.inp_res, io.inp_res > 0, "the DAC spreads its levels over the input range", -1),
                ("out_bound", io.out_bound, io.out_bound > 0, "the bound of the ADC is relative to the input range", 0),
                ("out_noise", io.out_noise, io.out_noise > 0, "output noise is relative to the input range", 0),
            )
            for name, value, given, why, off in needs:
                if given:
                    yield (
                        f"forward.{name} is {value} but pre_post.input_range.enable is False: {why}. Set "
                        f"pre_post.input_range.enable to True, or forward.{name} to {off}."
                    )
        if io.out_res > 0 and io.out_bound == 0:
            yield (
                f"forward.out_res is {io.out_res} but forward.out_bound is 0: the ADC spreads its levels over its "
                f"bound. Give forward.out_bound a value, such as 14, or set forward.out_res to -1."
            )
        learned = self.clip.type is WeightClipType.LEARNABLE_PER_CHANNEL
        if learned and self.modifier.quantization_type is WeightQuantizationType.DISCRETIZE:
            yield (
                "clip.type is 'LearnablePerChannel' but modifier.quantization_type is 'Discretize': one step a tile "
                "has no use for a bound for each channel. Set modifier.quantization_type to 'DiscretizePerChannel' or "
                "'None', or clip.type to 'None'."
            )

    def replaced(self, changes: str | Mapping[str, Any], value: Any = None) -> AnalogConfig:
        """The configuration with other values: `replaced("modifier.std_dev", 0.05)`.

        Args:
            changes: the path of a setting or of a group; or several paths with their values, changed together.
            value: of the one path.
        """
        if not isinstance(changes, str | Mapping):
            raise ArgumentError(
                f"AnalogConfig.replaced: changes is a {type(changes).__name__}. It must be a path, such as "
                f"'modifier.std_dev', or a dictionary from paths to values."
            )
        pairs = {changes: value} if isinstance(changes, str) else dict(changes)
        for path in pairs:
            if not isinstance(path, str):
                raise ArgumentError(
                    f"AnalogConfig.replaced: {path!r} is no path. It must be a string, such as 'modifier.std_dev'."
                )
            for group in pairs:
                if isinstance(group, str) and path.startswith(f"{group}."):
                    raise ArgumentError(
                        f"AnalogConfig.replaced: {path!r} lies in {group!r}, which is replaced too. Give the group the "
                        f"value, or call replaced twice."
                    )
        tree: dict[str, Any] = {}
        for path, new in pairs.items():
            *groups, name = path.split(".")
            node = tree
            for group in groups:
                node = node.setdefault(group, {})
            node[name] = new
        return _replaced(self, tree, "")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AnalogConfig:
        """The configuration that `to_dict` wrote. What is left out has its default."""
        return _from_dict(cls, data)

    def changed(self) -> dict[str, Any]:
        """The settings that differ from the defaults, by path, as plain values."""
        return {path: value for path, value in _flat(self.to_dict()).items() if value != _DEFAULTS[path]}


TorchInferenceRPUConfig = AnalogConfig
"""The name that a configuration has in aihwkit-lightning."""


def _replaced(group: S, tree: Mapping[str, Any], path: str) -> S:
    names = [each.name for each in fields(group)]
    news: dict[str, Any] = {}
    for name, value in tree.items():
        if name not in names:
            raise unknown(path.rstrip(".") or "AnalogConfig", name, names)
        old = getattr(group, name)
        if isinstance(value, dict):
            if not isinstance(old, Settings):
                raise ArgumentError(f"{path}{name} is a single setting; it has no {', '.join(map(repr, value))}.")
            value = _replaced(old, value, f"{path}{name}.")
        news[name] = value
    return replace(group, **news)


def _from_dict(kind: type[S], data: Any) -> S:
    if not isinstance(data, Mapping):
        raise ArgumentError(f"{kind.__name__}: {data!r} is no dictionary of settings, as to_dict makes it.")
    known = {each.name: each.default for each in fields(kind)}
    read: dict[str, Any] = {}
    for name, value in data.items():
        if name not in known:
            raise unknown(kind.__name__, name, list(known))
        default = known[name]
        read[name] = _from_dict(type(default), value) if isinstance(default, Settings) else value
    return kind(**read)


def _flat(data: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in data.items():
        flat |= _flat(value, f"{path}{name}.") if isinstance(value, dict) else {path + name: value}
    return flat


_DEFAULTS = _flat(AnalogConfig().to_dict())
AnalogConfig.PATHS = tuple(_DEFAULTS)

refuse_changes(
    IOParameters,
    WeightModifierParameter,
    WeightClipParameter,
    MappingParameter,
    InputRangeParameter,
    PrePostProcessingParameter,
    AnalogConfig,
)
