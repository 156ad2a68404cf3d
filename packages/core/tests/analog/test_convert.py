"""From torch.nn to analog layers and back."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from spies import ran
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import triptych
from triptych.analog import (
    AnalogConfig,
    AnalogConv1d,
    AnalogConv2d,
    AnalogConv3d,
    AnalogLayer,
    AnalogLinear,
    convert_to_analog,
    convert_to_digital,
    named_analog_layers,
)

CONFIG = AnalogConfig().replaced({"pre_post.input_range.enable": True, "forward.inp_res": 254})


@pytest.fixture(autouse=True)
def on_composite() -> Any:
    torch.manual_seed(0)
    with triptych.use("composite"):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(x + self.down(self.up(self.norm(x)).relu()))


def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.Linear(8, 4))


def test_a_copy_is_converted_and_the_model_left_alone() -> None:
    digital = model().eval()
    analog = convert_to_analog(digital, CONFIG)
    assert [path for path, _ in named_analog_layers(analog)] == ["0.up", "0.down", "1.up", "1.down", "2"]
    assert list(named_analog_layers(digital)) == []
    assert not {p.data_ptr() for p in digital.parameters()} & {p.data_ptr() for p in analog.parameters()}
    assert all(layer.rpu_config is CONFIG and not layer.training for _, layer in named_analog_layers(analog))
    x = torch.randn(3, 8)
    torch.testing.assert_close(convert_to_analog(digital, AnalogConfig())(x), digital(x))


def test_every_kind_of_layer() -> None:
    digital = nn.ModuleList([nn.Linear(2, 2), nn.Conv1d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.Conv3d(2, 2, 1), nn.ReLU()])
    kinds = [type(each) for each in convert_to_analog(digital, CONFIG)]
    assert kinds == [AnalogLinear, AnalogConv1d, AnalogConv2d, AnalogConv3d, nn.ReLU]


def test_in_place_modules_and_parameters_stay_the_same_objects() -> None:
    root = model()
    modules, parameters = dict(root.named_modules()), dict(root.named_parameters())
    analog = convert_to_analog(root, CONFIG, inplace=True)
    assert analog is root
    assert dict(root.named_modules()) == modules
    assert all(root.get_parameter(name) is value for name, value in parameters.items())
    assert (
        convert_to_analog(root, CONFIG.replaced("forward.inp_res", 6), inplace=True)[2].rpu_config is CONFIG
    )  # no digital layer is left


def test_what_a_layer_had_it_keeps() -> None:
    root = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4))
    layer = root[0]
    layer.weight.requires_grad_(False)
    layer.eval()
    layer.tag = "mine"
    calls: list[str] = []
    handle = layer.register_forward_hook(lambda *_: calls.append("hook"))
    layer.register_forward_pre_hook(lambda *_: calls.append("pre"))
    convert_to_analog(root, CONFIG, inplace=True)
    assert isinstance(layer, AnalogLinear)
    assert (layer.tag, layer.training, layer.weight.requires_grad, root[1].training) == ("mine", False, False, True)
    assert layer.input_range is not None
    assert (layer.input_range.dtype, layer.input_range.requires_grad) == (torch.bfloat16, True)
    layer(torch.ones(2, 4, dtype=torch.bfloat16))
    assert calls == ["pre", "hook"]
    handle.remove()
    layer(torch.ones(2, 4, dtype=torch.bfloat16))
    assert calls == ["pre", "hook", "pre"]


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    for inplace in (False, True):
        analog = convert_to_analog(Tied(), CONFIG, inplace=inplace)
        assert isinstance(analog.head, AnalogLinear)
        assert analog.head.weight is analog.embed.weight
        assert convert_to_digital(analog, inplace=inplace).head.weight.shape == (5, 4)


def test_a_module_at_two_paths_is_one_layer() -> None:
    shared = nn.Linear(4, 4)
    root = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared])})
    root.also = [shared]  # nobody but Python knows of this one
    analog = convert_to_analog(root, CONFIG)
    assert analog["a"] is analog["b"][0] is analog.also[0]  # type: ignore[index]
    assert isinstance(analog["a"], AnalogLinear)
    assert not list(named_analog_layers(convert_to_analog(root, CONFIG, exclude="b")))
    assert len(list(named_analog_layers(convert_to_analog(root, CONFIG, include="b.0")))) == 1


def test_the_root_may_be_a_layer() -> None:
    layer = nn.Linear(4, 4)
    assert isinstance(convert_to_analog(layer, CONFIG), AnalogLinear)
    assert type(layer) is nn.Linear
    assert convert_to_analog(layer, CONFIG, inplace=True) is layer
    assert convert_to_digital(layer, inplace=True) is layer
    assert type(layer) is nn.Linear


@pytest.mark.parametrize(
    ("include", "exclude", "converted"),
    [
        ("0", None, ["0.up", "0.down"]),
        (["*.up"], None, ["0.up", "1.up"]),
        (("*.up", "2"), "1", ["0.up", "2"]),
        (None, ["*.down", "2"], ["0.up", "1.up"]),
        (None, "*.norm", ["0.up", "0.down", "1.up", "1.down", "2"]),
        ("[01]", "1.*", ["0.up", "0.down"]),
    ],
)
def test_patterns(include: Any, exclude: Any, converted: list[str]) -> None:
    analog = convert_to_analog(model(), CONFIG, include=include, exclude=exclude)
    assert [path for path, _ in named_analog_layers(analog)] == converted


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"include": "0.upp"},
            "convert_to_analog: include='0.upp' matches no module to convert. Did you mean '0.up' or '1.up'?",
        ),
        (
            {"include": ["0", "*.norm"]},
            "convert_to_analog: include='*.norm' matches no module to convert. Known: 0.down, 0.up, 1.down, 1.up, 2.",
        ),
        ({"exclude": "0.upp"}, "convert_to_analog: exclude='0.upp' matches no module. Did you mean '0.up' or '1.up'?"),
        (
            {"include": 3},
            "convert_to_analog: include is 3. It must be a string, a path or a glob, or several of them.",
        ),
        ({"include": [1]}, "convert_to_analog: include has 1. Each must be a string, a path or a glob."),
        (
            {"conversion_map": [nn.Linear]},
            "convert_to_analog: conversion_map is a list. It must be a dictionary from classes of modules to classes of analog layers.",
        ),
        (
            {"conversion_map": {"Linear": AnalogLinear}},
            "convert_to_analog: conversion_map has 'Linear': <class 'triptych.analog.linear.AnalogLinear'>. It must lead from a class of modules to a class with a method from_digital(module, rpu_config), as triptych.analog.AnalogLinear has.",
        ),
        (
            {"specific_rpu_config_fun": lambda path, module, config: None},
            "convert_to_analog: specific_rpu_config_fun returned a NoneType for '0.up'. It must return an AnalogConfig: the one it was given, or config.replaced(...) of it.",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_done(arguments: dict[str, Any], text: str) -> None:
    root = model()
    with pytest.raises(triptych.ArgumentError) as raised:
        convert_to_analog(root, CONFIG, inplace=True, **arguments)
    assert str(raised.value) == text
    assert not list(named_analog_layers(root))


def test_each_layer_may_have_its_own_configuration() -> None:
    def specific(path: str, module: nn.Module, config: AnalogConfig) -> AnalogConfig:
        assert type(module) is nn.Linear
        return config.replaced("forward.inp_res", 6) if path.endswith("up") else config

    analog = convert_to_analog(model(), CONFIG, specific_rpu_config_fun=specific)
    assert [layer.rpu_config.forward.inp_res for _, layer in named_analog_layers(analog)] == [6, 254, 6, 254, 254]


class Mine(nn.Linear):
    """Somebody's linear layer, which may compute anything."""


