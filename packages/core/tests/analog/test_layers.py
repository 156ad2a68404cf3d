"""AnalogLinear and the convolutions: construction and the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from analog_configs import CONVERTERS, LEARNED_CLIP, NOISE, QUANTIZED, RANGE, TILES, config
from spies import ran
from torch import nn
from torch.func import grad, jvp, vmap
from torch.nn import functional

import triptych
from triptych import ArgumentError, DerivativeError
from triptych.analog import AnalogConfig, AnalogConv1d, AnalogConv2d, AnalogConv3d, AnalogLinear


@pytest.fixture(autouse=True)
def on_composite() -> Any:
    torch.manual_seed(0)
    with triptych.use("composite"):
        yield


# --- construction -----------------------------------------------------------------------------------------------------


def test_the_default_is_a_linear_layer() -> None:
    layer = AnalogLinear(13, 7)
    digital = nn.Linear(13, 7)
    digital.load_state_dict(layer.state_dict())
    assert isinstance(layer, nn.Linear)
    assert repr(layer) == "AnalogLinear(in_features=13, out_features=7, bias=True)"
    x = torch.randn(2, 3, 13, requires_grad=True)
    with ran() as seen:
        y = layer(x)
        y.square().sum().backward()
    assert seen == {("analog_linear", "forward", "composite"): 1, ("analog_linear", "backward", "composite"): 1}
    again = x.detach().clone().requires_grad_()
    expected = digital(again)
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, again.grad)
    torch.testing.assert_close(layer.weight.grad, digital.weight.grad)


def test_what_is_not_default_shows() -> None:
    layer = AnalogLinear(13, 7, bias=False, rpu_config=config(CONVERTERS, TILES))
    assert repr(layer) == (
        "AnalogLinear(in_features=13, out_features=7, bias=False, tiles=3, forward.inp_res=254.0, forward.out_bound=3.0, "
        "forward.out_res=254.0, mapping.max_input_size=5, pre_post.input_range.enable=True, "
        "pre_post.input_range.init_from_data=2)"
    )
    assert layer.in_sizes == (5, 4, 4)


@pytest.mark.parametrize(
    ("parts", "parameters", "buffers"),
    [
        ((), set(), set()),
        ((RANGE,), {"input_range"}, {"input_range_update_idx"}),
        ((RANGE, {"pre_post.input_range.dynamic": True}), set(), set()),
        (
            (RANGE, {"pre_post.input_range.fast_mode": True}),
            {"input_range"},
            {"input_range_update_idx", "x_min", "x_max"},
        ),
        ((LEARNED_CLIP,), {"learnable_weight_clip"}, set()),
    ],
)
def test_a_layer_has_the_tensors_that_its_configuration_needs(
    parts: tuple[dict[str, Any], ...], parameters: set[str], buffers: set[str]
) -> None:
    layer = AnalogLinear(13, 7, dtype=torch.bfloat16, rpu_config=config(TILES, *parts))
    assert {name for name, _ in layer.named_parameters()} == {"weight", "bias"} | parameters
    assert {name for name, _ in layer.named_buffers()} == buffers
    if layer.input_range is not None:
        assert layer.input_range.dtype is torch.bfloat16
        assert layer.input_range.tolist() == [3.0] * 3
        assert layer.input_range_update_idx is not None
        assert layer.input_range_update_idx.tolist() == [0] * 3
    if layer.x_min is not None:
        assert layer.x_min.dtype is torch.float32
    if layer.learnable_weight_clip is not None:
        parts_ = layer.weight.abs().split([5, 4, 4], 1)
        assert torch.equal(layer.learnable_weight_clip, torch.stack([part.amax(1) for part in parts_]))


def test_a_range_that_is_not_learned_has_no_gradient() -> None:
    layer = AnalogLinear(4, 2, rpu_config=config(RANGE, {"pre_post.input_range.learn_input_range": False}))
    assert layer.input_range is not None
    assert not layer.input_range.requires_grad
    layer(torch.randn(3, 4)).sum().backward()
    layer.rpu_config = layer.rpu_config.replaced("pre_post.input_range.learn_input_range", True)
    assert layer.input_range.requires_grad


def test_what_is_frozen_stays_so() -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(CONVERTERS, NOISE)).requires_grad_(False)
    layer.rpu_config = layer.rpu_config.replaced("modifier.std_dev", 0.05)
    assert not any(each.requires_grad for each in layer.parameters())
    for learned in (False, True):
        layer.rpu_config = layer.rpu_config.replaced("pre_post.input_range.learn_input_range", learned)
        assert layer.input_range is not None
        assert layer.input_range.requires_grad is learned


def test_a_configuration_must_be_one() -> None:
    for make in (lambda **given: AnalogLinear(3, 2, **given), lambda **given: AnalogConv2d(3, 2, 1, **given)):
        for wrong in (None, {}, AnalogConfig):
            with pytest.raises(
                triptych.ArgumentError, match=r"rpu_config is a .*It must be a triptych.analog.AnalogConfig"
            ):
                make(rpu_config=wrong)


def test_changing_the_configuration() -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(RANGE, TILES))
    layer.layer_name = "up"
    before = dict(layer.named_parameters())
    layer.rpu_config = layer.rpu_config.replaced("modifier.noise_type", "AddNormal").replaced("forward.inp_res", 6)
    assert layer.rpu_config.forward.inp_res == 6
    assert all(after is before[name] for name, after in layer.named_parameters())
    x = torch.randn(2, 13)
    layer.eval()
    assert layer.input_range is not None
    steps = layer.input_range.detach()[0] * 2 / 6
    expected = functional.linear((x / steps).round().clamp(-3, 3) * steps, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected)
    for path, value, text in (
        ("mapping.max_input_size", 13, "splits the 13 inputs into 1 tiles; the layer has 3"),
        ("pre_post.input_range.enable", False, "has no use for input_range"),
        ("pre_post.input_range.fast_mode", True, "needs x_min, which the layer does not have"),
        ("clip.type", "LearnablePerChannel", "needs learnable_weight_clip"),
    ):
        new = layer.rpu_config.replaced("forward.inp_res", -1).replaced(path, value)
        with pytest.raises(triptych.ArgumentError, match=f"^AnalogLinear 'up': rpu_config .*{text}"):
            layer.rpu_config = new
    assert layer.rpu_config.forward.inp_res == 6


# --- the forward pass -------------------------------------------------------------------------------------------------


def test_which_ops_run() -> None:
    everything = config(CONVERTERS, TILES, NOISE, QUANTIZED, {"forward.out_noise": 0.1})
    layer = AnalogLinear(13, 7, rpu_config=everything)
    x = torch.randn(4, 13, requires_grad=True)
    with ran() as seen:
        layer(x).sum().backward()
    assert seen == {
        ("input_range_update", "forward", "composite"): 1,
        ("analog_weight", "forward", "composite"): 2,  # once more for backward
        ("analog_linear", "forward", "composite"): 1,
        ("analog_linear", "backward", "composite"): 1,
    }
    plain = AnalogLinear(13, 7, rpu_config=config(CONVERTERS)).eval()
    with ran() as seen, torch.no_grad():
        plain(x)
    assert seen == {("tile_abs_max", "forward", "composite"): 1, ("analog_linear", "forward", "composite"): 1}


def test_layers_are_selected_by_name() -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(CONVERTERS, QUANTIZED))
    triptych.name_layers(nn.ModuleDict({"up": layer}))
    from spies import spying

    with spying("composite;@up=spy") as spy:
        layer(torch.randn(4, 13))
    assert {op for op, _, _ in spy.ran} == {"input_range_update", "analog_weight", "analog_linear"}


def test_noise_is_drawn_in_training_only_anew_each_time_and_never_on_the_parameter() -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(NOISE, RANGE, {"forward.out_noise": 0.1}))
    weight, x = layer.weight.detach().clone(), torch.randn(4, 13)
    one, other = layer(x), layer(x)
    assert not torch.equal(one, other)
    assert torch.equal(layer.weight, weight)
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    torch.testing.assert_close(
        layer(x), functional.linear(x.clamp(-layer.input_range, layer.input_range), weight, layer.bias)
    )
    layer.train()
    torch.manual_seed(7)
    one = layer(x)
    torch.manual_seed(7)
    assert torch.equal(layer(x), one)


def test_a_deviation_of_zero_is_no_noise() -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(NOISE).replaced("modifier.std_dev", 0))
    x, state = torch.randn(4, 13), torch.get_rng_state()
    assert torch.equal(layer(x), layer.eval()(x))
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_are_quantised_in_evaluation_too() -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(QUANTIZED)).eval()
    step = layer.weight.abs().amax(1, keepdim=True) * 2 / 30
    expected = functional.linear(torch.eye(13), (layer.weight / step).round() * step)
    torch.testing.assert_close(layer(torch.eye(13)) - layer.bias, expected)


def test_the_gradient_goes_straight_through_noise_and_quantisation() -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(NOISE, QUANTIZED))
    x, g = torch.randn(4, 13), torch.randn(4, 7)
    layer(x).backward(g)
    torch.testing.assert_close(layer.weight.grad, g.T @ x)
    torch.testing.assert_close(layer.bias.grad, g.sum(0))


def test_a_learned_clip_is_learned() -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(LEARNED_CLIP, TILES))
    assert layer.learnable_weight_clip is not None
    with torch.no_grad():
        layer.learnable_weight_clip.mul_(0.5)
    layer(torch.randn(4, 13)).square().sum().backward()
    assert layer.learnable_weight_clip.grad is not None
    assert layer.weight.grad is not None
    assert bool((layer.learnable_weight_clip.grad != 0).any())
    a = torch.cat([layer.learnable_weight_clip[tile].unsqueeze(1).expand(7, n) for tile, n in enumerate((5, 4, 4))], 1)
    assert bool((layer.weight.grad[layer.weight.abs() > a] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_shapes_and_dtypes(dtype: torch.dtype) -> None:
    layer = AnalogLinear(13, 7, dtype=dtype, rpu_config=config(CONVERTERS, TILES, NOISE))
    for shape in ((13,), (0, 13), (1, 13), (2, 3, 13), (2, 0, 13)):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert (y.shape, y.dtype) == ((*shape[:-1], 7), dtype)
        assert x.grad is not None
        assert x.grad.shape == x.shape
    assert layer(torch.randn(13, 2, dtype=dtype).T).shape == (2, 7)


def test_an_input_that_does_not_fit_changes_nothing() -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(RANGE))
    for x, text in (
        (torch.ones(2, 12), r"has shape \[2, 12\]. Its last dimension must be 13, the layer's in_features"),
        (torch.ones(()), r"has shape \[\]"),
        (torch.ones(2, 13, dtype=torch.bfloat16), "has dtype torch.bfloat16 and the weight has dtype torch.float32"),
        ([1.0] * 13, "is a list. It must be a torch.Tensor"),
    ):
        with pytest.raises(triptych.ArgumentError, match=f"^AnalogLinear: the input {text}"):
            layer(x)
    assert layer.input_range_update_idx is not None
    assert layer.input_range_update_idx.tolist() == [0]


def test_a_range_that_is_not_finite_is_refused() -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(RANGE))
    assert layer.input_range is not None
    with pytest.raises(triptych.ArgumentError, match=r"the input_range assigned to it holds \[nan\]"):
        layer.input_range = nn.Parameter(torch.tensor([float("nan")]))
    with pytest.raises(
        triptych.ArgumentError, match=r"has shape \[2\]. It must have shape \[1\], one number for each tile"
    ):
        layer.input_range = nn.Parameter(torch.ones(2))
    layer.input_range = nn.Parameter(torch.ones(1))
    with torch.no_grad():
        layer.input_range.fill_(float("inf"))
    with pytest.raises(triptych.ArgumentError, match=r"holds .*inf"):
        layer.eval()(torch.ones(2, 13))


# --- convolutions -----------------------------------------------------------------------------------------------------

CONVOLUTIONS: list[tuple[Any, Any, int]] = [
    (AnalogConv1d, nn.Conv1d, 1),
    (AnalogConv2d, nn.Conv2d, 2),
    (AnalogConv3d, nn.Conv3d, 3),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(("analog", "digital", "spatial"), CONVOLUTIONS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1, "dilation": 2},
        {"padding": "same", "dilation": 2},
        {"padding": "same", "kernel_size": 4},
        {"padding": "valid", "groups": 2},
        {"groups": 4, "bias": False, "padding": 2},
        {"padding": 2, "padding_mode": "reflect"},
        {"padding": 2, "padding_mode": "replicate", "stride": 3},
        {"padding": "same", "padding_mode": "circular", "kernel_size": 4},
        {"kernel_size": 1},
    ],
    ids=str,
)
def test_the_default_is_a_convolution(analog: Any, digital: Any, spatial: int, options: dict[str, Any]) -> None:
    arguments = {"kernel_size": 3, **options}
    ours, theirs = analog(4, 8, **arguments), digital(4, 8, **arguments)
    assert isinstance(ours, digital)
    assert repr(ours) == repr(theirs).replace("Conv", "AnalogConv")
    theirs.load_state_dict(ours.state_dict())
    for shape in ((2, 4, *(7, 9, 8)[:spatial]), (4, *(7, 9, 8)[:spatial]), (0, 4, *(7, 9, 8)[:spatial])):
        x = torch.randn(shape, requires_grad=True)
        again = x.detach().clone().requires_grad_()
        y, expected = ours(x), theirs(again)
        assert y.is_contiguous()
        torch.testing.assert_close(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, again.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-4)


def test_uneven_convolutions() -> None:
    ours = AnalogConv2d(3, 5, (2, 3), stride=(1, 2), padding=(2, 1), dilation=(3, 1))
    theirs = nn.Conv2d(3, 5, (2, 3), stride=(1, 2), padding=(2, 1), dilation=(3, 1))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 8, 9).to(memory_format=torch.channels_last)
    torch.testing.assert_close(ours(x), theirs(x))
    ours = ours.to(memory_format=torch.channels_last)
    torch.testing.assert_close(ours(x), theirs(x))


def test_each_group_is_crossbars_of_its_own() -> None:
    settings = config(CONVERTERS, TILES, LEARNED_CLIP, QUANTIZED)
    whole = AnalogConv2d(4, 6, 3, groups=2, rpu_config=settings)
    assert (whole.crossbars, whole.tiles, whole.in_sizes) == (2, 4, (5, 5, 4, 4))
    assert whole.input_range is not None
    assert whole.learnable_weight_clip is not None
    assert whole.input_range.shape == (8,)
    assert whole.learnable_weight_clip.shape == (8, 3)
    parts = [AnalogConv2d(2, 3, 3, rpu_config=settings) for _ in range(2)]
    for group, part in enumerate(parts):
        part.set_weights(whole.weight[3 * group : 3 * group + 3], whole.bias[3 * group : 3 * group + 3])
    x = torch.randn(2, 4, 6, 6)
    y = whole(x)
    expected = torch.cat([part(half) for part, half in zip(parts, x.chunk(2, 1), strict=True)], 1)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    expected.sum().backward()
    for name in ("weight", "bias", "input_range", "learnable_weight_clip"):
        grads = torch.cat([part.get_parameter(name).grad for part in parts])  # type: ignore[misc]
        torch.testing.assert_close(whole.get_parameter(name).grad, grads)
        values = torch.cat([part.get_parameter(name) for part in parts])
        torch.testing.assert_close(whole.get_parameter(name), values)
    assert whole.input_range_update_idx is not None
    assert whole.input_range_update_idx.tolist() == [1] * 8


def test_an_input_that_does_not_fit_a_convolution() -> None:
    layer = AnalogConv2d(4, 8, 3)
    for shape, text in (
        ((2, 3, 9, 9), "It must have 4 channels and 2 spatial dimensions"),
        ((9, 9), "It must have 4 channels"),
        ((1, 2, 4, 9, 9), "It must have 4 channels"),
        ((4, 2, 9), r"the padded input has size \[2, 9\]. It must be at least \[3, 3\]"),
    ):
        with pytest.raises(triptych.ArgumentError, match=text):
            layer(torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_takes_either_dtype_and_answers_as_torch_does(dtype: torch.dtype) -> None:
    """Inside, everything stays in the dtype of the weights: autocast decides only what comes in and goes out."""
    layer = AnalogLinear(13, 7, rpu_config=config(CONVERTERS, TILES, QUANTIZED)).eval()
    x = torch.randn(5, 13)
    for given in (x, x.to(dtype)):
        wanted = layer(given.float()).to(dtype)
        with torch.autocast("cpu", dtype):
            found = layer(given)
            assert found.dtype == nn.Linear(13, 7)(given).dtype == dtype
        assert torch.equal(found, wanted)
    with torch.autocast("cpu", dtype):
        layer.train()(x.to(dtype)).float().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    with pytest.raises(ArgumentError, match=r"the input has dtype torch\.(bfloat16|float16) and the weight"):
        layer(x.to(dtype))


# --- transforms -------------------------------------------------------------------------------------------------------

TRANSFORMED = [config(NOISE), config(RANGE), config(QUANTIZED), config(LEARNED_CLIP)]


@pytest.mark.parametrize("settings", TRANSFORMED)
def test_derivatives_that_do_not_exist_are_refused(settings: AnalogConfig) -> None:
    layer = AnalogLinear(13, 7, rpu_config=settings).eval()
    x = torch.randn(5, 3, 13)
    with pytest.raises(DerivativeError, match="forward-mode differentiation"):
        jvp(layer, (x,), (x,))
    with pytest.raises(DerivativeError, match="was differentiated twice"):
        grad(lambda x: grad(lambda x: layer(x).sum())(x).sum())(x)


@pytest.mark.parametrize("transform", [lambda f: f, grad])
def test_a_layer_that_calibrates_refuses_vmap(transform: Callable[..., Any]) -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(RANGE))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(
        ArgumentError, match=r"^An analog layer was called inside torch\.func\.vmap while it calibrates"
    ):
        vmap(transform(lambda x: layer(x).sum()))(torch.randn(5, 3, 13))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_layers_go_through_vmap() -> None:
    x = torch.randn(5, 3, 13)
    for settings in (AnalogConfig(), config(CONVERTERS, TILES), *TRANSFORMED):
        layer = AnalogLinear(13, 7, rpu_config=settings).eval()
        torch.testing.assert_close(vmap(layer)(x), layer(x))
