"""Analog layers on a GPU: nothing waits for the device, CUDA graphs draw new noise and calibrate, compilers agree."""

from __future__ import annotations

import copy
import itertools
import os
from typing import Any

import pytest
import torch
from torch import nn

import triptych
from triptych.analog import AnalogConfig, AnalogConv2d, AnalogLinear

pytestmark = pytest.mark.gpu

QUIET = AnalogConfig().replaced(
    {
        "forward.inp_res": 254,
        "forward.out_res": 254,
        "forward.out_bound": 3,
        "pre_post.input_range.enable": True,
        "pre_post.input_range.init_from_data": 4,
        "mapping.max_input_size": 100,
        "modifier.quantization_type": "DiscretizePerChannel",
        "modifier.res": 254,
    }
)
NOISY = QUIET.replaced(
    {"forward.out_noise": 0.01, "modifier.noise_type": "AddNormalPerChannel", "modifier.std_dev": 0.03}
)
FAST = NOISY.replaced("pre_post.input_range.fast_mode", True)
LEARNED_CLIP = NOISY.replaced("clip.type", "LearnablePerChannel")


@pytest.fixture(autouse=True, params=["torch", "composite", "triton", "cuda"])
def on_backend(request: Any) -> Any:
    if request.param != "composite":
        pytest.importorskip(f"triptych_{request.param}", reason=f"triptych-{request.param} is not installed")
    if request.param == "triton" and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        pytest.skip("TRITON_INTERPRET is set: nothing would run on the GPU")
    torch.manual_seed(0)
    with triptych.use(request.param):
        yield


class Small(nn.Module):
    def __init__(self, config: AnalogConfig) -> None:
        super().__init__()
        self.conv = AnalogConv2d(4, 8, 3, groups=2, padding=1, device="cuda", rpu_config=config)
        self.linear = AnalogLinear(8 * 36, 10, device="cuda", rpu_config=config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.linear(self.conv(x).tanh().flatten(1)))


@pytest.mark.parametrize("config", [NOISY, FAST, LEARNED_CLIP], ids=["noisy", "fast", "learned_clip"])
def test_nothing_waits_for_the_device(config: AnalogConfig) -> None:
    model, x = Small(config), torch.randn(16, 4, 6, 6, device="cuda")
    for _ in range(2):
        model(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("config", [NOISY, FAST, LEARNED_CLIP], ids=["noisy", "fast", "learned_clip"])
def test_a_captured_step_draws_new_noise_and_calibrates(config: AnalogConfig) -> None:
    model, x = Small(config), torch.randn(16, 4, 6, 6, device="cuda")
    start = copy.deepcopy(model.state_dict())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            model(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
        y.square().sum().backward()
    model.load_state_dict(start)
    outputs, counts = [], []
    for _ in range(6):
        graph.replay()
        outputs.append(y.clone())
        counts.append(int(model.linear.input_range_update_idx[0]))  # type: ignore[index]
    assert counts == [1, 2, 3, 4, 4, 4]
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(outputs))
    assert all(bool(torch.isfinite(each).all()) for each in outputs)


@pytest.mark.parametrize("options", [{"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"}], ids=str)
def test_compiled_training_is_eager_training(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = Small(QUIET)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, **options)
    for _ in range(6):
        x = torch.randn(16, 4, 6, 6, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        other.zero_grad()
        model(x).square().sum().backward()
        compiled(x).square().sum().backward()
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(one, two)
        for one, two in zip(model.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize("options", [{"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"}], ids=str)
def test_compiled_noise_is_drawn_anew(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = Small(NOISY)
    compiled = torch.compile(model, fullgraph=True, **options)
    x = torch.randn(16, 4, 6, 6, device="cuda")
    outputs = []
    for _ in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()  # gradients lie in the graph's memory, which the next replay writes
        y = compiled(x)
        outputs.append(y.detach().clone())
        y.sum().backward()
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(outputs))
    assert model.linear.input_range_update_idx is not None
    assert model.linear.input_range_update_idx.tolist() == [4, 4, 4]


def test_a_layer_in_half_precision_and_a_range_that_is_not_finite() -> None:
    layer = AnalogLinear(300, 64, device="cuda", dtype=torch.bfloat16, rpu_config=NOISY)
    x = torch.randn(32, 300, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).float().square().sum().backward()
    assert bool(torch.isfinite(layer.weight.grad).all())  # type: ignore[arg-type]
    with torch.no_grad():
        layer.input_range.fill_(float("nan"))  # type: ignore[union-attr]
    assert bool(layer.eval()(x).isnan().all())
