"""Values that lie exactly where a quantiser rounds or a clamp begins, in numbers that have no rounding error: no tolerance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peer import config_of, lightning

import triptych
from triptych.analog import (
    AnalogConfig,
    AnalogLinear,
    InputRangeParameter,
    IOParameters,
    PrePostProcessingParameter,
)

pytestmark = pytest.mark.parity
HALVES = [
    0.0,
    0.5,
    1.5,
    2.5,
    -0.5,
    -1.5,
    3.5,
    14.5,
    -14.5,
    15.0,
    -15.0,
    15.5,
    -16.5,
    126.5,
    127.0,
    -127.0,
    127.5,
    -200.0,
]


def config(io: dict[str, Any], bound: float, fast: bool) -> AnalogConfig:
    range_ = InputRangeParameter(
        enable=True, init_value=bound, init_from_data=0, fast_mode=fast, decay=0.25, input_min_percentage=0.5
    )
    return AnalogConfig(forward=IOParameters(**io), pre_post=PrePostProcessingParameter(range_))


@pytest.mark.parametrize("backend", ["torch", "cuda", "triton"])
@pytest.mark.parametrize("fast", [False, True], ids=["learned", "fast"])
@pytest.mark.parametrize(
    ("io", "bound"),
    [
        ({}, 15.0),
        ({"inp_res": 254}, 127.0),
        ({"inp_res": 30}, 15.0),
        ({"inp_res": 1 / 32}, 16.0),
        ({"out_bound": 1.0}, 127.0),
        ({"out_bound": 1.0, "out_res": 254}, 127.0),
        ({"out_bound": 0.5, "out_res": 30}, 30.0),
        ({"inp_res": 254, "out_bound": 1.0, "out_res": 254}, 127.0),
    ],
    ids=str,
)
def test_exact_ties_go_the_same_way(io: dict[str, Any], bound: float, fast: bool, backend: str) -> None:
    ours_config = config(io, bound, fast)
    layers: list[Any] = [
        lightning.AnalogLinear(4, 4, rpu_config=config_of(ours_config)),
        AnalogLinear(4, 4, rpu_config=ours_config),
    ]
    # Each input reaches one output as it is: columns of a diagonal matrix, with a largest weight of 1.
    x = torch.tensor([*HALVES, *[0.0] * (-len(HALVES) % 4)]).view(-1, 4)
    g = torch.arange(1.0, x.numel() + 1).view_as(x) * torch.tensor([1.0, -1.0, 1.0, -1.0])
    found = []
    for layer in layers:
        with torch.no_grad():
            layer.weight.copy_(torch.diag(torch.tensor([1.0, -1.0, 1.0, 1.0])))
            layer.bias.zero_()
        leaf = x.clone().requires_grad_()
        with triptych.use(backend):
            y = layer(leaf)
            y.backward(g)
        found.append((y, leaf.grad, layer.weight.grad, layer.bias.grad, layer.input_range.grad))
    for name, theirs, ours in zip(("y", "dx", "d weight", "d bias", "d input_range"), *found, strict=True):
        assert torch.equal(ours, theirs), f"{name}: {ours} and the reference's {theirs}"