class Theirs(nn.Module):
    """An analog layer of another package: not one of ours, made by from_digital."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    @classmethod
    def from_digital(cls, module: nn.Linear, rpu_config: AnalogConfig) -> Theirs:
        return cls(module)


def test_subclasses_are_left_alone_unless_they_are_named() -> None:
    root = nn.Sequential(Mine(4, 4), nn.Linear(4, 4))
    assert [type(each) for each in convert_to_analog(root, CONFIG)] == [Mine, AnalogLinear]
    assert [type(each) for each in convert_to_analog(root, CONFIG, conversion_map={Mine: AnalogLinear})] == [
        AnalogLinear,
        nn.Linear,
    ]


def test_classes_with_a_from_digital_of_their_own() -> None:
    shared = nn.Linear(4, 4).eval()
    root = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared])})
    analog = convert_to_analog(root, CONFIG, conversion_map={nn.Linear: Theirs})
    assert isinstance(analog["a"], Theirs)
    assert analog["a"] is analog["b"][0]  # type: ignore[index]
    assert not analog["a"].training
    assert isinstance(convert_to_analog(shared, CONFIG, conversion_map={nn.Linear: Theirs}), Theirs)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_and_transformers_compute_what_they_did() -> None:
    digital = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    analog = convert_to_analog(digital, CONFIG.replaced({"forward.inp_res": 2, "forward.out_bound": 0.1}))
    assert [path for path, _ in named_analog_layers(analog)] == [
        f"layers.{layer}.linear{number}" for layer in (0, 1) for number in (1, 2)
    ]
    x, mask = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        fused = analog(x), analog(x, src_key_padding_mask=mask)
        expected = digital(x), digital(x, src_key_padding_mask=mask)
    called = analog(x), analog(x, src_key_padding_mask=mask)
    torch.testing.assert_close(fused, called)
    assert not torch.allclose(fused[0], expected[0], atol=1e-3)
    ideal = convert_to_analog(digital, AnalogConfig())
    back = convert_to_digital(analog)
    with torch.no_grad():
        torch.testing.assert_close(ideal(x), expected[0])
        assert torch.equal(back(x), expected[0])
        assert torch.equal(back(x, src_key_padding_mask=mask), expected[1])
    assert {name: vars(each).keys() for name, each in back.named_modules()} == {
        name: vars(each).keys() for name, each in digital.named_modules()
    }


def one_by_one(block: nn.TransformerEncoderLayer) -> None:
    for name in ("linear1", "linear2"):
        convert_to_analog(block.get_submodule(name), CONFIG, inplace=True)


def assigned(block: nn.TransformerEncoderLayer) -> None:
    block.linear2 = AnalogLinear.from_digital(block.linear2, CONFIG)


def copied(block: nn.TransformerEncoderLayer) -> None:
    block.linear1 = copy.deepcopy(AnalogLinear.from_digital(block.linear1, CONFIG))


def pickled(block: nn.TransformerEncoderLayer) -> None:
    block.linear1 = pickle.loads(pickle.dumps(AnalogLinear.from_digital(block.linear1, CONFIG)))


@pytest.mark.parametrize("put", [one_by_one, assigned, copied, pickled])
def test_no_fused_kernel_passes_a_layer_by(put: Any) -> None:
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    digital, x = copy.deepcopy(block), torch.randn(2, 5, 8)
    put(block)
    with ran() as seen, torch.no_grad():
        block(x)
    assert seen["analog_linear", "forward", "composite"] == len(list(named_analog_layers(block)))
    back = convert_to_digital(block)
    assert not any(each._forward_pre_hooks for each in back.modules())
    with torch.no_grad():
        assert torch.equal(back(x), digital(x))


def test_no_hook_takes_the_place_of_the_one_that_must_be_there() -> None:
    layer = AnalogLinear(4, 4)
    (key,) = layer._forward_pre_hooks
    handles = [layer.register_forward_pre_hook(lambda *_: None) for _ in range(3)]
    assert all(handle.id > key for handle in handles)  # in another process too, where torch counts from 0
    for handle in handles:
        handle.remove()
    assert list(layer._forward_pre_hooks) == [key]
    layer.layer_name = ""
    assert list(triptych.name_layers(nn.Sequential(layer))) == ["0"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    convert_to_analog(encoder.layers[0], CONFIG, inplace=True)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad(), pytest.raises(triptych.ArgumentError, match=r"nested tensor.*enable_nested_tensor=False"):
        encoder(torch.randn(2, 5, 8), src_key_padding_mask=mask)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "its weight is computed from other tensors"),
        (lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5), "its weight is computed from other tensors"),
        (lambda: nn.LazyLinear(4), "it is lazy and has no weight yet. Run a batch through the model first"),
        (lambda: nn.LazyConv2d(4, 3), "it is lazy"),
        (lambda: nn.Linear(4, 4, dtype=torch.complex64), "its weight has dtype torch.complex64"),
        (
            lambda: with_a_bias_of(torch.float64),
            "its bias has dtype torch.float64 and its weight has dtype torch.float",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(make: Any, text: str) -> None:
    root = nn.Sequential(nn.Linear(4, 4), make())
    for inplace in (False, True):
        with pytest.raises(triptych.ArgumentError, match=f"^convert_to_analog: '1' cannot be converted: {text}"):
            convert_to_analog(root, CONFIG, inplace=inplace)
    assert type(root[0]) is nn.Linear
    assert isinstance(convert_to_analog(root, CONFIG, exclude="1", inplace=True)[0], AnalogLinear)


def with_a_bias_of(dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.bias = nn.Parameter(torch.zeros(4, dtype=dtype))
    return layer


@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.weight_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: parametrize.register_parametrization(layer, "weight", nn.Identity()),
        lambda layer: parametrize.register_parametrization(layer, "input_range", nn.Identity()),
    ],
)
def test_layers_with_computed_tensors_are_not_given_back(wrap: Any) -> None:
    root = convert_to_analog(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), CONFIG)
    wrap(root[1])
    kind, text = type(root[1]), r"its tensors are computed from others.*remove_parametrizations.*prune\.remove"
    for inplace in (False, True):
        with pytest.raises(triptych.ArgumentError, match=f"^convert_to_digital: '1' cannot be converted: {text}"):
            convert_to_digital(root, inplace=inplace)
    with pytest.raises(triptych.ArgumentError, match=f"^AnalogLinear.to_digital: {text}"):
        AnalogLinear.to_digital(root[1])
    assert [type(each) for each in root] == [AnalogLinear, kind]
    root(torch.randn(2, 4))


def test_a_forward_that_was_replaced_is_refused() -> None:
    layer = nn.Linear(4, 4)
    layer.forward = layer.forward  # type: ignore[method-assign]
    with pytest.raises(triptych.ArgumentError, match="the model' cannot be converted: its forward was replaced"):
        convert_to_analog(layer, CONFIG, inplace=True)


def test_a_layer_that_was_lazy_is_converted() -> None:
    root = nn.Sequential(nn.LazyLinear(4))
    root(torch.ones(2, 3))
    assert isinstance(convert_to_analog(root, CONFIG)[0], AnalogLinear)


def test_one_layer_at_a_time() -> None:
    digital = nn.Conv2d(4, 6, 3, groups=2, padding="same", padding_mode="circular").eval()
    analog = AnalogConv2d.from_digital(digital, CONFIG)
    assert type(digital) is nn.Conv2d
    assert (analog.training, analog.padding, analog.crossbars) == (False, "same", 2)
    back = AnalogConv2d.to_digital(analog)
    assert type(back) is nn.Conv2d
    assert type(analog) is AnalogConv2d
    assert vars(back).keys() == vars(digital).keys()
    assert list(back.state_dict()) == list(digital.state_dict())
    pointers = {each.weight.data_ptr() for each in (digital, analog, back)}
    assert len(pointers) == 3
    x = torch.randn(1, 4, 6, 6)
    assert torch.equal(back(x), digital(x))
    with pytest.raises(
        triptych.ArgumentError, match=r"from_digital: the module is a Linear. It must be a torch.nn.Conv2d"
    ):
        AnalogConv2d.from_digital(nn.Linear(4, 4), CONFIG)
    with pytest.raises(triptych.ArgumentError, match="from_digital: the module is a AnalogConv2d"):
        AnalogConv2d.from_digital(analog, CONFIG)
    with pytest.raises(triptych.ArgumentError, match="to_digital: the module is a Conv2d"):
        AnalogConv2d.to_digital(digital)  # type: ignore[arg-type]


@pytest.mark.parametrize("clip", ["None", "LayerGaussian", "LearnablePerChannel"])
def test_there_and_back_again(clip: str) -> None:
    root = model()
    state = copy.deepcopy(root.state_dict())
    attributes = {name: set(vars(each)) for name, each in root.named_modules()}
    convert_to_analog(root, CONFIG.replaced({"clip.type": clip, "clip.sigma": 2.5}), inplace=True)
    root(torch.randn(2, 8)).sum().backward()
    convert_to_digital(root, inplace=True)
    assert not any(isinstance(each, AnalogLayer) for each in root.modules())
    assert {name: set(vars(each)) for name, each in root.named_modules()} == attributes
    root.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in root.state_dict().items())


def test_names_are_kept() -> None:
    analog = convert_to_analog(model(), CONFIG)
    assert sorted(triptych.name_layers(analog)) == ["0.down", "0.up", "1.down", "1.up", "2"]
    root = nn.Sequential(analog, nn.Linear(4, 4))
    assert convert_to_analog(root, CONFIG)[0][0].up.layer_name == "0.up"


def test_the_meta_device() -> None:
    with torch.device("meta"):
        root = model()
    analog = convert_to_analog(root, CONFIG)
    real = convert_to_analog(model(), CONFIG)
    analog.load_state_dict(real.state_dict(), assign=True)
    x = torch.randn(3, 8)
    assert torch.equal(analog.eval()(x), real.eval()(x))
