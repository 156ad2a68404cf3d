"""The layers: drop-ins for torch.nn's, and layer names."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from bounds import assert_agree
from spies import ran
from torch import nn

import triptych
from triptych.layers import AddRMSNorm, Layer, RMSNorm, name_layers
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
    columns, weight = math.prod(ours.normalized_shape), None if ours.weight is None else ours.weight.flatten()
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    eps = torch.finfo(wide).eps if ours.eps is None else ours.eps
    flat = x.reshape(-1, columns)
    assert_agree(
        "rms_norm", "forward", (flat, weight, eps, 0.0, "after_weight"), y=(y.view_as(flat), expected.view_as(flat))
    )


def test_eps_none_is_the_eps_of_the_statistics() -> None:
    for dtype, size in ((torch.float32, 1e-3), (torch.float16, 1e-3), (torch.bfloat16, 1e-3), (torch.float64, 1e-8)):
        x = torch.full((1, 4), size, dtype=dtype)
        eps = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
        with triptych.use("composite"), ran() as seen:
            y = RMSNorm(4, dtype=dtype)(x)
        assert seen == {("rms_norm", "forward", "composite"): 1}
        expected = x.double() / (x.double().square().mean() + eps).sqrt()
        assert_agree("rms_norm", "forward", (x, None, eps, 0.0, "after_weight"), y=(y, expected))
        other = x.double() / (x.double().square().mean() + eps / 2).sqrt()
        with pytest.raises(AssertionError):  # at this x another eps is another result
            assert_agree("rms_norm", "forward", (x, None, eps, 0.0, "after_weight"), y=(y, other))


def test_offset_and_rounding_show_and_start_at_scale_one() -> None:
    layer = RMSNorm(8, eps=1e-6, offset=1.0, rounding="before_weight")
    assert repr(layer) == ("RMSNorm((8,), eps=1e-06, elementwise_affine=True, offset=1.0, rounding='before_weight')")
    assert torch.equal(layer.weight, torch.zeros(8))
    x = torch.randn(3, 8)
    with triptych.use("composite"), ran() as seen:
        y = layer(x)
    assert seen == {("rms_norm", "forward", "composite"): 1}
    expected = nn.RMSNorm(8, eps=1e-6)(x)
    assert_agree("rms_norm", "forward", (x, layer.weight, 1e-6, 1.0, "before_weight"), y=(y, expected))


def test_a_float32_weight_beside_bfloat16_activations() -> None:
    layer = RMSNorm(8, dtype=torch.float32)
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    with triptych.use("composite"), ran() as seen:
        y = layer(x)
        y.sum().backward()
    assert seen == {("rms_norm", "forward", "composite"): 1, ("rms_norm", "backward", "composite"): 1}
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
    with triptych.use("composite"), ran() as seen:
        expected = norm(x + r)
        expected_grads = torch.autograd.grad(expected.square().sum() + (x + r).sin().sum(), (x, r, norm.weight))
    assert seen == {("rms_norm", "forward", "composite"): 1, ("rms_norm", "backward", "composite"): 1}
    assert torch.equal(h, x + r)
    assert torch.equal(y, expected)
    columns, scalars = math.prod(layer.normalized_shape), (1e-5, 0.0, "after_weight")
    dy, dh, flat_h = ((each.detach()).view(-1, columns) for each in (2 * y, h.cos(), h))
    rstd = torch.rsqrt(flat_h.square().mean(-1) + 1e-5)
    args = (dy, dh, flat_h, layer.weight.flatten(), rstd, *scalars, True, True)
    for gradient in (0, 1):
        pair = grads[gradient].view_as(flat_h), expected_grads[gradient].view_as(flat_h)
        assert_agree("add_rms_norm", "backward", args, dx=pair)
    assert_agree("add_rms_norm", "backward", args, dw=(grads[2].flatten(), expected_grads[2].flatten()))


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
            "RMSNorm: offset is 1.0 but elementwise_affine is False: no weight to add it to. "
            "Leave offset at 0, or elementwise_affine at True.",
        ),
        (
            {"normalized_shape": 8, "eps": "1e-6"},
            "RMSNorm: eps is '1e-6'. It must be a finite number, 0 or greater, or None.",
        ),
        ({"normalized_shape": 8, "offset": float("nan")}, "RMSNorm: offset is nan. It must be a finite number."),
        ({"normalized_shape": 8, "offset": True}, "RMSNorm: offset is True. It must be a finite number."),
        (
            {"normalized_shape": 8, "rounding": ["after_weight"]},
            "RMSNorm: rounding is ['after_weight']. It must be 'after_weight' or 'before_weight'.",
        ),
        *[
            (
                {"normalized_shape": shape},
                f"RMSNorm: normalized_shape is {shape!r}. It must be one size or a sequence of sizes, each an integer, 0 or "
                f"greater, for example 4096 or (16, 64).",
            )
            for shape in (-1, True, "8", 8.0, None, (4, -8), [4, "8"], (4, False))
        ],
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


class Foreign(nn.Module):
    """Somebody else's module, which happens to have an attribute that our layers have."""

    layer_name = "theirs"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_other_peoples_modules_are_neither_named_nor_in_the_way() -> None:
    model = nn.Sequential(Foreign(), Block())
    assert sorted(name_layers(model)) == ["1.add_norm", "1.norm"]
    assert model[0].layer_name == "theirs"
    undo = name_layers_when_called()
    try:
        model = nn.Sequential(Foreign(), Block())
        model(torch.ones(2, 8))
    finally:
        undo()
    assert model[0].layer_name == "theirs"
    assert model[1].norm.layer_name == "1.norm"


def test_layers_of_other_packages_are_named_and_their_own_names_kept() -> None:
    class Theirs(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return triptych.rms_norm(x, layer=self.layer_name)

    model = nn.Sequential(Theirs(), Theirs(), Theirs())
    model[1].layer_name = "mine"
    undo = name_layers_when_called()
    try:
        model(torch.ones(2, 8))
    finally:
        undo()
    assert [each.layer_name for each in model] == ["0", "mine", "2"]
    assert [each.layer_name for each in copy.deepcopy(model)] == ["0", "mine", "2"]
    assert Theirs().layer_name == ""


def test_naming_leaves_the_warning_filters_as_they_were() -> None:
    warnings.filterwarnings("ignore", "somebody else's")
    before = list(warnings.filters)
    name_layers_when_called()()
    assert list(warnings.filters) == before
    outer = name_layers_when_called()
    during = list(warnings.filters)
    name_layers_when_called()()
    assert list(warnings.filters) == during != before
    outer()
    assert list(warnings.filters) == before


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
