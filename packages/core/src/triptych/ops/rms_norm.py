"""rms_norm: root mean square layer normalisation (Zhang and Sennrich, 2019).

    rstd = 1 / sqrt(mean(x^2) + eps)        over the last dimension
    y    = x * rstd * (weight + offset)

    backward, with g = weight + offset, xhat = x * rstd and wdy = dy * g:
    dx   = rstd * (wdy - xhat * mean(wdy * xhat))
    dw   = sum of dy * xhat over all rows

Shapes: N = columns, the last dimension; x, y, dy, dx [..., N]; weight, dw [N]; rstd [...].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from triptych import samples as make
from triptych.call import TensorMeta
from triptych.dispatch import define
from triptych.errors import ArgumentError
from triptych.ops import _norm_bounds as bounds
from triptych.ops._norm_bounds import statistics_dtype
from triptych.opspec import OpSpec, Phase, Sample, Tensors
from triptych.sharding.rule import Sharding

Tensor = torch.Tensor
Rounding = Literal["after_weight", "before_weight"]
ROUNDINGS: tuple[str, ...] = ("after_weight", "before_weight")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# --- the public function --------------------------------------------------------------------------------------------


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float | None = None,
    offset: float = 0.0,
    rounding: Rounding = "after_weight",
    layer: str = "",
) -> Tensor:
    """Normalise the last dimension of `x` by its root mean square and scale it.

    Args:
        x: [..., N]; float32, bfloat16, float16 or float64; any strides.
        weight: [N], of x's dtype, or float32 or another 16-bit type beside a 16-bit x; None scales by 1.
        eps: added to the mean square; None means the machine epsilon of the statistics' dtype (1.2e-7, and 2.2e-16
            for a float64 x), as in torch.nn.RMSNorm.
        offset: added to weight (1.0 for Gemma, whose weights are stored around 0).
        rounding: where the result is rounded to x's dtype: "after_weight" once, at the end, as torch.nn.RMSNorm does;
            "before_weight" x * rstd is rounded first and the product again, as Llama's own code does.
        layer: the name under which policies and reports know the caller.

    Returns:
        [..., N] in x's dtype, contiguous. Statistics and products are float32 (float64 for float64).

    Raises:
        ArgumentError: the arguments do not fit together.
        Refused: the policy allows no backend that can run it.
    """
    if eps is None:
        eps = _default_eps(x)
    y: Tensor = _rms_norm(layer, x, weight, eps, offset, rounding)
    return y


def _default_eps(x: Tensor) -> float:
    return torch.finfo(statistics_dtype(x.dtype)).eps if isinstance(x, Tensor) else 0.0


# --- what every backend may rely on ---------------------------------------------------------------------------------


def check(x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> None:
    """Raise ArgumentError unless the arguments of `rms_norm` fit together."""
    check_norm("rms_norm", x, weight, eps, offset, rounding)


def check_norm(op: str, x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> None:
    """Raise ArgumentError unless the arguments of a root mean square norm fit together."""
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{op}: x is a {type(x).__name__}. It must be a torch.Tensor.")
    check_plain(op, "x", x)
    if x.dtype not in FLOATS:
        raise ArgumentError(
            f"{op}: x has dtype {x.dtype}. It must be float32, bfloat16, float16 or float64; convert it with x.to(...)."
        )
    if x.dim() == 0:
        raise ArgumentError(f"{op}: x is a scalar tensor. It needs at least one dimension, the one to normalise.")
    if weight is not None:
        _check_weight(op, x, weight)
    elif offset != 0:
        raise ArgumentError(f"{op}: offset is {offset} but there is no weight. Pass a weight, or offset 0.")
    if not 0 <= eps < float("inf"):
        raise ArgumentError(f"{op}: eps is {eps}. It must be a finite number, 0 or greater.")
    if not abs(offset) < float("inf"):
        raise ArgumentError(f"{op}: offset is {offset}. It must be a finite number.")
    if not isinstance(rounding, str) or rounding not in ROUNDINGS:
        raise ArgumentError(f"{op}: rounding is {rounding!r}. It must be 'after_weight' or 'before_weight'.")


def check_plain(op: str, name: str, tensor: Tensor) -> None:
    """Raise ArgumentError unless each element of a tensor lies at the address that its strides give."""
    if tensor.is_nested:
        raise ArgumentError(
            f"{op}: {name} is a nested tensor. It must be a plain, strided one. Pass {name}.values() of a jagged "
            f"tensor, or torch.nested.to_padded_tensor({name}, 0.0)."
        )
    if tensor.is_quantized:
        raise ArgumentError(
            f"{op}: {name} is a quantized tensor. It must be a floating-point one; pass {name}.dequantize()."
        )
    if tensor.layout is not torch.strided:
        raise ArgumentError(
            f"{op}: {name} has layout {tensor.layout}. It must be a plain, strided tensor; pass {name}.to_dense()."
        )


def _check_weight(op: str, x: Tensor, weight: Tensor) -> None:
    if not isinstance(weight, Tensor):
        raise ArgumentError(f"{op}: weight is a {type(weight).__name__}. It must be a torch.Tensor or None.")
    check_plain(op, "weight", weight)
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ArgumentError(
            f"{op}: weight has shape {list(weight.shape)} and x has shape {list(x.shape)}. "
            f"weight must have shape [{x.shape[-1]}], the last dimension of x."
        )
    if weight.device != x.device:
        raise ArgumentError(
            f"{op}: weight is on {weight.device} and x is on {x.device}. Move one to the other's device."
        )
    wide = torch.float64
    if weight.dtype not in FLOATS or (weight.dtype is wide) != (x.dtype is wide):
        raise ArgumentError(
            f"{op}: weight has dtype {weight.dtype} and x has dtype {x.dtype}. "
            f"weight must have x's dtype, or float32, bfloat16 or float16 beside an x that is not float64."
        )
    if x.dtype is torch.float32 and weight.dtype is not torch.float32:
        raise ArgumentError(
            f"{op}: weight has dtype {weight.dtype} and x has dtype {x.dtype}. A float32 x takes a float32 weight; "
            f"convert it with weight.float()."
        )


def check_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    rounding: str,
    need_dx: bool,
    need_dw: bool,
) -> None:
    """Raise ArgumentError unless the arguments of `rms_norm_backward` fit together."""
    check_norm_backward("rms_norm_backward", (("dy", dy),), x, weight, rstd, eps, offset, rounding)


def check_norm_backward(
    op: str,
    like_x: tuple[tuple[str, Tensor | None], ...],
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    rounding: str,
) -> None:
    """The same for a backward: `like_x` are the tensors that must have the shape, dtype and device of x."""
    check_norm(op, x, weight, eps, offset, rounding)
    of_rstd = (x.shape[:-1], statistics_dtype(x.dtype), x.device)
    wanted = [(name, tensor, (x.shape, x.dtype, x.device)) for name, tensor in like_x if tensor is not None]
    for name, tensor, (shape, dtype, device) in (*wanted, ("rstd", rstd, of_rstd)):
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"{op}: {name} is a {type(tensor).__name__}. It must be a torch.Tensor.")
        check_plain(op, name, tensor)
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
            raise ArgumentError(
                f"{op}: {name} is {list(tensor.shape)} in {tensor.dtype} on {tensor.device}. Beside an x of "
                f"{list(x.shape)} in {x.dtype} it must be {list(shape)} in {dtype} on {device}."
            )


def fake_forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> Tensors:
    """Empty y in x's dtype and rstd in that of the statistics, both contiguous."""
    rstd = torch.empty(x.shape[:-1], dtype=statistics_dtype(x.dtype), device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), rstd


