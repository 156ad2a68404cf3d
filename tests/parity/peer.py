"""The reference: aihwkit-lightning's configurations and layers, and how tensors go from its layers to ours and back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triptych import noise
from triptych.analog import AnalogConfig, AnalogConv1d, AnalogConv2d, AnalogConv3d, AnalogLinear
from triptych.tiling import tile_slices

for _name in ("aihwkit_lightning", "tqdm"):
    # Skips the test file that imports this one.
    pytest.importorskip(_name, reason="needs aihwkit-lightning 2.1.0, the reference; run `nox -s parity`")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import aihwkit_lightning.nn as lightning
    from aihwkit_lightning.nn.modules.torch_utils import torch_linear
    from aihwkit_lightning.simulator import configs, parameters

LAYERS: dict[type[nn.Module], Any] = {
    AnalogLinear: lightning.AnalogLinear,
    AnalogConv1d: lightning.AnalogConv1d,
    AnalogConv2d: lightning.AnalogConv2d,
    AnalogConv3d: lightning.AnalogConv3d,
}
ENUMS = {
    "noise_type": parameters.WeightNoiseInjectionType,
    "quantization_type": parameters.WeightQuantizationType,
    "type": parameters.WeightClipType,
}
PARAMETERS = ("weight", "bias", "input_range", "learnable_weight_clip")


def config_of(ours: AnalogConfig) -> Any:
    """The reference's configuration that has the settings of ours."""

    def fill(theirs: Any, data: dict[str, Any]) -> Any:
        for name, value in data.items():
            if isinstance(value, dict):
                fill(getattr(theirs, name), value)
            else:
                setattr(theirs, name, ENUMS[name](value) if name in ENUMS else value)
        return theirs

    return fill(configs.TorchInferenceRPUConfig(), ours.to_dict())


def twins(kind: type[nn.Module], arguments: dict[str, Any], config: AnalogConfig, seed: int) -> tuple[Any, Any]:
    """The reference's layer and ours, with the same numbers in them."""
    torch.manual_seed(seed)
    theirs = LAYERS[kind](**arguments, rpu_config=config_of(config))
    ours: Any = kind(**arguments, rpu_config=config)
    with torch.no_grad():
        rows = theirs.weight.flatten(1)
        rows.copy_(torch.randn_like(rows) * 0.2)
        if theirs.learnable_weight_clip is not None:
            # Below 1, beyond which the reference inverts it, and below the largest weights, so that it clips.
            maxima = [rows[:, columns].abs().amax(1) for columns in tile_slices(rows.shape[1], len(theirs.in_sizes))]
            theirs.learnable_weight_clip.copy_(0.7 * torch.stack(maxima).clamp(max=1.2))
        if theirs.x_min is not None:
            theirs.x_min.zero_()  # -1e-5 and 1e-5, which it would add to the first batch's extremes
            theirs.x_max.zero_()
    synchronise(theirs, ours)
    return theirs, ours


def synchronise(theirs: Any, ours: Any) -> None:
    """Give our layer the state of the reference's. Loaded, not written: what is written after a gradient gets clipped."""
    state = ours.state_dict()
    assert {name for name in PARAMETERS if getattr(theirs, name) is not None} == state.keys() & set(PARAMETERS)
    ours.load_state_dict({name: getattr(theirs, name).detach().view_as(mine) for name, mine in state.items()})


def clip(theirs: Any) -> None:
    """Clip the weights of the reference's layer; its one-dimensional convolution lacks what the others have."""
    missing = type(theirs).clip_weights is lightning.AnalogLayerBase.clip_weights
    (lightning.AnalogConv2d.clip_weights if missing else type(theirs).clip_weights)(theirs)


@contextmanager
def same_noise(theirs: Any, rows: int, seed: Tensor) -> Iterator[None]:
    """Have the reference's next training forward draw the normal numbers that our layer draws with this seed."""
    config, sizes = theirs.rpu_config, theirs.in_sizes
    outputs, inputs = theirs.weight.shape[0], sum(sizes)
    weights = noise.normal(seed, noise.WEIGHT_STREAM, outputs, inputs, torch.float64).float()
    draws: list[Tensor] = []
    for tile, columns in enumerate(tile_slices(inputs, len(sizes))):
        if config.modifier.noise_type is not parameters.WeightNoiseInjectionType.NONE:
            draws.append(weights[:, columns])
        if config.forward.out_noise > 0:
            draws.append(noise.normal(seed, noise.output_stream(tile), rows, outputs, torch.float64).float())
    rest = iter(draws)
    original = torch_linear.randn_like
    torch_linear.randn_like = lambda like: next(rest).reshape(like.shape)
    try:
        yield
        assert next(rest, None) is None, "the reference drew less noise than it should have"
    finally:
        torch_linear.randn_like = original
