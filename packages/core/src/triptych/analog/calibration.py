"""calibrate_input_ranges: set the input ranges of a model from data, after training or before it.

While it looks, every layer runs in evaluation mode on ideal converters: weights as in evaluation, but no input range,
DAC, noise or ADC, so that a layer is calibrated on what its trained predecessors mean and not on what uncalibrated
ranges leave of it. Tokens that are zero throughout are padding and count for nothing.

Processes that train one model together calibrate it together: each gives its own batches, and all set the same ranges.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from triptych.analog import ranges, sharded
from triptych.analog.clipping import is_deepspeed
from triptych.analog.crossbar import circuit_of
from triptych.analog.layer import AnalogLayer, named_analog_layers
from triptych.analog.observers import InputRangeCalibrationType, observer_of
from triptych.analog.settings import member
from triptych.analog.state import RANGE
from triptych.errors import ArgumentError


def calibrate_input_ranges(
    model: nn.Module,
    calibration_type: InputRangeCalibrationType | str,
    dataloader: Iterable[Any],
    quantile: float = 0.99995,
    max_samples: int = 1000,
    std_alpha: float | None = None,
) -> None:
    """Set the input range of every tile of the analog layers of a model from what `dataloader` yields.

    Layers whose configuration has no input range get one, with their configuration otherwise unchanged; make the
    optimizer afterwards. Layers with a dynamic range need none and are left out. Ranges that were set count as
    calibrated: training does not do it again. Training modes are as before when this returns or raises, and in the
    latter case ranges too.

    Args:
        model: the model. It is called without gradients.
        calibration_type: what a range is set to.
        dataloader: yields what the model is called with: a tensor, a tuple of arguments, a dictionary of keyword
            arguments, or a pair of both, (tuple, dictionary).
        quantile: for the types with a quantile, from 0 to 1. Interpolated linearly, computed exactly for any number of
            elements.
        max_samples: for CACHE_QUANTILE: how many tokens of each layer are kept, a uniform sample of all, the same one
            every time.
        std_alpha: for MOVING_STD; None means each layer's own init_std_alpha.

    Under DistributedDataParallel, fully_shard and after `synchronise_ranges`, every process must call this, and ranges
    are taken from the batches of all of them.

    Raises:
        ArgumentError: there is nothing to calibrate or nothing to calibrate it with, or a layer was given NaN or
            infinities, or has no input range and was sharded without one.
    """
    kind = _checked_kind(calibration_type)
    if kind is InputRangeCalibrationType.NONE:
        return
    _check_numbers(quantile, max_samples, std_alpha)
    layers = _layers(model)
    observers = {layer: observer_of(kind, layer, quantile, max_samples, std_alpha) for layer in layers.values()}
    batches = 0
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(_evaluating(model))
        # A compiled model would bake the observers into its graphs.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for path, layer in layers.items():
            stack.enter_context(_observed(path, layer, observers[layer].observe))
        for batch in dataloader:
            _call(model, batch)
            batches += 1
    for layer, observer in observers.items():
        for group in ranges.groups_of(layer, model):
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, observer.seen(), group=group)
            observer.take(parts)
    unseen = [path for path, layer in layers.items() if not observers[layer].batches]
    if len(unseen) == len(layers):
        raise ArgumentError(
            f"calibrate_input_ranges: after {batches} batches no analog layer has seen an input that is not zero. Give "
            f"a dataloader that yields some; an iterator that was used up yields none."
        )
    results = {layer: observer.ranges() for layer, observer in observers.items() if observer.batches}
    for layer, found in results.items():
        _set_ranges(layer, found)
    if unseen:
        warnings.warn(
            f"calibrate_input_ranges: {len(unseen)} of {len(layers)} analog layers have seen no input and keep what "
            f"they had: {', '.join(unseen[:5])}. Give batches that reach them.",
            stacklevel=2,
        )


# --- arguments --------------------------------------------------------------------------------------------------------


def _checked_kind(given: Any) -> InputRangeCalibrationType:
    rule = member(InputRangeCalibrationType)
    kind = rule.read(given)
    if kind is None:
        raise ArgumentError(
            f"calibrate_input_ranges: calibration_type is {given!r}. It must be {rule.wanted}: {', '.join(rule.words)}."
        )
    assert isinstance(kind, InputRangeCalibrationType)
    return kind


def _check_numbers(quantile: Any, max_samples: Any, std_alpha: Any) -> None:
    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    if not is_number(quantile) or not 0 <= quantile <= 1:
        raise ArgumentError(f"calibrate_input_ranges: quantile is {quantile!r}. It must be a number from 0 to 1.")
    if not isinstance(max_samples, int) or isinstance(max_samples, bool) or max_samples < 1:
        raise ArgumentError(
            f"calibrate_input_ranges: max_samples is {max_samples!r}. It must be an integer, 1 or greater."
        )
    if std_alpha is not None and not (is_number(std_alpha) and std_alpha > 0):
        raise ArgumentError(
            f"calibrate_input_ranges: std_alpha is {std_alpha!r}. It must be a number greater than 0, or None for each "
            f"layer's init_std_alpha."
        )


def _layers(model: nn.Module) -> dict[str, AnalogLayer]:
    """The layers to calibrate, by path."""
    found = dict(named_analog_layers(model))
    if not found:
        raise ArgumentError(
            "calibrate_input_ranges: the model has no analog layers. Convert it with convert_to_analog."
        )
    layers = {path: each for path, each in found.items() if not each.rpu_config.pre_post.input_range.dynamic}
    if not layers:
        raise ArgumentError(
            "calibrate_input_ranges: every analog layer has a dynamic input range, taken from each token: there is "
            "nothing to calibrate. Convert the model with pre_post.input_range.dynamic=False for ranges that are."
        )
    for path, each in layers.items():
        if is_deepspeed(each.input_range):
            raise ArgumentError(
                f"calibrate_input_ranges: DeepSpeed keeps a master of the input range of {path!r}, from which the next "
                f"step would make the old one again. Calibrate before deepspeed.initialize."
            )
        spread = sharded.mesh_of(each._parameters["weight"]) is not None or sharded.piece(each, "weight") is not None
        if spread and each.input_range is None:
            raise ArgumentError(
                f"calibrate_input_ranges: {path!r} has no input range and its weight is spread over processes; a "
                f"Parameter that is added now would belong to none of them. Calibrate before fully_shard or "
                f"parallelize_module, or convert the model with pre_post.input_range.enable=True."
            )
    return layers


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Tensor):
        model(batch)
    elif isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        pair = len(batch) == 2 and isinstance(batch[0], tuple | list) and isinstance(batch[1], Mapping)
        if pair:
            model(*batch[0], **batch[1])
        else:
            model(*batch)
    else:
        raise ArgumentError(
            f"calibrate_input_ranges: the dataloader yields a {type(batch).__name__}. It must yield a tensor, a tuple "
            f"of arguments, a dictionary of keyword arguments, or (tuple, dictionary)."
        )


# --- while the model runs ---------------------------------------------------------------------------------------------


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the block, and each module's own mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _observed(path: str, layer: AnalogLayer, observe: Callable[[int, Tensor], None]) -> Iterator[None]:
    """For the block, the layer has ideal converters and `observe` is given what each of its crossbars is."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        for group, inputs in enumerate(layer.crossbar_inputs(x.detach())):
            whole: Any = inputs if sharded.mesh_of(inputs) is None else inputs.full_tensor()  # type: ignore[attr-defined]
            rows = whole.reshape(-1, whole.shape[-1])
            rows = rows[(rows != 0).any(-1)]
            if not torch.isfinite(rows).all():
                raise ArgumentError(
                    f"calibrate_input_ranges: the input of {path!r} holds NaN or infinities. Find the batch, or the "
                    f"layer before it, that makes them: no range can be taken from it."
                )
            if rows.numel():
                observe(group, rows)

    circuit = layer._circuit
    ideal = {
        "forward": type(layer.rpu_config.forward)(),
        "pre_post": type(layer.rpu_config.pre_post)(),
    }
    layer._circuit = circuit_of(layer.rpu_config.replaced(ideal), layer.tiles)
    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        layer._circuit = circuit


@torch.no_grad()
def _set_ranges(layer: AnalogLayer, found: list[float]) -> None:
    """Give the layer these ranges, and an input range to hold them if it has none. A range of 0 is that of a tile that
    saw only zeros, and is left as it was. One beyond the parameter's dtype becomes its largest finite number, as in
    `input_range_update`: three deviations of float16 data may be, though no input is."""
    config = layer.rpu_config
    if not config.pre_post.input_range.is_static:
        layer._adopt(config.replaced("pre_post.input_range.enable", True))
    assert layer.input_range is not None and layer.input_range_update_idx is not None
    old = sharded.whole(layer, RANGE)
    new = torch.tensor(found, dtype=torch.float64, device=old.device).clamp_(max=torch.finfo(old.dtype).max)
    new = torch.where(new > 0, new, old.double()).to(old.dtype)
    sharded.write(layer, RANGE, new)
    layer.input_range_update_idx.fill_(config.pre_post.input_range.init_from_data)
    if layer.x_min is not None and layer.x_max is not None:
        sharded.put(layer.x_max, new)
        sharded.put(layer.x_min, -new)