def fake_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    rounding: str,
    need_dx: bool,
    need_dw: bool,
) -> Tensors:
    """Empty dx and dw, contiguous; [0] for one that is not wanted, and for dw without a weight."""
    dx = torch.empty(x.shape if need_dx else (0,), dtype=x.dtype, device=x.device)
    if weight is None:
        return dx, torch.empty((0,), dtype=x.dtype, device=x.device)
    return dx, torch.empty(weight.shape if need_dw else (0,), dtype=weight.dtype, device=x.device)


# --- the reference: float64 inside ----------------------------------------------------------------------------------


def scale64(x: Tensor, weight: Tensor | None, offset: float) -> Tensor:
    """weight + offset in float64; ones without a weight."""
    if weight is None:
        return torch.ones(x.shape[-1], dtype=torch.float64, device=x.device)
    return weight.double() + offset


def normalised64(x: Tensor, rstd: Tensor, rounding: str) -> Tensor:
    """x * rstd in float64, rounded to x's dtype where the convention says so."""
    xhat = x.double() * rstd.double().unsqueeze(-1)
    return xhat.to(x.dtype).double() if rounding == "before_weight" else xhat


def reference_forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> Tensors:
    """In float64 throughout; y is not rounded at the end, so that the distance to it is the implementation's own."""
    mean_square = x.double().pow(2).sum(-1) / max(x.shape[-1], 1)
    rstd = 1.0 / torch.sqrt(mean_square + eps)
    return normalised64(x, rstd, rounding) * scale64(x, weight, offset), rstd


