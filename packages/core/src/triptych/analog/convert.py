"""From a model of torch.nn to one with analog layers, and back.

Layers are converted as objects: the module stays the same one, at every path and for everybody who refers to it, with
the same Parameters (tied ones stay tied), hooks, training mode and attributes. Only its class changes, and what analog
layers have in addition appears. What cannot be converted is refused before anything is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn
from torch.nn.utils import parametrize

from triptych.analog.config import AnalogConfig
from triptych.analog.conv import AnalogConv1d, AnalogConv2d, AnalogConv3d
from triptych.analog.layer import AnalogLayer, check_config, named_analog_layers
from triptych.analog.linear import AnalogLinear
from triptych.errors import ArgumentError, nearest

M = TypeVar("M", bound=nn.Module)
ConversionMap = Mapping[type[nn.Module], Any]
ConfigFunction = Callable[[str, nn.Module, AnalogConfig], AnalogConfig]

CONVERSION_MAP: ConversionMap = {
    nn.Linear: AnalogLinear,
    nn.Conv1d: AnalogConv1d,
    nn.Conv2d: AnalogConv2d,
    nn.Conv3d: AnalogConv3d,
}
"""What is converted to what. Only modules of exactly these classes: a subclass may compute something else."""

_LAZY: dict[type[nn.Module], type[nn.Module]] = {
    nn.LazyLinear: nn.Linear,
    nn.LazyConv1d: nn.Conv1d,
    nn.LazyConv2d: nn.Conv2d,
    nn.LazyConv3d: nn.Conv3d,
}


@dataclass(frozen=True)
class _Step:
    """One module to convert: all its paths, what it becomes, and with which configuration."""

    paths: tuple[str, ...]
    module: nn.Module
    target: Any
    config: AnalogConfig


def convert_to_analog(
    model: M,
    rpu_config: AnalogConfig,
    *,
    conversion_map: ConversionMap | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    specific_rpu_config_fun: ConfigFunction | None = None,
    inplace: bool = False,
) -> M:
    """Convert the linear layers and convolutions of a model to analog ones.

    Modules of subclasses are left alone, such as the output projection of nn.MultiheadAttention, whose weight is used
    without calling it; so are recurrent layers. Make the optimizer afterwards: there may be new Parameters.

    Args:
        model: the root; it may itself be a layer.
        rpu_config: the configuration of every layer.
        conversion_map: what to convert instead: from classes, exactly, to classes with a method
            `from_digital(module, config)`. A subclass that is named here is converted too.
        include: only modules whose path, or that of a module around them, matches one of these globs
            ("encoder", "layers.*.mlp.*"). Each must match something that would be converted.
        exclude: not these. Each must match some module.
        specific_rpu_config_fun: called with (path, module, rpu_config), returns the configuration of that layer.
        inplace: convert the model itself rather than a copy of it.

    Returns:
        The model, or its copy. If the root is a layer of a class with a `from_digital` of its own, what that returned.

    Raises:
        ArgumentError: a module cannot be converted, or a pattern matches nothing. Nothing was converted.
    """
    check_config("convert_to_analog", rpu_config)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"convert_to_analog: model is a {type(model).__name__}. It must be a torch.nn.Module.")
    targets = CONVERSION_MAP if conversion_map is None else _checked_map(conversion_map)
    steps = [
        _Step(paths, module, target, _config_for(paths[0], module, rpu_config, specific_rpu_config_fun))
        for paths, module, target in _chosen(model, targets, include, exclude)
    ]
    if not inplace:  # only now: many a module that cannot be converted cannot be copied either
        model = copy.deepcopy(model)
        steps = [replace(step, module=model.get_submodule(step.paths[0])) for step in steps]
    for step in steps:
        model = _convert(model, step)
    _avoid_nested_tensors(model)
    return model


def convert_to_digital(model: M, inplace: bool = False) -> M:
    """Turn every analog layer of a model back into one of torch.nn, with the weights of its Parameter.

    They are neither clipped by a learned clip nor quantised; call `quantize_weights` before for that.

    Args:
        model: the root; it may itself be a layer.
        inplace: convert the model itself rather than a copy of it.

    Raises:
        ArgumentError: a layer cannot be converted. Nothing was.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"convert_to_digital: model is a {type(model).__name__}. It must be a torch.nn.Module.")
    for path, layer in named_analog_layers(model):
        problem = layer.why_not_back()
        if problem:
            raise ArgumentError(f"convert_to_digital: {path or 'the model'!r} cannot be converted: {problem}")
    if not inplace:
        model = copy.deepcopy(model)
    for _, layer in list(named_analog_layers(model)):
        layer.give_back()
    _return_to_nested_tensors(model)
    return model


# --- which modules --------------------------------------------------------------------------------------------------


