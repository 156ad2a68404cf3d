"""Analog layers in training: calibration, recomputation, torch.compile, what is kept for backward."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from spies import ran
from torch import nn
from torch.utils.checkpoint import checkpoint

import triptych
from triptych.analog import AnalogConfig, AnalogConv2d, AnalogLinear

CONVERTERS = {
    "forward.inp_res": 254,
    "forward.out_res": 254,
    "forward.out_bound": 3,
    "pre_post.input_range.enable": True,
    "pre_post.input_range.init_from_data": 2,
    "mapping.max_input_size": 5,
}
NOISE = {
    "forward.out_noise": 0.01,
    "modifier.noise_type": "AddNormalPerChannel",
    "modifier.std_dev": 0.03,
    "modifier.quantization_type": "DiscretizePerChannel",
    "modifier.res": 254,
}
CONFIGS = {
    "learned": AnalogConfig().replaced(CONVERTERS | NOISE),
    "fast": AnalogConfig().replaced(CONVERTERS | NOISE | {"pre_post.input_range.fast_mode": True}),
    "learned_clip": AnalogConfig().replaced(CONVERTERS | NOISE | {"clip.type": "LearnablePerChannel"}),
    "gaussian": AnalogConfig().replaced(CONVERTERS | NOISE | {"clip.type": "LayerGaussianPerChannel", "clip.sigma": 2}),
    "dynamic": AnalogConfig().replaced(CONVERTERS | NOISE | {"pre_post.input_range.dynamic": True}),
    "default": AnalogConfig(),
}


@pytest.fixture(autouse=True)
def on_composite() -> Any:
    torch.manual_seed(0)
    with triptych.use("composite"):
        yield


class Small(nn.Module):
    def __init__(self, config: AnalogConfig) -> None:
        super().__init__()
        self.conv = AnalogConv2d(2, 4, 3, groups=2, rpu_config=config)
        self.linear = AnalogLinear(16, 3, rpu_config=config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.linear(self.conv(x).tanh().flatten(1)))


Wrap = Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]


def compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def checkpointed(function: Any, reentrant: bool) -> Any:
    return lambda x: checkpoint(function, x, use_reentrant=reentrant)


WRAPS: dict[str, Wrap] = {
    "compiled": compiled,
    "checkpointed": lambda model: checkpointed(model, False),
    "checkpointed_reentrant": lambda model: checkpointed(model, True),
    "compiled_inside_checkpoint": lambda model: checkpointed(compiled(model), False),
    "compiled_inside_checkpoint_reentrant": lambda model: checkpointed(compiled(model), True),
    "checkpoint_inside_compiled": lambda model: compiled(checkpointed(model, False)),
}


def train(config: AnalogConfig, wrap: Wrap) -> list[torch.Tensor]:
    """What three steps of training give: outputs, gradients, parameters, buffers."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Small(config)
    function = wrap(model)
    results = []
    for _ in range(3):
        x = torch.randn(5, 2, 4, 4, requires_grad=True)
        y = function(x)
        y.square().sum().backward()
        assert x.grad is not None
        results += [y.detach(), x.grad]
    results += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*results, *model.state_dict().values()]


@pytest.mark.parametrize(
    ("config", "wrap"),
    [
        *((config, wrap) for config in CONFIGS for wrap in ("compiled", "checkpointed", "checkpointed_reentrant")),
        *(("learned", wrap) for wrap in WRAPS if "inside" in wrap),
        ("fast", "compiled_inside_checkpoint"),
        ("learned_clip", "checkpoint_inside_compiled"),
    ],
)
def test_recomputed_and_compiled_training_is_eager_training(config: str, wrap: str) -> None:
    expected, got = train(CONFIGS[config], lambda model: model), train(CONFIGS[config], WRAPS[wrap])
    assert len(expected) == len(got)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)


def test_a_backward_needs_the_range_of_its_own_forward() -> None:
    config = AnalogConfig().replaced({"pre_post.input_range.enable": True, "pre_post.input_range.decay": 0})
    one, other = (AnalogLinear(6, 3, rpu_config=config) for _ in range(2))
    other.load_state_dict(one.state_dict())
    x, wider = torch.randn(20, 6), 10 * torch.randn(20, 6)
    first = one(x)
    one(wider)
    assert one.input_range_update_idx is not None
    assert one.input_range_update_idx.tolist() == [2]
    first.sum().backward()
    other(x).sum().backward()
    assert one.input_range is not None
    assert other.input_range is not None
    assert torch.equal(one.input_range.grad, other.input_range.grad)  # type: ignore[arg-type]
    assert torch.equal(one.weight.grad, other.weight.grad)  # type: ignore[arg-type]


def test_calibration_counts_batches_and_then_stops() -> None:
    layer = AnalogLinear(8, 3, rpu_config=CONFIGS["learned"])
    assert layer.input_range is not None
    assert layer.input_range_update_idx is not None
    seen = []
    for _ in range(4):
        layer(torch.randn(5, 8))
        seen.append((layer.input_range.tolist(), layer.input_range_update_idx.tolist()))
    assert [count for _, count in seen] == [[1, 1], [2, 2], [2, 2], [2, 2]]
    assert seen[0][0] != seen[1][0] == seen[2][0] == seen[3][0]
    layer.eval()(torch.randn(5, 8))
    assert layer.input_range_update_idx.tolist() == [2, 2]