def reference_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    rounding: str,
    need_dx: bool,
    need_dw: bool,
) -> Tensors:
    """In float64 throughout. Rounding is passed straight through; dw sees the rounded x * rstd, as autograd would."""
    columns = x.shape[-1]
    scale = rstd.double().unsqueeze(-1)
    xhat = x.double() * scale
    wdy = dy.double() * scale64(x, weight, offset)
    dx = scale * (wdy - xhat * (wdy * xhat).sum(-1, keepdim=True) / max(columns, 1))
    rows = x.numel() // max(columns, 1)
    dw = (dy.double() * normalised64(x, rstd, rounding)).reshape(rows, columns).sum(0)
    nothing = torch.empty(0, dtype=torch.float64, device=x.device)
    return (dx if need_dx else nothing), (dw if need_dw and weight is not None else nothing)


# --- how far from the reference a correct implementation may lie; the derivation is in _norm_bounds.py ---------------


def bound_forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> Tensors:
    """y: one rounding, rstd's whole error, and a step at a tie where x * rstd is rounded first. rstd: its sum's."""
    y, rstd = reference_forward(x, weight, eps, offset, rounding)
    return bounds.forward(y, rstd, x, scale64(x, weight, offset).abs(), rounding)


def bound_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    rounding: str,
    need_dx: bool,
    need_dw: bool,
) -> Tensors:
    """dx: relative to the magnitudes of its two terms, which cancel. dw: to those of its summands."""
    dx, dw = reference_backward(dy, x, weight, rstd, eps, offset, rounding, need_dx, need_dw)
    if need_dx:
        dx = bounds.backward_dx(dx, dy, x, scale64(x, weight, offset).abs(), rstd)
    if need_dw and weight is not None:
        dw = bounds.backward_dw(dw, dy, x, rstd, weight.dtype, rounding)
    return dx, dw


# --- plain PyTorch, one operation after the other -------------------------------------------------------------------


def composite_forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, rounding: str) -> Tensors:
    """y and rstd, computed in the dtype of the statistics."""
    wide = x.to(statistics_dtype(x.dtype))
    rstd = torch.rsqrt(wide.pow(2).sum(-1) / max(x.shape[-1], 1) + eps)
    y = wide * rstd.unsqueeze(-1)
    if rounding == "before_weight":
        y = y.to(x.dtype).to(wide.dtype)
    if weight is not None:
        y = y * (weight.to(wide.dtype) + offset)
    return y.to(x.dtype).contiguous(), rstd.contiguous()


