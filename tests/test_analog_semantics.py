"""What aihwkit-lightning's Triton mode gets wrong, one test for each, on every backend: the analog layers get it right.

Expected values are computed here, in float64 and by hand, from the formulas of the layers.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triptych
from triptych import environment, scope
from triptych.analog import (
    AnalogConfig,
    AnalogConv1d,
    AnalogConv2d,
    AnalogConv3d,
    AnalogLinear,
    WeightNoiseInjectionType,
    WeightQuantizationType,
)
from triptych.ops.analog_linear import analog_linear
from triptych.testing.running import counts
from triptych.tiling import tile_slices

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
NOISES = [each.value for each in WeightNoiseInjectionType]
QUANTIZATIONS = [each.value for each in WeightQuantizationType]

RANGE = {"pre_post.input_range.enable": True, "pre_post.input_range.init_from_data": 0}
WEIGHT_NOISE = {"modifier.noise_type": "AddNormalPerChannel", "modifier.std_dev": 0.1}
OUTPUT_NOISE = {**RANGE, "forward.out_noise": 0.1}
LEARNED_CLIP = {"clip.type": "LearnablePerChannel"}
TILES = {"mapping.max_input_size": 5}  # 13 inputs: 5, 4, 4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: Any) -> str:
    return str(request.param)


@pytest.fixture(params=["composite", "torch", "triton", "cuda"])
def backend(request: Any, device: str) -> str:
    name = str(request.param)
    if name != "composite" and importlib.util.find_spec(f"triptych_{name}") is None:
        pytest.skip(f"triptych-{name} is not installed")
    if name == "triton" and device == "cpu" and not INTERPRETED:
        pytest.skip("triton runs on the CPU where TRITON_INTERPRET=1 is set before Python starts")
    if name == "triton" and device == "cuda" and INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 is set: nothing would run on the GPU")
    return name


@contextmanager
def only(backend: str, *ops: str) -> Iterator[None]:
    """The block runs on `backend` and nowhere else, and runs each of `ops`."""
    before = counts()
    with triptych.use(backend):
        yield
    found = counts() - before
    assert {name for _, _, name in found} == {backend}
    assert set(ops) <= {op for op, _, _ in found}


def config(*parts: dict[str, Any]) -> AnalogConfig:
    return AnalogConfig().replaced({path: value for part in parts for path, value in part.items()})


def linear(device: str, *parts: dict[str, Any], **options: Any) -> AnalogLinear:
    """13 inputs and 7 outputs, of the same weights every time."""
    torch.manual_seed(0)
    return AnalogLinear(13, 7, rpu_config=config(*parts), **options).to(device)


def batch(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers on every device."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return values.to(device, dtype).requires_grad_()


def grad_of(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    assert tensor.grad is not None
    return tensor.grad


def assert_near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-5, atol=1e-5)


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noise_does_not_touch_the_parameter(backend: str, device: str) -> None:
    layer = linear(device, WEIGHT_NOISE, TILES)
    weight, x = layer.weight.detach().clone(), batch(device, 4, 13)
    outputs = []
    with only(backend, "analog_weight", "analog_linear"):
        for _ in range(3):
            torch.manual_seed(2)
            outputs.append(layer(x))
            outputs[-1].sum().backward()
    assert torch.equal(layer.weight, weight)
    assert not torch.equal(outputs[0], nn.functional.linear(x, weight, layer.bias))
    # Noise that stayed on the weights would be there twice the second time.
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("noise", [WEIGHT_NOISE, OUTPUT_NOISE], ids=["weights", "outputs"])
def test_no_noise_in_evaluation(noise: dict[str, Any], backend: str, device: str) -> None:
    layer, x = linear(device, RANGE, TILES, noise), batch(device, 4, 13)
    quiet = linear(device, RANGE, TILES)
    with only(backend, "analog_linear"), torch.no_grad():
        noisy = layer(x)
        layer.eval()
        assert torch.equal(layer(x), layer(x))
        assert torch.equal(layer(x), quiet.eval()(x))
        assert not torch.equal(layer(x), noisy)


def test_output_noise_has_the_range_factor(backend: str, device: str) -> None:
    """On inputs of zero an output is its noise: out_noise * wmax * IR, whatever the number of tiles."""
    x = torch.zeros(400, 13, device=device)
    layer = linear(device, OUTPUT_NOISE, TILES, bias=False)
    assert layer.input_range is not None
    found = {}
    with only(backend, "analog_linear"), torch.no_grad():
        for bound in (0.5, 2.0):
            layer.input_range.fill_(bound)
            torch.manual_seed(3)
            found[bound] = layer(x)
    assert torch.equal(found[2.0], 4 * found[0.5])
    weight = layer.weight.detach()
    tiles = torch.stack([weight[:, columns].abs().amax() for columns in tile_slices(13, 3)])
    expected = 0.1 * 2 * float((tiles.double().square().sum() / 3).sqrt())
    # 2800 numbers: their deviation lies within 8 % of the true one but once in 10^9.
    assert abs(float(found[2.0].double().std()) / expected - 1) < 0.08


def test_noise_does_not_depend_on_a_block_size(backend: str, device: str) -> None:
    """A number belongs to its row and channel, however many rows and channels there are."""
    x, weight = torch.zeros(70, 13, device=device), batch(device, 40, 13).detach()
    wmax, bound = torch.ones(3, 40, device=device), torch.ones(3, device=device)
    seed = torch.tensor([5], device=device)
    settings: dict[str, Any] = {
        "tiles": 3, "input_range_mode": "learned", "input_range": bound, "out_noise": 0.1, "seed": seed,
        "out_noise_per_channel": True,
    }  # fmt: skip
    with only(backend, "analog_linear"):
        whole = analog_linear(x, weight, wmax=wmax, **settings)
        part = analog_linear(x[:9], weight[:11], wmax=wmax[:, :11].contiguous(), **settings)
    assert torch.equal(whole[:9, :11], part)
    assert bool((part != 0).all())


# --- gradients --------------------------------------------------------------------------------------------------------


def test_each_tile_has_its_own_range_gradient(backend: str, device: str) -> None:
    layer = linear(device, RANGE, TILES, {"pre_post.input_range.decay": 0.5})
    assert layer.input_range is not None
    bounds = [0.4, 1.0, 9.0]  # nothing lies beyond the last, so that it decays
    with torch.no_grad():
        layer.input_range.copy_(torch.tensor(bounds))
    x, g = batch(device, 20, 13), batch(device, 20, 7).detach()
    with only(backend, "analog_linear"):
        layer(x).backward(g)
    gx, expected = g.double() @ layer.weight.double(), []
    for bound, columns in zip(bounds, tile_slices(13, 3), strict=True):
        part, arrived = x[:, columns].double(), gx[:, columns]
        down = arrived.clamp(max=0)[part >= bound].sum()
        up = arrived.clamp(min=0)[part <= -bound].sum()
        decays = float((part.abs() < bound).double().mean()) > 0.95
        expected.append(bound * (down - up + 0.5 * decays))
    assert expected[2] == 9.0 * 0.5
    assert_near(grad_of(layer.input_range), torch.stack(expected))


@pytest.mark.parametrize("rounds", [False, True], ids=["clip", "clip_and_rounding"])
def test_a_learned_clip_has_a_gradient(rounds: bool, backend: str, device: str) -> None:
    levels = 30
    parts = [LEARNED_CLIP, TILES]
    if rounds:
        parts.append({"modifier.quantization_type": "DiscretizePerChannel", "modifier.res": levels})
    layer = linear(device, *parts)
    assert layer.learnable_weight_clip is not None
    with torch.no_grad():
        layer.learnable_weight_clip.mul_(0.6)
    x, g = batch(device, 20, 13), batch(device, 20, 7).detach()
    with only(backend, "analog_weight", "analog_linear"):
        layer(x).backward(g)
    dw, weight = g.double().T @ x.double(), layer.weight.double()
    for tile, columns in enumerate(tile_slices(13, 3)):
        clip, part, arrived = layer.learnable_weight_clip[tile].double(), weight[:, columns], dw[:, columns]
        limit = levels / 2 if rounds else 1.0
        q = part / ((2 * clip / levels if rounds else clip).unsqueeze(1))
        slope = limit * ((q > limit).double() - (q < -limit).double())
        scale = part.numel() ** -0.5
        if rounds:
            slope += torch.where(q.abs() <= limit, q.round() - q, 0)
            scale = 2 * (limit / part.numel()) ** 0.5 / levels
        assert_near(grad_of(layer.learnable_weight_clip)[tile], scale * (arrived * slope).sum(1))
        assert_near(grad_of(layer.weight)[:, columns], torch.where(q.abs() <= limit, arrived, 0))
    assert bool((grad_of(layer.learnable_weight_clip) != 0).any(1).all())


def test_backward_respects_the_adc(backend: str, device: str) -> None:
    layer = linear(device, RANGE, TILES, {"forward.out_bound": 0.3}, bias=False)
    x, g = batch(device, 20, 13), batch(device, 20, 7).detach()
    with only(backend, "analog_linear"):
        layer(x).backward(g)
    dx, dw, shares = torch.zeros(20, 13).double(), torch.zeros(7, 13).double(), []
    for columns in tile_slices(13, 3):
        part, weight = x.detach()[:, columns].double().cpu(), layer.weight.detach()[:, columns].double().cpu()
        inside, part = part.abs() <= 3, part.clamp(-3, 3)  # the range that a layer begins with
        y = part @ weight.T
        passes = y.abs() <= 3 * 0.3 * weight.abs().max()
        shares.append(float(passes.double().mean()))
        g_tile = torch.where(passes, g.double().cpu(), 0)
        dx[:, columns], dw[:, columns] = torch.where(inside, g_tile @ weight, 0), g_tile.T @ part
    assert all(0.2 < share < 0.95 for share in shares), shares
    assert_near(grad_of(x).cpu(), dx)
    assert_near(grad_of(layer.weight).cpu(), dw)


# --- what runs --------------------------------------------------------------------------------------------------------


def test_bfloat16_runs(backend: str, device: str) -> None:
    parts = (RANGE, WEIGHT_NOISE, {"forward.inp_res": 254, "forward.out_res": 254, "forward.out_bound": 8}, TILES)
    layer, x = linear(device, *parts, dtype=torch.bfloat16), batch(device, 4, 13, dtype=torch.bfloat16)
    with only(backend, "analog_weight", "analog_linear"):
        y = layer(x)
        y.sum().backward()
    assert y.dtype is torch.bfloat16
    for each in (y, *(grad_of(tensor) for tensor in (x, *layer.parameters()))):
        assert bool(torch.isfinite(each).all())


def test_inputs_that_are_not_contiguous_run(backend: str, device: str) -> None:
    layer = linear(device, RANGE, TILES, {"forward.inp_res": 30})
    values = batch(device, 4, 13).detach()
    turned, wide = values.T.contiguous().T, torch.randn(4, 20, device=device)
    wide[:, 3:16] = values
    with only(backend, "analog_linear"), torch.no_grad():
        expected = layer(values)
        assert not turned.is_contiguous()
        assert_near(layer(turned), expected)
        assert_near(layer(wide[:, 3:16]), expected)


def test_the_default_configuration_runs(backend: str, device: str) -> None:
    layer, x, g = linear(device), batch(device, 4, 13), batch(device, 4, 7).detach()
    with only(backend, "analog_linear"):
        y = layer(x)
        y.backward(g)
    assert_near(y, x.double() @ layer.weight.double().T + layer.bias.double())
    assert_near(grad_of(x), g.double() @ layer.weight.double())
    assert_near(grad_of(layer.weight), g.double().T @ x.double())


@pytest.mark.parametrize("kind", [AnalogConv1d, AnalogConv2d, AnalogConv3d])
def test_every_convolution_runs(kind: Any, backend: str, device: str) -> None:
    torch.manual_seed(0)
    spatial = kind.SPATIAL
    layer = kind(2, 4, 2, padding=1, groups=2, rpu_config=config(RANGE, {"forward.inp_res": 254})).to(device)
    digital = kind.DIGITAL(2, 4, 2, padding=1, groups=2).to(device)
    digital.load_state_dict({name: value for name, value in layer.state_dict().items() if name in ("weight", "bias")})
    x = batch(device, 2, 2, *(3,) * spatial)
    with only(backend, "analog_linear"):
        y = layer(x)
        y.sum().backward()
    step = 2 * 3 / 254
    expected = digital((x.detach().clamp(-3, 3) / step).round() * step)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    for each in (x, *layer.parameters()):
        assert bool(torch.isfinite(grad_of(each)).all())


@pytest.mark.parametrize(("noise", "quantization"), list(itertools.product(NOISES, QUANTIZATIONS)))
def test_every_weight_modifier_runs(noise: str, quantization: str, backend: str, device: str) -> None:
    changes = {"modifier.noise_type": noise, "modifier.quantization_type": quantization}
    layer = linear(device, TILES, changes, {"modifier.res": 30, "modifier.std_dev": 0.1}, bias=False)
    x, g = torch.eye(13, device=device), batch(device, 13, 7).detach()
    ops = ("analog_linear",) if noise == quantization == "None" else ("analog_weight", "analog_linear")
    with only(backend, *ops):
        noisy = layer(x).T
        noisy.backward(g.T)
        clean = layer.eval()(x).T.detach()
    for columns in tile_slices(13, 3):
        weight = layer.weight.detach()[:, columns].double()
        maxima = weight.abs().amax(1, keepdim=True)
        if quantization != "None":
            step = (maxima if quantization.endswith("PerChannel") else maxima.amax()) * 2 / 30
            weight = (weight / step).round() * step
        assert_near(clean[:, columns], weight)
    assert torch.equal(noisy, clean) == (noise == "None")
    assert_near(grad_of(layer.weight), g.T)  # straight through


# --- what must not switch, select or compile --------------------------------------------------------------------------

SAYS_WHAT_RAN = """
import json, torch, triptych
from triptych import intercept
from triptych.analog import AnalogLinear
torch.manual_seed(0)
y = AnalogLinear(4, 3)(torch.ones(2, 4))
rows = sorted({(row.op, row.phase, row.backend) for row in triptych.report().rows if row.calls})
print(json.dumps([rows, y.tolist(), bool(intercept.active)]))
"""


def test_no_environment_variable_switches_anything_by_presence() -> None:
    """Neither the peer's variable, nor one of ours that is empty, nor a switch that is 0."""
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(environment.PREFIX) and name not in ("AIHWKIT_USE_TRITON", "TRITON_INTERPRET")
    }
    ours = {**dict.fromkeys(environment.VARIABLES, ""), "TRIPTYCH_SYNC": "0"}
    found = []
    for variables in ({}, {**ours, "AIHWKIT_USE_TRITON": "0", "TRITON_INTERPRET": "0"}):
        command = [sys.executable, "-c", SAYS_WHAT_RAN]
        done = subprocess.run(command, env={**plain, **variables}, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0][0]
    assert found[0][2] is False
    assert found[1] == found[0]


