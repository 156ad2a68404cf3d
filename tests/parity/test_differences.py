"""Where Triptych is different on purpose: what the reference does, and what we do instead. docs/analog-parity.md lists them.

Each test shows both sides, so that a difference that goes away is noticed too.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peer import clip, config_of, lightning, twins
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from triptych.analog import (
    AnalogConfig,
    AnalogConv1d,
    AnalogLinear,
    InputRangeParameter,
    IOParameters,
    MappingParameter,
    PrePostProcessingParameter,
    WeightClipParameter,
    WeightModifierParameter,
)
from triptych.errors import ArgumentError

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:Modified the rpu_config")]


def ranged(**settings: Any) -> AnalogConfig:
    range_ = InputRangeParameter(**{"enable": True, "init_from_data": 2, **settings})
    return AnalogConfig(pre_post=PrePostProcessingParameter(range_))


def linear(config: AnalogConfig, n: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    theirs, ours = twins(AnalogLinear, {"in_features": n, "out_features": 4, "dtype": dtype}, config, seed=0)
    return theirs, ours


def x_of(n: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(5, n, generator=torch.Generator().manual_seed(seed))


def test_small_float16_weights_do_not_shrink() -> None:
    config = AnalogConfig(modifier=WeightModifierParameter(res=254, quantization_type="Discretize"))  # type: ignore[arg-type]
    theirs, ours = linear(config, dtype=torch.float16)
    for layer in (theirs, ours):
        layer.weight.data.copy_(torch.linspace(-2e-3, 2e-3, 32).view(4, 8))
        layer.bias.data.zero_()
    x = torch.eye(8, dtype=torch.float16)
    exact = ours.weight.detach().T
    assert ((ours(x) - exact).abs() <= 2e-3 / 254 * 1.01 + 2e-6).all()
    assert theirs(x).abs().max() < 0.3 * exact.abs().max(), "the reference divides by 6.1e-5 at least"


def test_a_bfloat16_counter_counts_beyond_256() -> None:
    config = ranged(init_from_data=500)
    theirs, ours = linear(config, dtype=torch.bfloat16)
    for layer in (theirs, ours):
        layer.input_range_update_idx.fill_(256)
        layer(x_of().bfloat16())
    assert theirs.input_range_update_idx.item() == 256
    assert ours.input_range_update_idx.item() == 257


def test_the_first_batch_of_fast_mode_sets_the_extremes() -> None:
    config = ranged(fast_mode=True)
    theirs = lightning.AnalogLinear(8, 4, rpu_config=config_of(config))
    ours = AnalogLinear(8, 4, rpu_config=config)
    x = x_of()
    theirs(x)
    ours(x)
    assert ours.x_max is not None
    assert ours.x_max.item() == x.max().item()
    assert theirs.x_max.item() == pytest.approx(x.max().item() + 1e-5, abs=2e-7)


@pytest.mark.parametrize("batch", [torch.full((5, 8), float("nan")), torch.empty(0, 8)], ids=["nan", "empty"])
def test_a_batch_that_says_nothing_is_not_counted_in_fast_mode(batch: Tensor) -> None:
    theirs, ours = linear(ranged(fast_mode=True))
    for layer in (theirs, ours):
        layer(x_of())
    before = ours.input_range.clone()
    ours(batch)
    assert torch.equal(ours.input_range, before)
    assert ours.input_range_update_idx.item() == 1
    if batch.numel():
        theirs(batch)
        assert theirs.input_range.isnan().all()
    else:
        with pytest.raises(Exception, match=r"numel|dim|reduc"):
            theirs(batch)


def test_a_learned_clip_above_1_is_a_clip() -> None:
    config = AnalogConfig(clip=WeightClipParameter(type="LearnablePerChannel"))  # type: ignore[arg-type]
    theirs, ours = linear(config)
    for layer in (theirs, ours):
        layer.weight.data.copy_(torch.linspace(-3, 3, 32).view(4, 8))
        layer.bias.data.zero_()
        layer.learnable_weight_clip.data.fill_(2.0)
    x = torch.eye(8)
    torch.testing.assert_close(ours(x), ours.weight.clamp(-2, 2).T, rtol=1e-6, atol=0)
    assert theirs(x).abs().max() <= 0.5, "the reference clips at 1 / 2"


def test_a_learned_clip_stays_positive() -> None:
    config = AnalogConfig(clip=WeightClipParameter(type="LearnablePerChannel"))  # type: ignore[arg-type]
    theirs, ours = linear(config)
    for layer in (theirs, ours):
        layer.learnable_weight_clip.data[0, 0] = -0.5
        layer.clip_weights()
    assert ours.learnable_weight_clip[0, 0].item() == torch.finfo(torch.float32).smallest_normal
    assert theirs.learnable_weight_clip[0, 0].item() == -0.5


def test_a_one_dimensional_input_gives_a_one_dimensional_output() -> None:
    config = AnalogConfig(forward=IOParameters(out_bound=5), pre_post=ranged().pre_post)
    theirs, ours = linear(config)
    x = x_of()[0]
    assert ours.eval()(x).shape == (4,)
    assert theirs.eval()(x).shape == (1, 4)


def test_backward_uses_the_range_of_its_own_forward() -> None:
    config = ranged(init_value=1.0, init_std_alpha=0.3, decay=0.0)
    theirs, ours = linear(config)
    gradients = {}
    for name, layer in (("theirs", theirs), ("ours", ours)):
        alone = copy.deepcopy(layer)
        alone(x_of(seed=1)).sum().backward()
        both = copy.deepcopy(layer)
        first = both(x_of(seed=1))
        both(100 * x_of(seed=2))  # calibrates the Parameter once more
        first.sum().backward()
        gradients[name] = (alone.input_range.grad, both.input_range.grad)
    assert torch.equal(*gradients["ours"])
    assert not torch.allclose(*gradients["theirs"], rtol=0.1)


def test_recomputation_does_not_count_a_batch_twice() -> None:
    counts = []
    for layer in linear(ranged(init_from_data=10)):
        checkpoint(layer, x_of(), use_reentrant=False).sum().backward()
        counts.append(int(layer.input_range_update_idx.item()))
    assert counts == [2, 1]


def test_tile_bounds_are_integers_in_every_dtype() -> None:
    config = AnalogConfig(
        clip=WeightClipParameter(type="LearnablePerChannel"),  # type: ignore[arg-type]
        mapping=MappingParameter(257),
    )
    theirs, ours = linear(config, n=514, dtype=torch.bfloat16)
    assert theirs.upper_end_of_slices.tolist() == [256, 512]
    assert ours.in_sizes == (257, 257)
    whole = torch.randn(4, 514).bfloat16()
    whole[:, -1] = 50.0
    ours.set_weights(whole)
    theirs.set_weights(whole)
    assert (ours.learnable_weight_clip[1] == 50).all()
    assert (theirs.learnable_weight_clip[1] < 50).all(), "the reference does not see the last columns"


def test_setting_and_quantising_weights_keep_objects_and_configuration() -> None:
    config = AnalogConfig(
        clip=WeightClipParameter(type="LearnablePerChannel"),  # type: ignore[arg-type]
        modifier=WeightModifierParameter(res=30, quantization_type="DiscretizePerChannel"),  # type: ignore[arg-type]
    )
    theirs, ours = linear(config)
    kept = []
    for layer in (theirs, ours):
        before = layer.learnable_weight_clip
        layer.set_weights(torch.randn(4, 8))
        kept.append(layer.learnable_weight_clip is before)
        layer.quantize_weights()
    assert kept == [False, True]
    assert ours.rpu_config == config
    assert theirs.rpu_config.modifier.quantization_type.value == "None"


def test_refusals_are_exceptions_at_construction() -> None:
    theirs = lightning.AnalogLinear(8, 4, rpu_config=config_of(AnalogConfig()))
    theirs.rpu_config.forward.inp_res = 254
    with pytest.raises(AssertionError):
        theirs(x_of())
    with pytest.raises(ArgumentError, match="inp_res is 254"):
        AnalogConfig(forward=IOParameters(inp_res=254))


def test_the_bound_of_an_adc_is_not_beyond_itself() -> None:
    """The last level, 15 steps of 2 bound / 30, is the bound; float32 puts it above for some bounds."""
    config = AnalogConfig(
        forward=IOParameters(out_bound=1.0, out_res=1 / 30),
        pre_post=ranged(init_from_data=0).pre_post,
    )
    found = []
    for bound in torch.linspace(1.0, 2.0, 101).tolist():
        for index, layer in enumerate(linear(config, n=1)):
            layer.input_range.data.fill_(bound)
            layer.weight.data.fill_(1.0)
            layer.bias.data.zero_()
            x = torch.tensor([[bound * 0.999]], requires_grad=True)  # rounds to the last level
            layer.eval()(x).sum().backward()
            found.append((index, bool(x.grad.abs().sum() > 0)))  # type: ignore[union-attr]
    assert all(kept for index, kept in found if index == 1)
    lost = sum(not kept for index, kept in found if index == 0)
    assert 0 < lost < 101, f"the reference lost the gradient for {lost} of 101 bounds"


def test_one_dimensional_convolutions_are_clipped() -> None:
    config = AnalogConfig(clip=WeightClipParameter(sigma=1.0, type="LayerGaussian"))  # type: ignore[arg-type]
    theirs, ours = twins(AnalogConv1d, {"in_channels": 3, "out_channels": 4, "kernel_size": 3}, config, seed=0)
    before = theirs.weight.clone()
    theirs.clip_weights()
    assert torch.equal(theirs.weight, before)
    ours.clip_weights()
    clip(theirs)  # as the two- and three-dimensional ones do
    torch.testing.assert_close(ours.weight.flatten(), theirs.weight.flatten())
    assert not torch.equal(ours.weight.flatten(), before.flatten())


def test_an_optimizer_that_the_user_did_not_make_clips() -> None:
    config = AnalogConfig(clip=WeightClipParameter(sigma=1.0, type="LayerGaussian"))  # type: ignore[arg-type]
    beyond = []
    for layer in linear(config):
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)  # not the reference's AnalogOptimizer
        before = layer.weight.std()
        layer(x_of()).sum().backward()
        optimizer.step()
        beyond.append(bool(layer.weight.abs().max() > 1.05 * before))
    assert beyond == [True, False]