def composite_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    rounding: str,
    need_dx: bool,
    need_dw: bool,
) -> Tensors:
    """dx and dw, computed in rstd's dtype and rounded once; [0] for one that is not wanted."""
    dx, dw = fake_backward(dy, x, weight, rstd, eps, offset, rounding, False, False)
    scale = rstd.unsqueeze(-1)
    wide_dy = dy.to(rstd.dtype)
    xhat = x.to(rstd.dtype) * scale
    if need_dx:
        wdy = wide_dy if weight is None else wide_dy * (weight.to(rstd.dtype) + offset)
        wide_dx = scale * (wdy - xhat * (wdy * xhat).mean(-1, keepdim=True))
        dx = wide_dx.to(x.dtype).contiguous()
    if need_dw and weight is not None:
        seen = xhat.to(x.dtype).to(rstd.dtype) if rounding == "before_weight" else xhat
        rows = x.numel() // max(x.shape[-1], 1)
        dw = (wide_dy * seen).reshape(rows, x.shape[-1]).sum(0).to(weight.dtype)
    return dx, dw


# --- the cases of the conformance suite -----------------------------------------------------------------------------


def norm_samples(maker_count: int) -> Iterator[Sample]:
    """The grid that rms_norm (one [..., N] input) and add_rms_norm (two) share."""
    scalars = (1e-6, 0.0, "after_weight")
    for name, makers, columns in make.row_cases(maker_count):
        yield _sample(name, makers, make.normal(columns), scalars)
    makers = (make.normal(6, 72),) * maker_count
    yield _sample("no_weight", makers, None, scalars)
    yield _sample("float32_weight", makers, make.in_float32(make.normal(72)), scalars)
    yield _sample("strided_weight", makers, make.every_other(72), scalars)
    yield _sample("expanded_weight", makers, make.expanded(72), scalars)
    yield _sample("gemma", makers, make.normal(72), (1e-6, 1.0, "after_weight"))
    yield _sample("llama", makers, make.normal(72), (1e-5, 0.0, "before_weight"))
    yield _sample("llama_float32_weight", makers, make.in_float32(make.normal(72)), (1e-5, 0.0, "before_weight"))
    yield _sample("llama_no_weight", makers, None, (1e-5, 0.0, "before_weight"))
    yield _sample("large_eps", makers, make.normal(72), (10.0, 0.0, "after_weight"))
    yield _sample("zero_eps", makers, make.normal(72), (0.0, 0.0, "after_weight"))


def _sample(
    name: str, makers: tuple[make.Maker, ...], weight: make.Maker | None, scalars: tuple[float | str, ...]
) -> Sample:
    def tensors(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, ...]:
        made = [maker(generator, dtype, device) for maker in makers]
        return (*made, None if weight is None else weight(generator, dtype, device))

    return Sample(name, tensors, scalars)


# --- the spec -------------------------------------------------------------------------------------------------------


def typical(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """The arguments of an ordinary call: a contiguous x of `shape` and a weight of its dtype."""
    x = TensorMeta.contiguous(shape, dtype, device)
    return (x, TensorMeta.contiguous(shape[-1:], dtype, device), 1e-6, 0.0, "after_weight")


NORM_SCALARS: tuple[tuple[str, type], ...] = (("eps", float), ("offset", float), ("rounding", str))

SPEC = OpSpec(
    name="rms_norm",
    summary="root mean square layer normalisation of the last dimension",
    forward=Phase(
        tensors=("x", "weight?"),
        scalars=NORM_SCALARS,
        outputs=("y", "rstd"),
        reference=reference_forward,
        composite=composite_forward,
        fake=fake_forward,
        bound=bound_forward,
    ),
    backward=Phase(
        tensors=("dy", "x", "weight?", "rstd"),
        scalars=(*NORM_SCALARS, ("need_dx", bool), ("need_dw", bool)),
        outputs=("dx", "dw"),
        reference=reference_backward,
        composite=composite_backward,
        fake=fake_backward,
        bound=bound_backward,
    ),
    check=check,
    check_backward=check_backward,
    typical=typical,
    samples=lambda: norm_samples(1),
    differentiable=("y",),
    saved=("x", "weight", "rstd"),
    gradients=(("x",), ("weight",)),
    sharding=Sharding("... n, n -> ... n, ...", "... n, ... n, n, ... -> ... n, n +..."),
)

_rms_norm = define(SPEC).call
