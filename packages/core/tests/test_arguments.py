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


NOT_A_FLOAT = [
    ("1e-6", "eps is a str ('1e-6'). It must be a float."),
    (True, "eps is a bool (True). It must be a float."),
    (torch.tensor(1e-6), "eps is a Tensor. It must be a float."),
    (1e-6j, "eps is a complex. It must be a float."),
    ([1e-6], "eps is a list. It must be a float."),
]


@pytest.mark.parametrize(("value", "text"), NOT_A_FLOAT)
@pytest.mark.parametrize("name", ["eps", "offset"])
def test_a_scalar_of_another_type_is_named(name: str, value: Any, text: str) -> None:
    expected = text.replace("eps", name, 1)
    for op, arguments in ((triptych.rms_norm, (X, W)), (triptych.add_rms_norm, (X, X, W))):
        with triptych.use("composite"), ran() as seen, pytest.raises(triptych.ArgumentError) as raised:
            op(*arguments, **{name: value})  # type: ignore[operator]
        assert str(raised.value) == f"{op.__name__}: {expected}"
        assert seen == {}


@pytest.mark.parametrize("value", [["after_weight"], torch.ones(1), 1])
def test_a_rounding_of_another_type_is_named(value: Any) -> None:
    with triptych.use("composite"), ran() as seen, pytest.raises(triptych.ArgumentError) as raised:
        triptych.rms_norm(X, W, rounding=value)
    assert str(raised.value) == f"rms_norm: rounding is {value!r}. It must be 'after_weight' or 'before_weight'."
    assert seen == {}


def test_whole_numbers_are_numbers() -> None:
    with triptych.use("composite"), ran() as seen:
        assert torch.equal(triptych.rms_norm(X, W, eps=1, offset=1), triptych.rms_norm(X, W, eps=1.0, offset=1.0))
    assert seen == {("rms_norm", "forward", "composite"): 2}


STRIDED = "It must be a plain, strided tensor"
NESTED = (
    "is a nested tensor. It must be a plain, strided one. Pass {0}.values() of a jagged tensor, or "
    "torch.nested.to_padded_tensor({0}, 0.0)."
)
UNPLAIN = {
    "sparse": (lambda: torch.ones(2, 8).to_sparse(), f"has layout torch.sparse_coo. {STRIDED}; pass {{0}}.to_dense()."),
    "csr": (
        lambda: torch.ones(2, 8).to_sparse_csr(),
        f"has layout torch.sparse_csr. {STRIDED}; pass {{0}}.to_dense().",
    ),
    "mkldnn": (lambda: torch.ones(2, 8).to_mkldnn(), f"has layout torch._mkldnn. {STRIDED}; pass {{0}}.to_dense()."),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(2, 8), 0.1, 0, torch.quint8),
        "is a quantized tensor. It must be a floating-point one; pass {0}.dequantize().",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2, 8)]), NESTED),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2, 8)], layout=torch.jagged), NESTED),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, on making such tensors
@pytest.mark.parametrize("kind", UNPLAIN)
@pytest.mark.parametrize("place", ["x", "residual", "weight"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_tensor_without_strides_of_its_own_is_refused(kind: str, place: str, grad: bool) -> None:
    make, text = UNPLAIN[kind]
    other = X.clone().requires_grad_(grad)
    given = {"x": other, "residual": other, "weight": W, place: make()}
    with triptych.use("composite"), ran() as seen, pytest.raises(triptych.ArgumentError) as raised:
        triptych.add_rms_norm(given["x"], given["residual"], given["weight"], eps=1e-6)
    assert str(raised.value) == f"add_rms_norm: {place} {text.format(place)}"
    if place != "residual":
        with triptych.use("composite"), pytest.raises(triptych.ArgumentError) as raised:
            triptych.rms_norm(given["x"], given["weight"])
        assert str(raised.value) == f"rms_norm: {place} {text.format(place)}"
    assert seen == {}


def test_an_eps_that_follows_from_a_size_is_a_number_to_a_compiler() -> None:
    """It is a symbol while a function with dynamic shapes is traced, and a float when it reaches the op."""
    compiled = torch.compile(
        lambda x: triptych.rms_norm(x, eps=0.1 * x.shape[0]), backend="eager", dynamic=True, fullgraph=True
    )
    with triptych.use("composite"), ran() as seen:
        for rows in (2, 3, 5):
            x = torch.ones(rows, 8)
            assert torch.equal(compiled(x), triptych.rms_norm(x, eps=0.1 * rows))
    assert seen == {("rms_norm", "forward", "composite"): 6}


GOOD = {"dy": X, "x": X, "weight": W, "rstd": torch.ones(2)}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"dy": torch.ones(1, 8)},
            "dy is [1, 8] in torch.float32 on cpu. Beside an x of [2, 8] in torch.float32 it must be [2, 8] in torch.float32 "
            "on cpu.",
        ),
        (
            {"rstd": torch.ones(1)},
            "rstd is [1] in torch.float32 on cpu. Beside an x of [2, 8] in torch.float32 it must be [2] in torch.float32 on "
            "cpu.",
        ),
        (
            {"dy": X.bfloat16()},
            "dy is [2, 8] in torch.bfloat16 on cpu. Beside an x of [2, 8] in torch.float32 it must be [2, 8] in "
            "torch.float32 on cpu.",
        ),
        (
            {"weight": torch.ones(7)},
            "weight has shape [7] and x has shape [2, 8]. weight must have shape [8], the last dimension of x.",
        ),
        ({"x": torch.tensor(1.0)}, "x is a scalar tensor. It needs at least one dimension, the one to normalise."),
        ({"rounding": "zz"}, "rounding is 'zz'. It must be 'after_weight' or 'before_weight'."),
    ],
)
def test_the_backward_operator_checks_as_well(wrong: dict[str, Any], text: str) -> None:
    args = {**GOOD, "eps": 1e-6, "offset": 0.0, "rounding": "after_weight", **wrong}
    for policy in ("composite", "torch"):
        with triptych.use(policy), ran() as seen, pytest.raises(triptych.ArgumentError) as raised:
            torch.ops.triptych.rms_norm_backward(*args.values(), True, True, "")
        assert str(raised.value) == f"rms_norm_backward: {text}"
        assert seen == {}
    add = {"dy": args["dy"], "dh": torch.ones(3, 8), "h": args["x"], **{k: args[k] for k in list(args)[2:]}}
    with ran() as seen, pytest.raises(triptych.ArgumentError, match=r"^add_rms_norm_backward: "):
        torch.ops.triptych.add_rms_norm_backward(*add.values(), True, True, "")
    assert seen == {}
