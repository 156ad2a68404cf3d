"""Configurations of aihwkit-lightning, read without importing it: by the names of their settings.

What its layers ignore is left out: resolutions and bounds of 0 or less, a `sigma` that no clip type uses. What Triptych
does not have is an error, unless it is at its default and so changes nothing.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from triptych.analog.config import AnalogConfig, WeightModifierParameter
from triptych.analog.settings import Settings
from triptych.errors import ArgumentError

_OLD = {"type": "None", "enable_during_test": False}
"""Settings of the modifier that version 1 had, with the value that says nothing."""
_OFF = {
    "forward.inp_res": -1.0,
    "forward.out_res": -1.0,
    "forward.out_bound": 0.0,
    "forward.out_noise": 0.0,
    "mapping.max_input_size": -1,
}
"""Settings that any number of 0 or less switches off there, with what does so here."""


def from_lightning(config: object) -> AnalogConfig:
    """The configuration that means what a `TorchInferenceRPUConfig` of aihwkit-lightning means.

    Args:
        config: one of versions 1 and 2, or the same as nested dictionaries. It is not changed.

    Returns:
        A configuration of its own. `modifier.type` of version 1 becomes the pair of version 2, and a DeprecationWarning
        says so.

    Raises:
        ArgumentError: it has settings that Triptych does not have, a value that makes no sense, or settings that
            contradict each other; it is no configuration.
    """
    unknown: list[str] = []
    data = _read(config, AnalogConfig(), "", unknown)
    if not any(isinstance(group, dict) for group in data.values()):
        names = ", ".join(each.name for each in dataclasses.fields(AnalogConfig))
        raise ArgumentError(
            f"from_lightning: the configuration is a {type(config).__name__} that has none of {names}. It must be a "
            f"TorchInferenceRPUConfig of aihwkit-lightning, or the same as nested dictionaries."
        )
    if unknown:
        raise ArgumentError(
            f"from_lightning: Triptych has no setting for {', '.join(unknown)}. Set each to its default, or leave it "
            f"out, if the layers can do without."
        )
    _leave_out_what_is_off(data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        modifier = WeightModifierParameter(**data.get("modifier", {}))
    for each in caught:
        warnings.warn(f"from_lightning: {each.message}", DeprecationWarning, stacklevel=2)
    return AnalogConfig.from_dict({**data, "modifier": modifier.to_dict()})


def _read(group: object, known: Settings, path: str, unknown: list[str]) -> dict[str, Any]:
    """The settings of a group as plain data. Adds to `unknown` what `known` has no place for."""
    places = {each.name: getattr(known, each.name) for each in dataclasses.fields(known)}
    data: dict[str, Any] = {}
    for name, value, default in _settings(group):
        plain = value.value if isinstance(value, Enum) else value
        place = places.get(name)
        if isinstance(place, Settings) and (isinstance(value, Mapping) or hasattr(value, "__dict__")):
            data[name] = _read(value, place, f"{path}{name}.", unknown)
        elif name in places and not isinstance(place, Settings):
            data[name] = plain
        elif path == "modifier." and name in _OLD:
            if plain != _OLD[name]:
                data[name] = plain
        elif value != default:
            unknown.append(f"{path}{name} = {plain!r}")
    return data


_NO_DEFAULT = object()


def _settings(group: object) -> Iterator[tuple[str, Any, Any]]:
    """Names, values and defaults of a group's settings: of a dictionary, a dataclass or any other object."""
    if isinstance(group, Mapping):
        yield from ((str(name), value, _NO_DEFAULT) for name, value in group.items())
        return
    defaults: dict[str, Any] = {}
    if dataclasses.is_dataclass(group):
        for each in dataclasses.fields(group):
            make = each.default_factory
            defaults[each.name] = each.default if make is dataclasses.MISSING else make()
    names = dict.fromkeys((*defaults, *getattr(group, "__dict__", {})))
    for name in names:
        if hasattr(group, name):
            yield name, getattr(group, name), defaults.get(name, _NO_DEFAULT)


def _leave_out_what_is_off(data: dict[str, Any]) -> None:
    for path, off in _OFF.items():
        group, name = path.split(".")
        value = data.get(group, {}).get(name)
        if isinstance(value, int | float) and value <= 0:
            data[group][name] = off
    clip, modifier = data.get("clip", {}), data.get("modifier", {})
    gaussian = str(clip.get("type")).startswith("LayerGaussian")
    discretises = any(str(modifier.get(name)).startswith("Discretize") for name in ("quantization_type", "type"))
    for group, name, is_used in ((clip, "sigma", gaussian), (modifier, "res", discretises)):
        value = group.get(name)
        if isinstance(value, int | float) and value <= 0 and not is_used:
            del group[name]