def test_a_schedule_selects_nothing_anew(backend: str, device: str) -> None:
    """Noise, resolutions and bounds that change every step are arguments of the plan that the first step made."""
    settings = {
        **OUTPUT_NOISE, **WEIGHT_NOISE, "forward.inp_res": 30, "forward.out_res": 30, "forward.out_bound": 8,
        "modifier.quantization_type": "DiscretizePerChannel", "modifier.res": 30,
    }  # fmt: skip
    layer, x = linear(device, settings, TILES), batch(device, 4, 13)
    sizes = []
    with only(backend, "analog_weight", "analog_linear"):
        for step in range(1, 4):
            values = {path: value * (1 + step / 7) for path, value in settings.items() if type(value) in (int, float)}
            layer.rpu_config = layer.rpu_config.replaced({**values, "pre_post.input_range.init_from_data": 0})
            layer(x).sum().backward()
            sizes.append(len(scope.current().plans))
    assert sizes[0] == sizes[1] == sizes[2] > 0


SCHEDULE = """
import torch
from triptych_triton.compile_check import stand_in
from triptych_triton.ops import analog_linear, analog_weight
weight, bias, seed = torch.empty(64, 64), torch.empty(64), torch.zeros(1, dtype=torch.int64)
ranges, wmax = torch.empty(2), torch.empty(2, 64)
def step(k, rows):
    x = torch.empty(rows, 64)
    analog_weight.forward(weight, None, seed, 2, "per_channel", 30.0 + k, "per_channel", 0.1 / k)
    scalars = (2, "learned", 30.0 * k, 0.1 / k, False, 8.0 + k, 30.0 / k, True, 0.01 * k, 0.9 / k)
    y, bits = analog_linear.forward(x, weight, bias, ranges, wmax, seed, *scalars)
    analog_linear.backward(y, x, weight, bias, ranges, bits, *scalars, True, True, True, True)
with stand_in(90) as recorder:
    step(1, 32)
    step(1, 33)  # the bits of its second tile lie on no 16 bytes: one variant more, for all such token counts
    first = len(recorder.variants)
    for k in range(2, 6):
        step(k, 16 * k + k % 2)
print(first, len(recorder.variants))
"""


@pytest.mark.slow
def test_triton_compiles_nothing_new_for_a_schedule_or_a_token_count() -> None:
    pytest.importorskip("triptych_triton", reason="triptych-triton is not installed")
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCHEDULE]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    first, all_of_them = map(int, done.stdout.split())
    assert first == all_of_them > 5


def test_triton_tunes_nothing() -> None:
    """There is no autotuner, so that a new token count cannot set one off."""
    package = pytest.importorskip("triptych_triton", reason="triptych-triton is not installed")
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    kernels = 0
    for each in pkgutil.walk_packages(package.__path__, "triptych_triton."):
        for value in vars(importlib.import_module(each.name)).values():
            assert not isinstance(value, autotuner.Autotuner | autotuner.Heuristics), value
            kernels += type(value).__name__ in ("JITFunction", "InterpretedFunction")
    assert kernels > 10
