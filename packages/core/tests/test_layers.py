"""The layers: drop-ins for torch.nn's, and layer names."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from spies import ran
from torch import nn

import triptych
from triptych.layers import AddRMSNorm, RMSNorm, name_layers
from triptych.layers.naming import name_layers_when_called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "arguments",
    [(16,), ((16,),), ([4, 16],), (torch.Size([4, 16]), 1e-3), (16, None, False), ((3, 4, 16), 0.0)],
)
def test_rms_norm_is_a_drop_in(arguments: tuple[Any, ...], dtype: torch.dtype) -> None:
    ours, theirs = RMSNorm(*arguments, dtype=dtype), nn.RMSNorm(*arguments, dtype=dtype)
    assert repr(ours) == repr(theirs)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    assert ours.load_state_dict(theirs.state_dict()) == theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 4, 16, dtype=dtype, requires_grad=True)
    with triptych.use("composite"), ran() as seen:
        y = ours(x)
        y.sum().backward()
    assert seen == {("rms_norm", "forward", "composite"): 1, ("rms_norm", "backward", "composite"): 1}
    expected = theirs(x)
    # Both round once from float32: neighbours at most (2 units of roundoff), plus float32's own error of the sum.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y, expected, rtol=2 * eps + 1e-6 * (dtype is not torch.float64), atol=0)


def test_eps_none_is_the_eps_of_the_input() -> None:
    for dtype in (torch.float32, torch.float16, torch.float64):
        x = torch.full((1, 4), 1e-3, dtype=dtype)
        eps = torch.finfo(dtype).eps
        with triptych.use("composite"):
            y = RMSNorm(4, dtype=dtype)(x)
        expected = x.double() / (x.double().square().mean() + eps).sqrt()
        torch.testing.assert_close(y.double(), expected, rtol=2 * eps + 1e-6, atol=0)


def test_offset_and_rounding_show_and_start_at_scale_one() -> None:
    layer = RMSNorm(8, eps=1e-6, offset=1.0, rounding="before_weight")
    assert repr(layer) == ("RMSNorm((8,), eps=1e-06, elementwise_affine=True, offset=1.0, rounding='before_weight')")
    assert torch.equal(layer.weight, torch.zeros(8))
    x = torch.randn(3, 8)
    with triptych.use("composite"):
        torch.testing.assert_close(layer(x), nn.RMSNorm(8, eps=1e-6)(x))


def test_a_float32_weight_beside_bfloat16_activations() -> None:
    layer = RMSNorm(8, dtype=torch.float32)
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    with triptych.use("composite"):
        y = layer(x)
        y.sum().backward()
    assert y.dtype is torch.bfloat16
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("shape", [8, (2, 8)])
def test_add_rms_norm_is_the_two_operations(shape: int | tuple[int, ...]) -> None:
    layer, norm = AddRMSNorm(shape, eps=1e-5), RMSNorm(shape, eps=1e-5)
    x, r = torch.randn(3, 2, 8, requires_grad=True), torch.randn(3, 2, 8, requires_grad=True)
    with triptych.use("composite"), ran() as seen:
        y, h = layer(x, r)
        grads = torch.autograd.grad(y.square().sum() + h.sin().sum(), (x, r, layer.weight))
    assert seen == {("add_rms_norm", "forward", "composite"): 1, ("add_rms_norm", "backward", "composite"): 1}
    with triptych.use("composite"):
        expected = norm(x + r)
        expected_grads = torch.autograd.grad(expected.square().sum() + (x + r).sin().sum(), (x, r, norm.weight))
    assert torch.equal(h, x + r)
    assert torch.equal(y, expected)
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"normalized_shape": ()}, "RMSNorm: normalized_shape is empty. Name at least one dimension to normalise."),
        (
            {"normalized_shape": 8, "eps": -1.0},
            "RMSNorm: eps is -1.0. It must be a finite number, 0 or greater, or None.",
        ),
        (
            {"normalized_shape": 8, "rounding": "llama"},
            "RMSNorm: rounding is 'llama'. It must be 'after_weight' or 'before_weight'.",
        ),
        (
            {"normalized_shape": 8, "offset": 1.0, "elementwise_affine": False},
            "RMSNorm: offset is 1.0 but elementwise_affine is False: no weight to add it to.",
        ),
    ],
)
def test_construction_says_what_is_wrong(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(triptych.ArgumentError) as raised:
        RMSNorm(**arguments)
    assert str(raised.value) == text


def test_an_input_of_the_wrong_shape_says_so() -> None:
    with ran() as seen, pytest.raises(triptych.ArgumentError) as raised:
        RMSNorm((4, 8))(torch.ones(3, 8))
    assert str(raised.value) == (
        "RMSNorm: the input has shape [3, 8]. Its last dimensions must be [4, 8], the layer's normalized_shape."
    )
    assert seen == {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(8)
        self.add_norm = AddRMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, h = self.add_norm(self.norm(x), x)
        return torch.as_tensor(y + h)


def test_layers_are_named_by_module_path_and_selected_by_it() -> None:
    model = nn.Sequential(Block(), Block())
    assert sorted(name_layers(model)) == ["0.add_norm", "0.norm", "1.add_norm", "1.norm"]
    assert sorted(name_layers(model, prefix="stage"))[0] == "stage.0.add_norm"
    name_layers(model)
    with triptych.use("composite;@1.norm=torch"), ran() as seen:
        model(torch.ones(2, 8))
    assert seen == {
        ("rms_norm", "forward", "composite"): 1,
        ("rms_norm", "forward", "torch"): 1,
        ("add_rms_norm", "forward", "composite"): 2,
    }


def test_wrappers_leave_no_trace_in_names_and_names_none_in_the_state() -> None:
    model = nn.Sequential(Block())
    keys = list(model.state_dict())
    names = name_layers(nn.DataParallel(torch.compile(model, backend="eager")))  # type: ignore[arg-type]
    assert sorted(names) == ["0.add_norm", "0.norm"]
    assert list(model.state_dict()) == keys
    assert pickle.loads(pickle.dumps(model))[0].norm.layer_name == "0.norm"


def test_models_that_nobody_named_are_named_at_their_first_call() -> None:
    undo = name_layers_when_called()
    try:
        model = nn.Sequential(Block())
        model(torch.ones(2, 8))
        assert model[0].norm.layer_name == "0.norm"
        named = nn.Sequential(Block())
        name_layers(named, prefix="mine")
        named(torch.ones(2, 8))
        assert named[0].norm.layer_name == "mine.0.norm"
    finally:
        undo()
    unnamed = nn.Sequential(Block())
    unnamed(torch.ones(2, 8))
    assert unnamed[0].norm.layer_name == ""
