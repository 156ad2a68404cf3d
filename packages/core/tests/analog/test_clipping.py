"""Weight clipping: what it does to values, and that it happens once after each step of an optimiser of torch.optim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from clipped_layer import (
    LEARNED,
    NONE,
    ROWS,
    SIGMA,
    WHOLE,
    Clipped,
    assert_same,
    backward,
    by_hand,
    clipped,
    pair,
    x_of,
)
from torch import Tensor, nn

from triptych.analog import AnalogConfig, clipping

# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [WHOLE, ROWS], ids=["whole", "rows"])
@pytest.mark.parametrize("shape", [(6, 8), (4, 3, 5), (4, 3, 2, 2), (1, 2), (2, 300)])
def test_clips_at_sigma_unbiased_deviations_of_the_matrix(config: AnalogConfig, shape: tuple[int, ...]) -> None:
    layer = Clipped(config=config)
    layer.weight = nn.Parameter(torch.randn(shape) + 0.5)
    if len(shape) == 4:
        layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last)
    expected = clipped(layer.weight, config is ROWS, SIGMA)
    clipping.clip_weights(layer)
    # The bound is a float32 sum of squares, its root and a product: well within 8 roundings here.
    torch.testing.assert_close(layer.weight.double(), expected, rtol=8 * 2**-24, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_bound_is_wide_and_rounded_once(dtype: torch.dtype) -> None:
    layer = Clipped(n=400, m=3, dtype=dtype)
    expected = clipped(layer.weight)
    clipping.clip_weights(layer)
    tolerance = {torch.float64: 1e-13, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype] * 1.01
    torch.testing.assert_close(layer.weight.double(), expected, rtol=tolerance, atol=0)


def test_one_element_has_no_deviation() -> None:
    row = Clipped(n=1, m=3)
    before = row.weight.clone()
    clipping.clip_weights(row)
    assert torch.equal(row.weight, before)
    empty = Clipped(n=0, m=3)
    clipping.clip_weights(empty)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_learned_clip_stays_positive(dtype: torch.dtype) -> None:
    layer = Clipped(config=LEARNED, dtype=dtype)
    weight = layer.weight.clone()
    assert layer.learnable_weight_clip is not None
    layer.learnable_weight_clip.data[0, :4] = torch.tensor([-1.0, 0.0, 0.25, float("nan")], dtype=dtype)
    clipping.clip_weights(layer)
    tiny = torch.finfo(dtype).smallest_normal
    found = layer.learnable_weight_clip[0, :4].tolist()
    assert found[:3] == [tiny, tiny, 0.25]
    assert found[3] != found[3], "NaN must stay visible"
    assert torch.equal(layer.weight, weight)


def test_clip_weights_visits_every_layer_of_a_model_once() -> None:
    model = nn.Sequential(Clipped(seed=1), nn.Linear(6, 8), Clipped(config=NONE, seed=2), Clipped(config=WHOLE, seed=3))
    model.append(model[0])
    shared = Clipped(seed=4)
    shared.weight = model[0].weight
    model.append(shared)
    before = [p.clone() for p in model.parameters()]
    clipping.clip_weights(model)
    after = list(model.parameters())
    torch.testing.assert_close(after[0].double(), clipped(before[0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(after[4].double(), clipped(before[4], rows=False), rtol=1e-6, atol=0)
    for untouched in (1, 2, 3):
        assert torch.equal(before[untouched], after[untouched])


# --- optimisers of torch.optim ----------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "SGD fused": lambda p: torch.optim.SGD(p, 0.05, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.05),
    "Adam foreach": lambda p: torch.optim.Adam(p, 0.05, foreach=True),
    "Adam loop": lambda p: torch.optim.Adam(p, 0.05, foreach=False),
    "Adam fused": lambda p: torch.optim.Adam(p, 0.05, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.05),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.05),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.05),
    "Muon": lambda p: torch.optim.Muon(p, 0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.05),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.05),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.05),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("config", [WHOLE, ROWS, LEARNED], ids=["whole", "rows", "learned"])
def test_every_optimizer_of_torch_clips_once_a_step(name: str, config: AnalogConfig) -> None:
    ours, manual = pair(config)
    first, second = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](manual.parameters())
    for step in range(4):
        for layer, optimizer in ((ours, first), (manual, second)):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            backward(layer, seed=step)
            optimizer.step()
        by_hand(manual, config)
        assert_same(ours, manual)


def test_lbfgs_is_not_disturbed_between_its_closures() -> None:
    ours, manual = pair()
    for layer in (ours, manual):
        optimizer = torch.optim.LBFGS(layer.parameters(), lr=0.1, max_iter=6, line_search_fn="strong_wolfe")

        def closure(layer: Clipped = layer, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = (layer(x_of()) - 1).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
            if layer is manual:
                by_hand(manual, ROWS)
    assert_same(ours, manual)


class Nested(torch.optim.SGD):
    """Its step is wrapped, and so is the one that it calls; it changes the weights after that."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1.25)
        return result


