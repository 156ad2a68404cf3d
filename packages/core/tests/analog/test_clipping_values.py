"""Weight clipping: values that no step made, and layers that have nothing to clip."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clipped_layer import (
    LEARNED,
    NONE,
    ROWS,
    WHOLE,
    Clipped,
    backward,
    clipped,
    subtract,
    x_of,
)
from torch import nn
from torch.nn.utils import prune

from triptych.analog import AnalogConfig, AnalogLinear
from triptych.errors import UsageError

# --- values that no step made -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [WHOLE, ROWS, LEARNED], ids=["whole", "rows", "learned"])
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.set_weights(torch.randn(6, 30)),
        lambda layer: layer.quantize_weights(),
        lambda layer: layer.reset_parameters(),
        lambda layer: layer.load_state_dict(copy.deepcopy(layer.state_dict())),
    ],
    ids=["set_weights", "quantize_weights", "reset_parameters", "load_state_dict"],
)
def test_what_a_layer_does_to_its_weights_is_not_a_step(config: AnalogConfig, change: Any) -> None:
    modifier = {"modifier.quantization_type": "DiscretizePerChannel", "modifier.res": 6}
    layer = AnalogLinear(30, 6, rpu_config=config.replaced(modifier))
    layer(torch.randn(3, 30)).sum().backward()
    change(layer)
    before = [p.clone() for p in layer.parameters()]
    layer(torch.randn(3, 30))
    layer(torch.randn(3, 30))
    assert all(torch.equal(old, new) for old, new in zip(before, layer.parameters(), strict=True))
    layer.zero_grad()
    layer(torch.randn(3, 30)).sum().backward()
    for p in layer.parameters():
        if p.grad is not None:
            subtract(p, 0.5)
    raw = layer.weight.clone()
    layer(torch.randn(3, 30))
    if config is not LEARNED:
        torch.testing.assert_close(layer.weight.double(), clipped(raw, config is ROWS), rtol=1e-5, atol=1e-6)


def test_a_change_while_frozen_is_not_a_step_and_a_step_before_that_counts_after_it() -> None:
    layer = Clipped()
    backward(layer)
    subtract(layer.weight, 0.05)  # as one half of a hand-written GAN, frozen while the other half steps
    raw = layer.weight.clone()
    layer.weight.requires_grad_(False)
    layer(x_of())
    assert torch.equal(layer.weight, raw)
    layer.weight.requires_grad_(True)
    layer(x_of())
    torch.testing.assert_close(layer.weight.double(), clipped(raw), rtol=1e-6, atol=0)


# --- nothing to clip --------------------------------------------------------------------------------------------------


def identity(layer: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())


COMPUTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "weight_norm": (
        nn.utils.parametrizations.weight_norm,
        "parametrizations.weight.original0, parametrizations.weight.original1",
    ),
    "parametrization": (identity, "parametrizations.weight.original"),
    "pruning": (lambda layer: prune.l1_unstructured(layer, "weight", 0.3), "weight_orig"),
    "old spectral_norm": (nn.utils.spectral_norm, "weight_orig"),
}


@pytest.mark.parametrize("name", list(COMPUTED))
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_weight_that_became_a_computed_one_is_warned_of_once(name: str) -> None:
    make, parts = COMPUTED[name]
    layer = Clipped()
    layer.layer_name = "blocks.0.up"
    make(layer)
    layer.eval()(x_of())
    torch.func.functional_call(layer, {key: p.detach().clone() for key, p in layer.named_parameters()}, (x_of(),))
    layer.train()
    torch.func.functional_call(layer, {key: p.detach().clone() for key, p in layer.named_parameters()}, (x_of(),))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer(x_of())
        layer(x_of())
    assert [each.category for each in caught] == [UserWarning]
    assert [str(each.message) for each in caught] == [
        f"{type(layer).__name__} 'blocks.0.up': clip.type is 'LayerGaussianPerChannel', but weight is computed from {parts}, and nothing is clipped. Make it plain again (torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.prune.remove, torch.nn.utils.remove_weight_norm), or set clip.type to 'None'."
    ]


def test_a_learned_clip_that_became_a_computed_one_is_warned_of_and_one_that_does_not_clip_is_not() -> None:
    layer = AnalogLinear(9, 4, rpu_config=LEARNED)
    identity(layer)
    layer(torch.randn(3, 9))
    nn.utils.parametrize.register_parametrization(layer, "learnable_weight_clip", nn.Softplus(), unsafe=True)
    with pytest.warns(UserWarning, match="but learnable_weight_clip is computed from"):
        layer(torch.randn(3, 9))
    plain = AnalogLinear(9, 4, rpu_config=NONE)
    identity(plain)
    plain(torch.randn(3, 9))


def test_a_weight_that_is_plain_again_is_clipped_again() -> None:
    layer = Clipped()
    nn.utils.parametrizations.weight_norm(layer)
    layer = copy.deepcopy(layer)
    with pytest.warns(UserWarning, match="computed from"):
        backward(layer)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    backward(layer)
    subtract(layer.weight, 0.05)
    expected = clipped(layer.weight)
    layer(x_of())
    torch.testing.assert_close(layer.weight.double(), expected, rtol=1e-6, atol=0)


def test_tensors_in_the_place_of_parameters_are_not_warned_of() -> None:
    layer = Clipped()
    torch.func.functional_call(layer, {"weight": torch.randn(6, 8)}, (x_of(),))
    computed = Clipped()
    identity(computed)
    for each in (layer, computed):
        replica: Any = each._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        if each is layer:
            replica.__dict__["weight"] = layer.weight.view_as(layer.weight)
        else:
            chain: Any = computed.get_submodule("parametrizations.weight")._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
            chain.__dict__["original"] = computed.weight.view(6, 8)
            replica._modules = {"parametrizations": nn.ModuleDict({"weight": chain})}
        replica(x_of())
    flattened = Clipped()
    weight = flattened.weight
    del flattened.weight  # as FullyShardedDataParallel does
    flattened.weight = weight.view(6, 8)
    flattened(x_of())


def test_a_functional_call_is_not_a_step() -> None:
    layer = Clipped()
    values = {"weight": torch.randn(6, 8)}
    before = values["weight"].clone()
    torch.func.functional_call(layer, values, (x_of(),))
    assert torch.equal(values["weight"], before)


def test_a_flat_piece_of_a_weight_is_refused() -> None:
    layer = Clipped()
    layer.layer_name = "blocks.0.up"
    layer.weight.data = layer.weight.data.flatten()[:20]
    layer.weight.grad = torch.zeros(20)
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        "Clipped 'blocks.0.up': its weight is clipped at 1.5 standard deviations, but all that is here of it after the step is a flat piece of 20 elements, as under FullyShardedDataParallel. Use torch.distributed.fsdp.fully_shard, which keeps rows together, or set clip.type to 'None' and call triptych.analog.clip_weights where the weights are whole."
    )
