"""Scalars that take a new value with every call: one plan for all of them, each call with its own value, all checked."""

from __future__ import annotations

import math

import pytest
import torch

from triptych import ArgumentError, operator, scope
from triptych.ops.analog_linear import SPEC as LINEAR
from triptych.ops.analog_linear import analog_linear
from triptych.ops.analog_weight import analog_weight
from triptych.testing import ran, under

Tensor = torch.Tensor
BOTH = {("analog_linear", "forward", "composite"): 1, ("analog_linear", "backward", "composite"): 1}


def plans() -> int:
    return len(scope.current().plans)


def test_a_schedule_makes_no_new_plans() -> None:
    weight, seed = torch.randn(4, 6), torch.tensor([1])
    with under("composite"):
        analog_weight(weight, None, seed, noise="per_channel", std_dev=0.5)
        before = plans()
        for step in range(1, 200):
            analog_weight(weight, None, seed, noise="per_channel", std_dev=step / 200)
        assert plans() == before


def test_a_schedule_makes_no_new_plans_through_the_operator() -> None:
    x, weight, ranges = torch.randn(3, 6), torch.randn(4, 6), torch.ones(1)
    with under("composite"):
        for step in range(1, 100):
            scalars = (1, "learned", 1.0 + step, 0.0, False, 0.0, -1.0, False, step / 100, 0.5)
            operator.run(LINEAR, "forward", (x, weight, None, ranges, None, None, *scalars), "")
            if step == 1:
                before = plans()
        assert plans() == before


def test_each_call_has_its_own_values_forward_and_backward() -> None:
    """Two calls of one plan, both forwards before both backwards."""
    x = torch.tensor([[0.4, 0.6, 2.0]])
    weight = torch.eye(3)
    with under("composite"):
        results = []
        for decay in (0.25, 0.75):
            ranges = torch.ones(1, requires_grad=True)
            y = analog_linear(x, weight, input_range=ranges, input_range_mode="learned", inp_res=2.0 / decay,
                              decay=decay, input_min_percentage=0.5)  # fmt: skip
            results.append((y, ranges, decay))
        for y, ranges, decay in results:
            step = decay
            expected = torch.round(x.clamp(-1, 1) / step) * step
            assert torch.equal(y, expected)
            (found,) = torch.autograd.grad(y.sum(), ranges)
            assert found.item() == pytest.approx(decay)  # two of three inside; the third pulls with min(1, 0) = 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5])
def test_a_wrong_value_is_found_although_there_is_a_plan(value: float) -> None:
    weight, seed = torch.randn(4, 6), torch.tensor([1])
    with under("composite"):
        analog_weight(weight, None, seed, noise="per_channel", std_dev=0.5)
        for _ in range(2):
            with pytest.raises(ArgumentError, match="std_dev is"), ran({}):
                analog_weight(weight, None, seed, noise="per_channel", std_dev=value)


def test_zero_is_not_a_small_positive_number() -> None:
    """out_bound 0 means no ADC: another signature, with other outputs."""
    x, weight, ranges = torch.randn(3, 6), torch.randn(4, 6), torch.ones(1)
    wmax = weight.abs().amax(-1).unsqueeze(0)
    with under("composite"):
        for bound in (1.0, 0.0, 2.0):
            x.requires_grad_()
            with ran(BOTH):
                analog_linear(
                    x, weight, input_range=ranges, wmax=wmax, input_range_mode="learned", out_bound=bound
                ).sum().backward()
