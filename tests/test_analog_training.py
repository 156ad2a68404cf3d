"""The same training run on every backend: the same seed gives the same loss curve.

The same seed gives the same noise everywhere, so what is left are roundings: sums in another order. A quantiser turns
a rounding into a whole step now and then, where a value lies on the border between two levels, and no bound on
roundings says how far that carries over 300 steps. The tolerance is therefore measured: the reference runs again on
inputs and weights one unit in the last place away, which lets the same borders be crossed. A backend rounds in a few more
places than one, so that more borders are crossed, each by chance and in either direction: REACH squared times as many
are allowed for. That the tolerance tells runs apart is asserted too: another seed's noise is far outside it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Literal, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import triptych
from triptych.analog import (
    AnalogConfig,
    AnalogLinear,
    InputRangeParameter,
    IOParameters,
    MappingParameter,
    PrePostProcessingParameter,
    WeightClipParameter,
    WeightClipType,
    WeightModifierParameter,
    WeightNoiseInjectionType,
    WeightQuantizationType,
)
from triptych.testing import ran

STEPS = 300
ROWS, BATCHES, INPUTS, HIDDEN, CLASSES = 64, 32, 20, 8, 4
REFERENCE = "torch"
NEIGHBOURS = 4
"""Runs of the reference on inputs and weights one unit in the last place away."""
REACH = 3.0
COMPILED = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") in ("", "0")
if not COMPILED:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

PER_CHANNEL = AnalogConfig(
    forward=IOParameters(inp_res=254, out_res=254, out_bound=2, out_noise=0.02, out_noise_per_channel=True),
    clip=WeightClipParameter(type=WeightClipType.LEARNABLE_PER_CHANNEL),
    modifier=WeightModifierParameter(
        std_dev=0.05,
        res=254,
        noise_type=WeightNoiseInjectionType.ADD_NORMAL_PER_CHANNEL,
        quantization_type=WeightQuantizationType.DISCRETIZE_PER_CHANNEL,
    ),
    mapping=MappingParameter(max_input_size=7),
    pre_post=PrePostProcessingParameter(InputRangeParameter(enable=True, init_from_data=20, decay=0.01)),
)
"""A learned range, a learned clip, everything for each channel."""

PER_TENSOR = AnalogConfig(
    forward=IOParameters(inp_res=254, out_res=254, out_bound=2, out_noise=0.02),
    clip=WeightClipParameter(sigma=2.5, type=WeightClipType.LAYER_GAUSSIAN),
    modifier=WeightModifierParameter(
        std_dev=0.05,
        res=254,
        noise_type=WeightNoiseInjectionType.ADD_NORMAL,
        quantization_type=WeightQuantizationType.DISCRETIZE,
    ),
    mapping=MappingParameter(max_input_size=4),
    pre_post=PrePostProcessingParameter(InputRangeParameter(enable=True, fast_mode=True, init_from_data=20)),
)
"""A range from the extremes, weights clipped after each step, everything for the whole tile."""

Network = Literal["one analog layer", "two analog layers"]
"""The second has a layer of each configuration, of three tiles (7, 7 and 6 inputs) and of two. The first, for triton's
interpreter, which takes a tenth of a second for what others do in a tenth of a millisecond, has the one that clips by a
learned bound, of two tiles, behind an ordinary layer."""


def build(network: Network) -> nn.Sequential:
    """Both end in HIDDEN to CLASSES."""
    if network == "one analog layer":
        first: nn.Module = nn.Linear(INPUTS, HIDDEN)
        last = AnalogLinear(HIDDEN, CLASSES, rpu_config=PER_CHANNEL)
    else:
        first = AnalogLinear(INPUTS, HIDDEN, rpu_config=PER_CHANNEL)
        last = AnalogLinear(HIDDEN, CLASSES, rpu_config=PER_TENSOR)
    for layer in (first, last):
        if isinstance(clip := getattr(layer, "learnable_weight_clip", None), nn.Parameter):
            # Clips start on the largest weights, where whether those are clipped hangs on a last bit.
            clip.data *= 0.8
    return nn.Sequential(first, nn.Tanh(), last)


def calls(network: Network, backend: str) -> dict[tuple[str, str, str], int]:
    """What a run is made of, by (op, phase, backend)."""
    layers = 1 if network == "one analog layer" else 2
    by_phase = {
        ("input_range_update", "forward"): layers * STEPS,
        ("analog_weight", "forward"): 2 * layers * STEPS,  # again for backward, which does not keep the noisy weights
        ("analog_weight", "backward"): STEPS,  # for the learned clip
        ("analog_linear", "forward"): layers * STEPS,
        ("analog_linear", "backward"): layers * STEPS,
    }
    return {(*key, backend): count for key, count in by_phase.items()}


def curve(network: Network, backend: str, device: str, seed: int = 0, neighbour: int = 0) -> Tensor:
    """The losses of a training run on `backend`, [STEPS] on the CPU; which backend ran each call is asserted.

    Args:
        seed: of the noise. Weights and data are always the same.
        neighbour: 0, or which of the runs on inputs and weights one unit in the last place away, up or down at random.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCHES, ROWS, INPUTS, generator=generator)
    classes = (x @ torch.randn(INPUTS, CLASSES, generator=generator)).argmax(-1).to(device)
    torch.manual_seed(2)
    model = build(network)
    if neighbour:
        signs = torch.Generator().manual_seed(neighbour)
        with torch.no_grad():
            for tensor in (x, *model.parameters()):
                up = torch.randn(tensor.shape, generator=signs) > 0
                tensor.copy_(torch.nextafter(tensor, torch.where(up, float("inf"), -float("inf"))))
    x = x.to(device)
    triptych.name_layers(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(seed)
    losses = []
    with triptych.use(backend), ran(calls(network, backend)):
        for step in range(STEPS):
            batch = step % BATCHES
            loss = functional.cross_entropy(model(x[batch]), classes[batch])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses).cpu()


def distance(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


@functools.cache
def reference(network: Network, device: str) -> tuple[Tensor, float]:
    """The reference's curve, and the tolerance."""
    found = curve(network, REFERENCE, device)
    neighbours = [curve(network, REFERENCE, device, neighbour=each) for each in range(1, NEIGHBOURS + 1)]
    return found, REACH * max(distance(found, each) for each in neighbours)


NETWORKS = get_args(Network)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_network_learns_and_the_tolerance_tells_another_seed_apart(network: Network, device: str) -> None:
    losses, tolerance = reference(network, device)
    assert losses[-BATCHES:].mean() < 0.6 * losses[:BATCHES].mean()
    assert tolerance > 0
    assert distance(curve(network, REFERENCE, device, seed=1), losses) > 2 * tolerance


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("backend", ["composite", "triton", "cuda"])
def test_every_backend_has_the_same_loss_curve(backend: str, network: Network, device: str) -> None:
    if backend != "composite" and importlib.util.find_spec(f"triptych_{backend}") is None:
        pytest.skip(f"triptych-{backend} is not installed")
    if backend == "triton" and device == "cpu":
        if COMPILED:
            pytest.skip("triton compiles in this process; TRITON_INTERPRET=1 runs this on the CPU")
        if network != "one analog layer":
            pytest.skip("the interpreter would take five minutes")
    expected, tolerance = reference(network, device)
    found = curve(network, backend, device)
    assert distance(found, expected) <= tolerance
