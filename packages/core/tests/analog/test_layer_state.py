"""What an analog layer holds: state_dicts, copies, the meta device, weights that are set, read and rounded."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from analog_configs import CONVERTERS, LEARNED_CLIP, NOISE, QUANTIZED, RANGE, TILES, config
from torch import nn
from torch.nn import functional

import triptych
from triptych.analog import AnalogConfig, AnalogConv1d, AnalogConv2d, AnalogLinear

EVERYTHING = config(CONVERTERS, TILES, NOISE, QUANTIZED, LEARNED_CLIP, {"pre_post.input_range.fast_mode": True})


@pytest.fixture(autouse=True)
def on_composite() -> Any:
    torch.manual_seed(0)
    with triptych.use("composite"):
        yield


@pytest.mark.parametrize(
    "make", [lambda **given: AnalogLinear(13, 7, **given), lambda **given: AnalogConv1d(4, 6, 3, groups=2, **given)]
)
def test_state_goes_round(make: Any) -> None:
    layer = make(rpu_config=EVERYTHING)
    x = torch.randn(2, 13) if isinstance(layer, nn.Linear) else torch.randn(2, 4, 9)
    layer(x)
    layer.layer_name = "up"
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    other = make(rpu_config=EVERYTHING)
    other.load_state_dict(layer.state_dict())
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False), other]
    layer.eval()
    for each in copies:
        assert each.rpu_config == EVERYTHING
        assert {name: value.tolist() for name, value in each.state_dict().items()} == {
            name: value.tolist() for name, value in layer.state_dict().items()
        }
        assert torch.equal(each.eval()(x), layer(x))
        assert not {value.data_ptr() for value in each.parameters()} & {
            value.data_ptr() for value in layer.parameters()
        }
    assert copies[0].layer_name == "up"


def test_state_is_written_without_code() -> None:
    layer = AnalogLinear(13, 7, rpu_config=EVERYTHING)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    layer.load_state_dict(torch.load(buffer, weights_only=True))


def test_the_state_of_the_peer_is_read() -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(RANGE, TILES))
    state = layer.state_dict()
    tiny = torch.full((3,), 1e-5)
    state |= {"input_range": torch.tensor([1.0, 2.0, 3.0]), "x_min": -tiny, "x_max": tiny}
    for count in (torch.tensor([0.0, 1, 2]), torch.tensor([0.0, 1, 2], dtype=torch.bfloat16)):
        state["input_range_update_idx"] = count
        layer.load_state_dict(state)
        assert layer.input_range_update_idx is not None
        assert layer.input_range_update_idx.dtype is torch.int64
        assert layer.input_range_update_idx.tolist() == [0, 1, 2]
    state["input_range_update_idx"] = torch.full((3,), -float("inf"))  # what its calibration leaves
    layer.load_state_dict(state)
    assert layer.input_range_update_idx.tolist() == [2, 2, 2]
    assert layer.input_range is not None
    assert layer.input_range.tolist() == [1, 2, 3]


def test_a_state_that_cannot_be_meant_is_refused() -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(RANGE, TILES))
    model = nn.Sequential(layer)
    state = model.state_dict()
    for value in (float("nan"), float("inf")):
        with pytest.raises(triptych.ArgumentError, match=r"0.input_range of the state_dict holds"):
            model.load_state_dict({**state, "0.input_range": torch.tensor([1, value, 1])})
    with pytest.raises(triptych.ArgumentError, match=r"0.input_range_update_idx of the state_dict holds"):
        model.load_state_dict({**state, "0.input_range_update_idx": torch.tensor([1, float("nan"), 1])})
    with pytest.raises(triptych.ArgumentError, match=r"0.input_range_update_idx of the state_dict holds \[1, -1, 1\]"):
        model.load_state_dict({**state, "0.input_range_update_idx": torch.tensor([1, -1, 1])})
    with pytest.raises(
        RuntimeError, match=r"0.input_range must have shape \[3\], one number for each tile: was it saved"
    ):
        model.load_state_dict({**state, "0.input_range": torch.ones(2)})
    with pytest.raises(RuntimeError, match=r"Missing key.*input_range"):
        model.load_state_dict(nn.Sequential(nn.Linear(13, 7)).state_dict())
    assert layer.input_range is not None
    assert layer.input_range.tolist() == [3.0] * 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_learned_clip_that_is_not_finite_is_refused(value: float) -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(LEARNED_CLIP))
    state = {**layer.state_dict(), "learnable_weight_clip": torch.full((1, 7), value)}
    with pytest.raises(triptych.ArgumentError, match="learnable_weight_clip of the state_dict holds NaN or infinities"):
        layer.load_state_dict(state)
    assert layer.learnable_weight_clip is not None
    assert layer.learnable_weight_clip.isfinite().all()


def test_extremes_stay_wide() -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(RANGE, {"pre_post.input_range.fast_mode": True}))
    layer(torch.randn(5, 13))
    assert layer.x_max is not None
    exact = layer.x_max.clone()
    layer.to(torch.bfloat16)
    assert layer.weight.dtype is torch.bfloat16
    assert layer.x_max.dtype is torch.float32
    assert torch.equal(layer.x_max, exact)
    layer(torch.randn(5, 13, dtype=torch.bfloat16))
    layer.double()
    assert layer.x_max.dtype is torch.float64
    layer(torch.randn(5, 13, dtype=torch.float64))
    layer.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})
    assert layer.x_max.dtype is torch.float64


@pytest.mark.parametrize("assign", [False, True])
def test_the_meta_device(assign: bool) -> None:
    real = AnalogLinear(13, 7, rpu_config=EVERYTHING)
    x = torch.randn(4, 13)
    real(x)
    with torch.device("meta"):
        layer = AnalogLinear(13, 7, rpu_config=EVERYTHING)
    assert all(value.is_meta for value in (*layer.parameters(), *layer.buffers()))
    assert layer(x.to("meta")).shape == (4, 7)
    if assign:
        layer.load_state_dict(real.state_dict(), assign=True)
    else:
        layer.to_empty(device="cpu")
        layer.reset_parameters()
        assert layer.input_range is not None
        assert layer.input_range.tolist() == [3.0] * 3
        layer(x)
        layer.load_state_dict(real.state_dict())
    assert torch.equal(layer.eval()(x), real.eval()(x))


def test_weights_are_set_and_read() -> None:
    layer = AnalogLinear(13, 7, rpu_config=config(LEARNED_CLIP))
    before = dict(layer.named_parameters())
    weight, bias = torch.randn(7, 13), torch.randn(7)
    layer.set_weights(weight, bias)
    assert all(after is before[name] for name, after in layer.named_parameters())
    got = layer.get_weights()
    assert torch.equal(got[0], weight)
    assert got[1] is not None
    assert torch.equal(got[1], bias)
    assert layer.learnable_weight_clip is not None
    assert torch.equal(layer.learnable_weight_clip[0], weight.abs().amax(1))
    got[0].zero_()
    assert torch.equal(layer.weight, weight)
    with pytest.raises(triptych.ArgumentError, match=r"the weight to set has shape \[13, 7\]"):
        layer.set_weights(weight.T)
    with pytest.raises(triptych.ArgumentError, match="there is a bias to set but the layer has none"):
        AnalogLinear(13, 7, bias=False).set_weights(weight, bias)


def test_weights_are_quantised_in_place() -> None:
    model = nn.Sequential(
        AnalogLinear(13, 7, rpu_config=config(QUANTIZED, NOISE, TILES)),
        AnalogConv2d(4, 6, 3, groups=2, rpu_config=config(QUANTIZED, LEARNED_CLIP)),
        AnalogLinear(3, 3),
    )
    before = {name: (value, value.detach().clone()) for name, value in model.named_parameters()}
    settings = [layer.rpu_config for layer in model]  # type: ignore[union-attr]
    model.eval()
    x, image = torch.randn(4, 13), torch.randn(2, 4, 6, 6)
    outputs = model[0](x), model[1](image)
    triptych.analog.quantize_weights(model)
    assert [layer.rpu_config for layer in model] == settings  # type: ignore[union-attr]
    assert all(before[name][0] is value for name, value in model.named_parameters())
    assert torch.equal(model[2].weight, before["2.weight"][1])
    assert not torch.equal(model[0].weight, before["0.weight"][1])
    torch.testing.assert_close(model[0](x), outputs[0])
    torch.testing.assert_close(model[1](image), outputs[1])
    torch.testing.assert_close(functional.linear(x, model[0].weight, model[0].bias), outputs[0])
    torch.testing.assert_close(functional.conv2d(image, model[1].weight, model[1].bias, groups=2), outputs[1])


def test_a_learned_clip_written_without_its_tiles_is_read() -> None:
    """aihwkit-lightning's Conv1d writes that of a single tile as [C]."""
    layer = AnalogConv1d(3, 5, 2, rpu_config=AnalogConfig().replaced(LEARNED_CLIP))
    state = layer.state_dict()
    values = torch.rand(5) + 0.5
    layer.load_state_dict({**state, "learnable_weight_clip": values})
    assert layer.learnable_weight_clip is not None
    assert torch.equal(layer.learnable_weight_clip, values.unsqueeze(0))
    with pytest.raises(RuntimeError, match="size mismatch for learnable_weight_clip"):
        layer.load_state_dict({**state, "learnable_weight_clip": values[:4]})