class Lookahead(torch.optim.Optimizer):
    """An optimiser around another one over the same parameters."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.mul_(0.75)


@pytest.mark.parametrize(
    "make", [lambda p: Nested(p, 0.05), lambda p: Lookahead(torch.optim.SGD(p, 0.05))], ids=["super", "lookahead"]
)
def test_a_step_within_a_step_leaves_it_to_the_outer_one(make: Any) -> None:
    torch.optim.SGD([torch.zeros(1)], 0.1)  # the class's own step is wrapped from here on
    ours, manual = pair()
    first, second = make(ours.parameters()), make(manual.parameters())
    for step in range(3):
        for layer, optimizer in ((ours, first), (manual, second)):
            optimizer.zero_grad()
            backward(layer, step)
            optimizer.step()
        by_hand(manual, ROWS)
        assert_same(ours, manual)


def test_gradient_accumulation_clips_at_the_step_only() -> None:
    ours, manual = pair()
    first, second = torch.optim.SGD(ours.parameters(), 0.01), torch.optim.SGD(manual.parameters(), 0.01)
    for step in range(3):
        for layer, optimizer in ((ours, first), (manual, second)):
            for micro in range(3):
                backward(layer, 10 * step + micro)
                layer(x_of())
            optimizer.step()
            optimizer.zero_grad()
        by_hand(manual, ROWS)
        assert_same(ours, manual)


def test_two_optimizers_do_not_clip_each_others_layers() -> None:
    generator, discriminator = Clipped(n=8, m=8, seed=1), Clipped(n=8, m=8, seed=2)
    model = nn.Sequential(generator, discriminator)
    first = torch.optim.SGD(generator.parameters(), 1e-4)
    second = torch.optim.SGD(discriminator.parameters(), 1e-4)
    for step in range(3):
        for optimizer, own, other in ((first, generator, discriminator), (second, discriminator, generator)):
            model.zero_grad()
            backward(model, step)
            others = other.weight.clone()
            expected = clipped(own.weight - 1e-4 * own.weight.grad)  # type: ignore[operator]
            optimizer.step()
            assert torch.equal(other.weight, others)
            torch.testing.assert_close(own.weight.double(), expected, rtol=1e-5, atol=1e-6)
            model(x_of())
            assert torch.equal(other.weight, others)


def test_a_layer_without_a_gradient_is_left_alone() -> None:
    used, unused = Clipped(seed=1), Clipped(seed=2)
    optimizer = torch.optim.AdamW([*used.parameters(), *unused.parameters()], 0.01)
    before = unused.weight.clone()
    for step in range(3):
        backward(used, step)
        optimizer.step()
        optimizer.zero_grad()
        unused(x_of())
    assert torch.equal(unused.weight, before)


@pytest.mark.parametrize("fused", [False, True], ids=["host", "device"])
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_a_step_that_a_grad_scaler_skips_clips_nothing(fused: bool) -> None:
    layer = Clipped()
    optimizer = torch.optim.SGD(layer.parameters(), 0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, overflow in enumerate([False, True, False]):
        optimizer.zero_grad()
        scaler.scale(layer(x_of(seed=step)).square().sum()).backward()
        assert layer.weight.grad is not None
        gradient = layer.weight.grad / scaler.get_scale()
        if overflow:
            layer.weight.grad[0, 0] = float("inf")
        before = layer.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        if overflow:
            assert torch.equal(layer.weight, before)
            layer(x_of())
            assert torch.equal(layer.weight, before)
        else:
            torch.testing.assert_close(layer.weight.double(), clipped(before - 0.01 * gradient), rtol=1e-5, atol=1e-6)


def test_loading_initialising_and_averaging_are_not_steps() -> None:
    layer = Clipped()
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    wild = Clipped(seed=7)
    backward(layer)
    optimizer.step()
    optimizer.zero_grad()
    for change in (
        lambda: layer.load_state_dict(wild.state_dict()),
        lambda: nn.init.normal_(layer.weight),
        lambda: layer.weight.data.mul_(2),
        lambda: layer.load_state_dict(wild.state_dict(), assign=True),
    ):
        change()
        values = layer.weight.clone()
        layer(x_of())
        layer(x_of())
        assert torch.equal(layer.weight, values)


def test_loading_after_a_gradient_is_not_a_step_of_a_hand_written_optimizer() -> None:
    layer, wild = Clipped(), Clipped(seed=7)
    backward(layer)
    layer.load_state_dict(wild.state_dict())
    layer(x_of())
    assert torch.equal(layer.weight, wild.weight)
    backward(layer)
    layer.load_state_dict(Clipped(seed=8).state_dict(), assign=True)
    values = layer.weight.clone()
    layer(x_of())
    assert torch.equal(layer.weight, values)
