"""calibrate_input_ranges: set the input ranges of a model from data, after training or before it.

While it looks, every layer runs in evaluation mode on ideal converters: weights as in evaluation, but no input range,
DAC, noise or ADC, so that a layer is calibrated on what its trained predecessors mean and not on what uncalibrated
ranges leave of it. Tokens that are zero throughout are padding and count for nothing.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from triptych.analog.crossbar import circuit_of
from triptych.analog.layer import AnalogLayer, named_analog_layers
from triptych.analog.settings import member
from triptych.errors import ArgumentError
from triptych.tiling import tile_slices


class InputRangeCalibrationType(Enum):
    """What an input range is set to. Quantiles and maxima are those of |x|."""

    NONE = "None"
    """Nothing: the ranges stay as they are."""

    MOVING_STD = "MovingStd"
    """The mean over the batches of `std_alpha` standard deviations."""

    MOVING_QUANTILE = "MovingQuantile"
    """The mean over the batches of the quantile."""

    CACHE_QUANTILE = "CacheQuantile"
    """The quantile of a sample of all tokens, kept in main memory."""

    MAX = "Max"
    """The largest magnitude."""


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

    Raises:
        ArgumentError: there is nothing to calibrate or nothing to calibrate it with, or a layer was given NaN or
            infinities.
    """
    kind = _checked_kind(calibration_type)
    if kind is InputRangeCalibrationType.NONE:
        return
    _check_numbers(quantile, max_samples, std_alpha)
    layers = _layers(model)
    observers = {layer: _observer(kind, layer, quantile, max_samples, std_alpha) for layer in layers.values()}
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
    unseen = [path for path, layer in layers.items() if not observers[layer].batches]
    if len(unseen) == len(layers):
        raise ArgumentError(
            f"calibrate_input_ranges: after {batches} batches no analog layer has seen an input that is not zero. Give "
            f"a dataloader that yields some; an iterator that was used up yields none."
        )
    results = {layer: observer.ranges() for layer, observer in observers.items() if observer.batches}
    for layer, ranges in results.items():
        _set_ranges(layer, ranges)
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
            rows = inputs.reshape(-1, inputs.shape[-1])
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
def _set_ranges(layer: AnalogLayer, ranges: list[float]) -> None:
    """Give the layer these ranges, and an input range to hold them if it has none. A range of 0 is that of a tile that
    saw only zeros, and is left as it was. One beyond the parameter's dtype becomes its largest finite number, as in
    `input_range_update`: three deviations of float16 data may be, though no input is."""
    config = layer.rpu_config
    if not config.pre_post.input_range.is_static:
        layer._adopt(config.replaced("pre_post.input_range.enable", True))
    assert layer.input_range is not None and layer.input_range_update_idx is not None
    new = torch.tensor(ranges, dtype=torch.float64, device=layer.input_range.device)
    new.clamp_(max=torch.finfo(layer.input_range.dtype).max)
    layer.input_range.copy_(torch.where(new > 0, new, layer.input_range.double()))
    layer.input_range_update_idx.fill_(config.pre_post.input_range.init_from_data)
    if layer.x_min is not None and layer.x_max is not None:
        layer.x_max.copy_(layer.input_range)
        layer.x_min.copy_(-layer.input_range)


# --- what is remembered of the inputs ---------------------------------------------------------------------------------


class _Observer(ABC):
    """Sees the inputs of a layer's crossbars, in rows without padding, and makes a range of them for each tile."""

    def __init__(self, layer: AnalogLayer) -> None:
        self.groups, self.tiles = layer.crossbars, layer.tiles
        self.batches = 0

    def observe(self, group: int, rows: Tensor) -> None:
        """Take in [R, N] of a group: R > 0."""
        self.batches += 1
        self.see(group, rows)

    def parts(self, rows: Tensor) -> list[Tensor]:
        """The columns of each tile."""
        return [rows[:, columns] for columns in tile_slices(rows.shape[1], self.tiles)]

    @abstractmethod
    def see(self, group: int, rows: Tensor) -> None: ...

    @abstractmethod
    def ranges(self) -> list[float]:
        """One for each tile, group by group."""


