"""Wrong arguments: the texts, and that nothing is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spies import ran

import triptych

X = torch.ones(2, 8)
W = torch.ones(8)
META = torch.ones(8, device="meta")
HALF = "float32, bfloat16 or float16 beside an x that is not float64"


@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        (([1.0],), {}, "rms_norm: x is a list. It must be a torch.Tensor."),
        (
            (torch.ones(2, 8, dtype=torch.int64),),
            {},
            "rms_norm: x has dtype torch.int64. It must be float32, bfloat16, float16 or float64; convert it with x.to(...).",
        ),
        (
            (torch.ones(2, 8, dtype=torch.complex64),),
            {"eps": 1e-6},
            "rms_norm: x has dtype torch.complex64. It must be float32, bfloat16, float16 or float64; "
            "convert it with x.to(...).",
        ),
        (
            (torch.tensor(1.0),),
            {},
            "rms_norm: x is a scalar tensor. It needs at least one dimension, the one to normalise.",
        ),
        ((X, 1.0), {}, "rms_norm: weight is a float. It must be a torch.Tensor or None."),
        (
            (X, torch.ones(7)),
            {},
            "rms_norm: weight has shape [7] and x has shape [2, 8]. weight must have shape [8], the last dimension of x.",
        ),
        (
            (X, torch.ones(1, 8)),
            {},
            "rms_norm: weight has shape [1, 8] and x has shape [2, 8]. weight must have shape [8], the last dimension of x.",
        ),
        ((X, META), {}, "rms_norm: weight is on meta and x is on cpu. Move one to the other's device."),
        (
            (X, W.double()),
            {},
            f"rms_norm: weight has dtype torch.float64 and x has dtype torch.float32. weight must have x's dtype, or {HALF}.",
        ),
        (
            (X.double(), W),
            {},
            f"rms_norm: weight has dtype torch.float32 and x has dtype torch.float64. weight must have x's dtype, or {HALF}.",
        ),
        (
            (X, W.bfloat16()),
            {},
            "rms_norm: weight has dtype torch.bfloat16 and x has dtype torch.float32. A float32 x takes a float32 weight; "
            "convert it with weight.float().",
        ),
        ((X, W), {"eps": -1e-6}, "rms_norm: eps is -1e-06. It must be a finite number, 0 or greater."),
        ((X, W), {"eps": float("nan")}, "rms_norm: eps is nan. It must be a finite number, 0 or greater."),
        ((X, W), {"eps": float("inf")}, "rms_norm: eps is inf. It must be a finite number, 0 or greater."),
        ((X, W), {"offset": float("nan")}, "rms_norm: offset is nan. It must be a finite number."),
        ((X,), {"offset": 1.0}, "rms_norm: offset is 1.0 but there is no weight. Pass a weight, or offset 0."),
        (
            (X, W),
            {"rounding": "llama"},
            "rms_norm: rounding is 'llama'. It must be 'after_weight' or 'before_weight'.",
        ),
    ],
)
def test_rms_norm_says_what_is_wrong(args: tuple[Any, ...], options: dict[str, Any], text: str) -> None:
    for policy in ("composite", "torch", "auto"):
        with triptych.use(policy), ran() as seen, pytest.raises(triptych.ArgumentError) as raised:
            triptych.rms_norm(*args, **options)
        assert str(raised.value) == text
        assert seen == {}


@pytest.mark.parametrize(
    ("x", "residual", "text"),
    [
        (X, None, "add_rms_norm: residual is a NoneType. It must be a torch.Tensor."),
        (
            X,
            torch.ones(8),
            "add_rms_norm: x has shape [2, 8] and residual has shape [8]. They must be the same; "
            "convert one of them (expand, to).",
        ),
        (
            X,
            X.bfloat16(),
            "add_rms_norm: x has dtype torch.float32 and residual has dtype torch.bfloat16. They must be the same; "
            "convert one of them (expand, to).",
        ),
        (
            X,
            torch.ones(2, 8, device="meta"),
            "add_rms_norm: x has device cpu and residual has device meta. They must be the same; "
            "convert one of them (expand, to).",
        ),
    ],
)
def test_add_rms_norm_says_what_is_wrong(x: torch.Tensor, residual: Any, text: str) -> None:
    with triptych.use("composite"), ran() as seen, pytest.raises(triptych.ArgumentError) as raised:
        triptych.add_rms_norm(x, residual, W)
    assert str(raised.value) == text
    assert seen == {}


def test_the_operator_checks_as_well() -> None:
    with pytest.raises(triptych.ArgumentError, match=r"weight has shape \[7\]"):
        torch.ops.triptych.rms_norm(X, torch.ones(7), 1e-6, 0.0, "after_weight", "")