def test_a_batch_that_is_not_finite_is_skipped() -> None:
    for name in ("learned", "fast"):
        layer = AnalogLinear(8, 3, rpu_config=CONFIGS[name])
        layer(torch.full((5, 8), float("nan")))
        layer(torch.empty(0, 8))
        assert layer.input_range is not None
        assert layer.input_range_update_idx is not None
        assert layer.input_range.tolist() == [3, 3]
        assert layer.input_range_update_idx.tolist() == [0, 0]


def kept(function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, dict[int, int]]:
    """What a forward keeps for backward, as bytes by storage."""
    storages: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function()
    return y, storages


@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_kept_for_backward(config: str) -> None:
    rows, inputs, outputs, tiles = 64, 96, 80, 20
    layer = AnalogLinear(inputs, outputs, rpu_config=CONFIGS[config])
    digital = nn.Linear(inputs, outputs)
    x = torch.randn(rows, inputs, requires_grad=True)
    y, mine = kept(lambda: layer(x))
    _, theirs = kept(lambda: digital(x))
    assert sum(theirs.values()) == 4 * inputs * (rows + outputs)
    bits = tiles * rows * ((outputs + 7) // 8) if layer.rpu_config.forward.out_bound else 0
    small = 4 * (outputs + tiles) + 8  # and the seed
    if layer.learnable_weight_clip is not None:
        small += 4 * layer.learnable_weight_clip.numel()  # the Parameter itself
    assert sum(mine.values()) <= sum(theirs.values()) + bits + small
    y.sum().backward()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_convolution_keeps_its_input_and_not_the_unfolded_columns(groups: int, autocast: bool) -> None:
    arguments = {"padding": 1, "groups": groups}
    layer = AnalogConv2d(6, 8, 3, rpu_config=CONFIGS["learned"], **arguments)  # type: ignore[arg-type]
    digital = nn.Conv2d(6, 8, 3, **arguments)  # type: ignore[arg-type]
    x = torch.randn(4, 6, 12, 12, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, mine = kept(lambda: layer(x.to(torch.bfloat16) if autocast else x))
    _, theirs = kept(lambda: digital(x))
    bits = groups * layer.tiles * 4 * 12 * 12 * (8 // groups // 8 + bool(8 // groups % 8))  # the ADC's
    small = 4 * (8 + groups * layer.tiles) + 8 * groups
    assert sum(mine.values()) <= sum(theirs.values()) + bits + small
    with torch.no_grad():
        columns = layer.crossbar_inputs(x)
    assert sum(each.numel() for each in columns) > 8 * x.numel()
    y.float().sum().backward()


def test_weights_that_change_before_backward_are_an_error() -> None:
    layer = AnalogLinear(8, 3, rpu_config=CONFIGS["learned"])
    y = layer(torch.randn(5, 8))
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_frozen_layer_passes_gradients_on() -> None:
    for config in CONFIGS.values():
        layer = AnalogLinear(8, 3, rpu_config=config).requires_grad_(False)
        x = torch.randn(5, 8, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None
        assert layer.weight.grad is None


def test_a_compiled_layer_follows_its_configuration() -> None:
    torch._dynamo.reset()
    layer = AnalogLinear(8, 3, rpu_config=CONFIGS["learned"])
    function = compiled(layer)
    x = torch.randn(5, 8)
    for deviation in (0.0, 0.1, 0.2, 0.1):
        layer.rpu_config = layer.rpu_config.replaced("modifier.std_dev", deviation)
        torch.manual_seed(5)
        state = copy.deepcopy(layer.state_dict())
        got = function(x)
        torch.manual_seed(5)
        layer.load_state_dict(state)
        assert torch.equal(got, layer(x))


@pytest.mark.parametrize("backend", ["torch", "composite"])
def test_which_backend_ran(backend: str) -> None:
    layer = AnalogLinear(8, 3, rpu_config=CONFIGS["learned_clip"])
    with triptych.use(backend), ran() as seen:
        layer(torch.randn(5, 8, requires_grad=True)).sum().backward()
    assert {key[2] for key in seen} == {backend}
    assert {key[:2] for key in seen} == {
        ("input_range_update", "forward"),
        ("analog_weight", "forward"),
        ("analog_weight", "backward"),
        ("analog_linear", "forward"),
        ("analog_linear", "backward"),
    }


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("config", ["learned", "fast", "gaussian"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_exported_layer_trains_calibrates_and_is_saved(config: str, strict: bool) -> None:
    model = nn.Sequential(
        AnalogLinear(9, 6, rpu_config=CONFIGS[config]), AnalogLinear(6, 4, rpu_config=CONFIGS[config])
    )
    x, file = torch.randn(5, 9), io.BytesIO()
    shapes = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(model, (x,), strict=strict, dynamic_shapes=shapes), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    loaded(torch.randn(7, 9)).sum().backward()
    state = loaded.state_dict()
    assert state["0.input_range_update_idx"].tolist() == [1, 1]
    assert not torch.equal(state["0.input_range"], model.state_dict()["0.input_range"])
    assert all(parameter.grad is not None for parameter in loaded.parameters())