def _checked_map(conversion_map: ConversionMap) -> ConversionMap:
    if not isinstance(conversion_map, Mapping):
        raise ArgumentError(
            f"convert_to_analog: conversion_map is a {type(conversion_map).__name__}. It must be a dictionary from "
            f"classes of modules to classes of analog layers."
        )
    for digital, analog in conversion_map.items():
        if not (isinstance(digital, type) and issubclass(digital, nn.Module) and hasattr(analog, "from_digital")):
            raise ArgumentError(
                f"convert_to_analog: conversion_map has {digital!r}: {analog!r}. It must lead from a class of modules "
                f"to a class with a method from_digital(module, rpu_config), as triptych.analog.AnalogLinear has."
            )
    return conversion_map


def _chosen(
    model: nn.Module, targets: ConversionMap, include: str | Iterable[str] | None, exclude: str | Iterable[str] | None
) -> list[tuple[tuple[str, ...], nn.Module, Any]]:
    """The modules to convert, each once, with all its paths and what it becomes."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    candidates = {module: found for module, found in paths.items() if _kind(module) in targets}
    every = [path for found in paths.values() for path in found]
    included = _patterns("include", include, [path for found in candidates.values() for path in found], "to convert")
    excluded = _patterns("exclude", exclude, every, "")
    chosen = []
    for module, found in candidates.items():
        if included is not None and not any(_matches(path, included) for path in found):
            continue
        if excluded is not None and any(_matches(path, excluded) for path in found):
            continue
        chosen.append((tuple(found), module, _target(found[0], module, targets)))
    return chosen


def _kind(module: nn.Module) -> type[nn.Module]:
    """The class that decides what a module is converted to."""
    kind: type[nn.Module] = parametrize.type_before_parametrizations(module)
    return _LAZY.get(kind, kind)


def _target(path: str, module: nn.Module, targets: ConversionMap) -> Any:
    target = targets[_kind(module)]
    problem = target.why_not(module) if _is_ours(target) else ""
    if problem:
        raise ArgumentError(f"convert_to_analog: {path or 'the model'!r} cannot be converted: {problem}")
    return target


def _is_ours(target: Any) -> bool:
    """Whether a layer of the class is made of the module itself; another has a from_digital of its own."""
    return isinstance(target, type) and issubclass(target, AnalogLayer)


def _patterns(name: str, given: str | Iterable[str] | None, paths: list[str], purpose: str) -> tuple[str, ...] | None:
    """The patterns of an argument, each of which matches one of `paths`."""
    if given is None:
        return None
    if not isinstance(given, Iterable):
        raise ArgumentError(
            f"convert_to_analog: {name} is {given!r}. It must be a string, a path or a glob, or several of them."
        )
    patterns = (given,) if isinstance(given, str) else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ArgumentError(f"convert_to_analog: {name} has {pattern!r}. Each must be a string, a path or a glob.")
        if not any(_matches(path, (pattern,)) for path in paths):
            what = f"module {purpose}".strip()
            known = nearest(pattern, filter(None, paths))
            raise ArgumentError(f"convert_to_analog: {name}={pattern!r} matches no {what}. {known}")
    return patterns


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern matches a path, or that of a module around it."""
    parts = path.split(".")
    around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(each, pattern) for each in around for pattern in patterns)


def _config_for(path: str, module: nn.Module, config: AnalogConfig, function: ConfigFunction | None) -> AnalogConfig:
    if function is None:
        return config
    specific = function(path, module, config)
    if not isinstance(specific, AnalogConfig):
        raise ArgumentError(
            f"convert_to_analog: specific_rpu_config_fun returned a {type(specific).__name__} for {path!r}. It must "
            f"return an AnalogConfig: the one it was given, or config.replaced(...) of it."
        )
    return specific


# --- the conversion ---------------------------------------------------------------------------------------------------


def _convert(model: Any, step: _Step) -> Any:
    """Convert one module; returns the root, which is another object only if it was replaced."""
    if _is_ours(step.target):
        step.target.take_over(step.module, step.config)
        return model
    layer = step.target.from_digital(step.module, step.config)
    layer.train(step.module.training)
    for path in step.paths:
        if not path:
            return layer
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._modules[name] = layer
    return model


_BEFORE = "_triptych_before_analog"


def _avoid_nested_tensors(model: nn.Module) -> None:
    """Keep torch.nn.TransformerEncoder from packing what it pads, in evaluation, for a fused kernel.

    Its layers call analog ones instead (see `triptych.analog.layer.must_be_called`), which take no nested tensor.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(True for _ in named_analog_layers(module)):
            module.__dict__.setdefault(_BEFORE, module.use_nested_tensor)
            module.use_nested_tensor = False


def _return_to_nested_tensors(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and _BEFORE in vars(module):
            module.use_nested_tensor = module.__dict__.pop(_BEFORE)