class _Mean(_Observer):
    """The mean over the batches of a statistic of each tile."""

    def __init__(self, layer: AnalogLayer, statistic: Callable[[Tensor], float]) -> None:
        super().__init__(layer)
        self.statistic = statistic
        self.sums = [0.0] * (self.groups * self.tiles)
        self.counts = [0] * self.groups

    def see(self, group: int, rows: Tensor) -> None:
        self.counts[group] += 1
        for tile, part in enumerate(self.parts(rows), start=group * self.tiles):
            self.sums[tile] += self.statistic(part)

    def ranges(self) -> list[float]:
        return [total / max(self.counts[tile // self.tiles], 1) for tile, total in enumerate(self.sums)]


class _Largest(_Observer):
    """The largest magnitude of each tile."""

    def __init__(self, layer: AnalogLayer) -> None:
        super().__init__(layer)
        self.largest = [0.0] * (self.groups * self.tiles)

    def see(self, group: int, rows: Tensor) -> None:
        for tile, part in enumerate(self.parts(rows), start=group * self.tiles):
            self.largest[tile] = max(self.largest[tile], float(part.abs().max()))

    def ranges(self) -> list[float]:
        return self.largest


class _Sample(_Observer):
    """The quantile of a uniform sample of the rows: those with the smallest of random numbers, one drawn for each."""

    def __init__(self, layer: AnalogLayer, quantile: float, size: int) -> None:
        super().__init__(layer)
        self.quantile, self.size = quantile, size
        self.generator = torch.Generator().manual_seed(0)
        self.kept: list[Tensor | None] = [None] * self.groups
        self.keys = [torch.empty(0, dtype=torch.float64)] * self.groups

    def see(self, group: int, rows: Tensor) -> None:
        keys = torch.rand(rows.shape[0], generator=self.generator, dtype=torch.float64)
        keys, chosen = keys.sort()
        keys, chosen = keys[: self.size], chosen[: self.size]  # no more than that can stay
        rows = rows[chosen.to(rows.device)].cpu()
        kept = self.kept[group]
        if kept is not None:
            keys, chosen = torch.cat((self.keys[group], keys)).sort()
            rows = torch.cat((kept, rows))[chosen[: self.size]]
        self.keys[group], self.kept[group] = keys[: self.size], rows

    def ranges(self) -> list[float]:
        found: list[float] = []
        for kept in self.kept:
            parts = [] if kept is None else self.parts(kept)
            found += [quantile_of(each, self.quantile) for each in parts] or [0.0] * self.tiles
        return found


def quantile_of(x: Tensor, quantile: float) -> float:
    """The quantile of |x| over all elements, interpolated linearly; unlike torch.quantile, of any number of them."""
    magnitudes = x.abs().flatten()
    place = quantile * (magnitudes.numel() - 1)
    below = min(int(place), magnitudes.numel() - 1)
    low = float(magnitudes.kthvalue(below + 1).values)
    if place == below:
        return low
    return low + (float(magnitudes.kthvalue(below + 2).values) - low) * (place - below)


def _deviation(part: Tensor) -> float:
    wide = part.double() if part.dtype is torch.float64 else part.float()
    if wide.numel() < 2:
        return 0.0
    found = float(wide.std())
    if math.isfinite(found):
        return found
    # The elements are finite, their squares are not: from 1.8e19 on in float32 on a GPU.
    scale = float(wide.abs().max())
    return float((wide / scale).std()) * scale


def _observer(
    kind: InputRangeCalibrationType, layer: AnalogLayer, quantile: float, max_samples: int, std_alpha: float | None
) -> _Observer:
    if kind is InputRangeCalibrationType.MOVING_STD:
        alpha = layer.rpu_config.pre_post.input_range.init_std_alpha if std_alpha is None else std_alpha
        return _Mean(layer, lambda part: alpha * _deviation(part))
    if kind is InputRangeCalibrationType.MOVING_QUANTILE:
        return _Mean(layer, lambda part: quantile_of(part, quantile))
    if kind is InputRangeCalibrationType.CACHE_QUANTILE:
        return _Sample(layer, quantile, max_samples)
    return _Largest(layer)
