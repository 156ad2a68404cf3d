"""torch.autocast, GradScaler and float32 Parameters beside 16-bit activations, in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from subjects import CONVERTERS, SUBJECTS, UNCALIBRATED, WIDTH, assert_close, batch, build, config, ran_on, step
from torch import Tensor, nn
from twins import pairs

from triptych.analog import AnalogLayer, AnalogLinear, named_analog_layers
from triptych.layers import AddRMSNorm, RMSNorm
from triptych.scope import process_policy

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
INTERPRETED = ("rms_norm", "add_rms_norm", "analog_noise")


def casts(model: nn.Module, dtype: torch.dtype) -> None:
    """By hand what autocast does: linear layers of torch.nn in `dtype`, analog ones answer in it, sums in the wider."""

    def linear(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return nn.functional.linear(
            args[0].to(dtype),
            module.weight.to(dtype),
            module.bias.to(dtype),  # type: ignore[operator,union-attr]
        )

    for module in model.modules():
        if type(module) is nn.Linear:
            module.register_forward_hook(linear)
            module.forward = lambda x: x  # type: ignore[method-assign]
        elif isinstance(module, AnalogLayer):
            module.register_forward_pre_hook(lambda module, args: args[0].to(module.weight.dtype))  # type: ignore
            module.register_forward_hook(lambda module, args, output: output.to(dtype))
        elif isinstance(module, AddRMSNorm):
            module.register_forward_pre_hook(lambda module, args: tuple(each.float() for each in args))


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients, from one seed."""
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    y = model(x)
    y.float().square().mean().backward()
    found = [y.detach(), x.grad, *(each.grad for each in model.parameters())]
    return [each for each in found if each is not None]


@pytest.mark.feature("autocast")
@pytest.mark.parametrize(("name", "backend"), pairs(*SUBJECTS, interpreted=INTERPRETED))
@HALVES
def test_autocast_is_the_casts_that_it_stands_for(name: str, backend: str, device: str, dtype: torch.dtype) -> None:
    blocks = 1 if backend == "triton" else 2
    model, by_hand = build(name, device, blocks), build(name, device, blocks)
    casts(by_hand, dtype)
    x = batch(device, rows=2)
    with process_policy(backend), ran_on(backend, name):
        with torch.autocast(torch.device(device).type, dtype):
            found = trained(model, x)
        expected = trained(by_hand, x)
    assert len(found) == len(expected) > 3
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype and bool(mine.isfinite().all())
        assert torch.equal(mine, theirs)
    assert all(each.dtype == torch.float32 for each in found[1:]), "gradients are in the Parameters' dtype"


@pytest.mark.feature("autocast")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # of torch.nn.RMSNorm
@HALVES
def test_results_have_the_dtype_of_torchs_layers(backend: str, device: str, dtype: torch.dtype) -> None:
    analog = AnalogLinear(WIDTH, 8, rpu_config=config(CONVERTERS, UNCALIBRATED)).to(device)
    for given in (torch.float32, dtype):
        x = batch(device, rows=1, length=2).to(given)
        with process_policy(backend), torch.autocast(torch.device(device).type, dtype):
            for ours, torchs in ((RMSNorm(WIDTH), nn.RMSNorm(WIDTH)), (analog, nn.Linear(WIDTH, 8))):
                assert ours.to(device)(x).dtype == torchs.to(device)(x).dtype, (ours, given)
            y, h = AddRMSNorm(WIDTH).to(device)(x, x)
            assert y.dtype == nn.RMSNorm(WIDTH).to(device)(x).dtype and h.dtype == x.dtype


# --- float32 weights beside 16-bit activations ------------------------------------------------------------------------


@pytest.mark.feature("float32 weights and 16-bit activations")
@HALVES
def test_norms_with_a_wide_weight(backend: str, device: str, dtype: torch.dtype) -> None:
    """Beside the same in float64 throughout; the result is rounded to the activations' dtype once."""
    torch.manual_seed(0)
    norm = RMSNorm(WIDTH, eps=1e-6).to(device)
    nn.init.normal_(norm.weight, 1.0, 0.1)
    x = batch(device).to(dtype).requires_grad_()
    dy = batch(device, number=1).to(dtype)
    with process_policy(backend), ran_on(backend, "rms_norm"):
        y = norm(x)
        y.backward(dy)
    wide, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight).backward(dy.double())
    assert y.dtype == x.grad.dtype == dtype and norm.weight.grad.dtype == torch.float32  # type: ignore[union-attr]
    assert_close(norm.weight.grad, weight.grad, "dw")  # type: ignore[arg-type]
    unit = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps / 512
    assert_close(x.grad, wide.grad, "dx", factor=unit)  # type: ignore[arg-type]


# --- GradScaler -------------------------------------------------------------------------------------------------------


@pytest.mark.feature("GradScaler")
@pytest.mark.parametrize(("name", "backend"), pairs(*SUBJECTS, interpreted=INTERPRETED))
def test_scaled_steps_and_those_that_are_skipped(name: str, backend: str, device: str) -> None:
    """Scales are powers of two: gradients are the same bits. An overflow changes no Parameter, and clips none.

    Without the decay of ranges, which is added to a gradient as it is, however that is scaled.
    """
    blocks = 1 if backend == "triton" else 2
    model = build(name, device, blocks)
    for _, layer in named_analog_layers(model):
        layer.rpu_config = layer.rpu_config.replaced("pre_post.input_range.decay", 0)
    twin = copy.deepcopy(model)
    first, second = torch.optim.SGD(model.parameters(), 0.2), torch.optim.SGD(twin.parameters(), 0.2)
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=2.0**10)
    with process_policy(backend), ran_on(backend, name):
        for number in range(2):
            x = batch(device, rows=2, number=number)
            torch.manual_seed(number)
            scaler.scale(model(x).square().mean()).backward()
            torch.manual_seed(number)
            step(twin, x)
            if number == 1:
                next(model.parameters()).grad.view(-1)[3] = float("inf")  # type: ignore[union-attr]
                before = [each.detach().clone() for each in model.parameters()]
            scaler.step(first)
            scaler.update()
            first.zero_grad()
            if number == 1:
                break
            second.step()
            second.zero_grad()
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(mine, theirs)
    assert scaler.get_scale() == 2.0**9
    for mine, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(mine, kept)
    assert any(
        not torch.equal(mine, theirs)
        for mine, theirs in zip(model.parameters(), build(name, device, blocks).parameters(), strict=True)
    )
