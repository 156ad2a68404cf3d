"""The forward pass of one crossbar, which a linear layer has one of and a convolution one for each group.

    weights, clipped, discretised and with noise on them            analog_weight
    y = x W^T + b between DAC and ADC                               analog_linear

Before that, while it calibrates, the input range follows the batch (input_range_update): the layer calls `calibrate`,
through ranges.py. Noise is drawn in training only. Nothing here waits for the device, and no Parameter is changed but
the input range while it calibrates.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch._C import _functorch as functorch

from triptych import remake, traced
from triptych.analog.config import AnalogConfig
from triptych.analog.enums import WeightClipType, WeightNoiseInjectionType, WeightQuantizationType
from triptych.errors import ArgumentError
from triptych.ops.analog_linear import InputRangeMode, analog_linear
from triptych.ops.analog_weight import Grain, analog_weight
from triptych.ops.input_range_update import input_range_update
from triptych.ops.tile_abs_max import tile_abs_max
from triptych.sharding import arrival

Tensor = torch.Tensor

_NOISE: dict[WeightNoiseInjectionType, Grain] = {
    WeightNoiseInjectionType.NONE: "none",
    WeightNoiseInjectionType.ADD_NORMAL: "per_tensor",
    WeightNoiseInjectionType.ADD_NORMAL_PER_CHANNEL: "per_channel",
}
_QUANTIZATION: dict[WeightQuantizationType, Grain] = {
    WeightQuantizationType.NONE: "none",
    WeightQuantizationType.DISCRETIZE: "per_tensor",
    WeightQuantizationType.DISCRETIZE_PER_CHANNEL: "per_channel",
}
_BOUND_PER_CHANNEL = (WeightClipType.LAYER_GAUSSIAN_PER_CHANNEL, WeightClipType.LEARNABLE_PER_CHANNEL)


@dataclass(frozen=True, slots=True)
class Circuit:
    """A configuration as the arguments of the ops: what a forward pass looks at, and nothing else.

    `init_from_data` is 0 where there is no range to calibrate, `noise` is "none" where its deviation is 0.
    """

    tiles: int
    mode: InputRangeMode
    init_from_data: int
    init_std_alpha: float
    act_range_momentum: float
    decay: float
    input_min_percentage: float
    inp_res: float
    out_noise: float
    out_noise_per_channel: bool
    out_bound: float
    out_bound_per_channel: bool
    out_res: float
    quantization: Grain
    res: float
    noise: Grain
    std_dev: float


def circuit_of(config: AnalogConfig, tiles: int) -> Circuit:
    """What `config` says about crossbars of `tiles` tiles."""
    range_, io, modifier = config.pre_post.input_range, config.forward, config.modifier
    return Circuit(
        tiles=tiles,
        mode=_mode(config),
        init_from_data=range_.init_from_data if range_.is_static else 0,
        init_std_alpha=range_.init_std_alpha,
        act_range_momentum=range_.act_range_momentum,
        decay=range_.decay,
        input_min_percentage=range_.input_min_percentage,
        inp_res=io.inp_res,
        out_noise=io.out_noise,
        out_noise_per_channel=io.out_noise_per_channel,
        out_bound=io.out_bound,
        out_bound_per_channel=config.clip.type in _BOUND_PER_CHANNEL,
        out_res=io.out_res,
        quantization=_QUANTIZATION[modifier.quantization_type],
        res=modifier.res,
        noise=_NOISE[modifier.noise_type] if modifier.std_dev > 0 else "none",
        std_dev=modifier.std_dev,
    )


def _mode(config: AnalogConfig) -> InputRangeMode:
    range_ = config.pre_post.input_range
    if not range_.enable:
        return "none"
    return "dynamic" if range_.dynamic else "fast" if range_.fast_mode else "learned"


class Crossbar(NamedTuple):
    """The tensors of one crossbar: T tiles, N inputs, C outputs.

    Shapes: weight [C, N]; bias [C]; input_range, batches (how many were counted), x_min, x_max [T]; clip [T, C].
    """

    weight: Tensor
    bias: Tensor | None
    input_range: Tensor | None
    batches: Tensor | None
    x_min: Tensor | None
    x_max: Tensor | None
    clip: Tensor | None

    def part(self, group: int, groups: int) -> Crossbar:
        """One of several crossbars whose tensors are stored one behind the other."""

        def of(tensor: Tensor | None) -> Any:
            size = 0 if tensor is None else tensor.shape[0] // groups
            return None if tensor is None else tensor.narrow(0, group * size, size)

        return Crossbar(*map(of, self))


def forward(circuit: Circuit, crossbar: Crossbar, x: Tensor, training: bool, layer: str) -> Tensor:
    """[..., N] to [..., C]."""
    noise: Grain = circuit.noise if training else "none"
    out_noise = circuit.out_noise if training else 0.0
    input_range = crossbar.input_range if circuit.mode in ("learned", "fast") else None
    if input_range is not None and torch.is_grad_enabled():
        # The next forward may calibrate the Parameter before the backward of this one, which needs what this one had.
        input_range = input_range.clone()
    seed = None
    if noise != "none" or out_noise > 0:
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=x.device)
    weight, wmax = effective_weight(circuit, crossbar, noise, seed, layer)
    if wmax is None and (circuit.out_bound > 0 or out_noise > 0):
        wmax = tile_abs_max(weight.detach(), tiles=circuit.tiles, layer=layer)
    return analog_linear(
        x,
        weight,
        crossbar.bias,
        input_range=input_range,
        wmax=wmax,
        seed=seed if out_noise > 0 else None,
        tiles=circuit.tiles,
        input_range_mode=circuit.mode,
        inp_res=circuit.inp_res,
        out_noise=out_noise,
        out_noise_per_channel=circuit.out_noise_per_channel,
        out_bound=circuit.out_bound,
        out_res=circuit.out_res,
        out_bound_per_channel=circuit.out_bound_per_channel,
        decay=circuit.decay,
        input_min_percentage=circuit.input_min_percentage,
        layer=layer,
    )


def _changes_weights(circuit: Circuit, crossbar: Crossbar) -> bool:
    """Whether the crossbar has other weights than the Parameter, in evaluation too."""
    return crossbar.clip is not None or circuit.quantization != "none"


def check_transforms(layer: str) -> None:
    """Raise inside torch.func.vmap: one range cannot follow many batches at once."""
    if torch.compiler.is_compiling() or functorch.peek_interpreter_stack() is None:
        return
    if any(each.key() == functorch.TransformType.Vmap for each in functorch.get_interpreter_stack() or ()):
        title = f"Analog layer {layer!r}" if layer else "An analog layer"
        raise ArgumentError(
            f"{title} was called inside torch.func.vmap while it calibrates its input range, which every batch changes "
            f"in place. Set pre_post.input_range.init_from_data to 0 in its rpu_config once it is calibrated, or call "
            f"it in evaluation."
        )


# --- the input range ------------------------------------------------------------------------------------------------


def calibrate(circuit: Circuit, crossbar: Crossbar, x: Tensor, layer: str) -> None:
    """Let the input range, its count and its extremes follow one more batch, in place."""
    compiling = torch.compiler.is_compiling()
    assert crossbar.input_range is not None and crossbar.batches is not None
    state = (crossbar.input_range, crossbar.batches, crossbar.x_min, crossbar.x_max)
    stored = [each.detach() for each in state if each is not None]
    mode: Literal["std", "extremes"] = "extremes" if circuit.mode == "fast" else "std"
    # All is detached; a program that torch.export made with a region without gradients in it could not be loaded.
    with nullcontext() if traced.exporting() else torch.no_grad():
        updated = input_range_update(
            x.detach(),
            *stored,
            tiles=circuit.tiles,
            mode=mode,
            init_from_data=circuit.init_from_data,
            init_std_alpha=circuit.init_std_alpha,
            act_range_momentum=circuit.act_range_momentum,
            layer=layer,
        )
        for old, new in zip(stored, updated, strict=False):
            if compiling:
                torch.ops.triptych.calibrated(old, new)
            else:
                old.copy_(new)


def recomputing() -> bool:
    """Whether this runs inside a backward pass, where a forward is one that activation checkpointing does again."""
    return torch._C._current_graph_task_id() != -1


def _calibrated(old: Tensor, new: Tensor) -> None:
    """Keep what was calibrated, unless a compiled layer runs for the second time under activation checkpointing.

    An operator, because what a compiled graph is run for is known only when it runs.
    """
    if not recomputing():
        old.copy_(new)


_library = torch.library.Library("triptych", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "calibrated(Tensor(a!) old, Tensor new) -> ()", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("calibrated", _calibrated, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("triptych::calibrated", lambda old, new: None, lib=_library)
arrival.define_in_place("calibrated")


# --- the weights ----------------------------------------------------------------------------------------------------


def effective_weight(
    circuit: Circuit, crossbar: Crossbar, noise: Grain, seed: Tensor | None, layer: str
) -> tuple[Tensor, Tensor | None]:
    """The weights as the crossbar has them, and the maxima [T, C] that come with them, if they were changed at all.

    Changed weights are not kept for backward, which makes them again from the Parameter and the seed. What a compiled
    graph keeps is the compiler's choice; under the transforms of torch.func they are kept.
    """
    weight, clip = crossbar.weight, crossbar.clip
    if noise == "none" and not _changes_weights(circuit, crossbar):
        return weight, None

    def make(weight: Tensor, clip: Tensor | None, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        return analog_weight(
            weight,
            clip,
            seed,
            tiles=circuit.tiles,
            quantization=circuit.quantization,
            res=circuit.res,
            noise=noise,
            std_dev=circuit.std_dev,
            layer=layer,
        )

    seed = seed if noise != "none" else None
    if torch.compiler.is_compiling() or functorch.peek_interpreter_stack() is not None:
        return make(weight, clip, seed)
    plain_weight, plain_clip = weight.detach(), None if clip is None else clip.detach()
    if clip is not None:
        modified, wmax = make(weight, clip, seed)
    else:
        modified, wmax = make(plain_weight, None, seed)
        if torch.is_grad_enabled() and weight.requires_grad:
            modified = _StraightThrough.apply(weight, modified)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled():
        remake.attach(modified, lambda *sources: make(*sources)[0], plain_weight, plain_clip, seed)
    return modified, wmax


class _StraightThrough(torch.autograd.Function):
    """`modified` in forward; in backward its gradient is that of `weight`: the same tensor, where the op has a copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, modified: Tensor) -> Tensor:
        return modified.view_as(modified)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None
