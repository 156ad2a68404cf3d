"""RMSNorm, a drop-in for torch.nn.RMSNorm, and AddRMSNorm, which also does the residual addition before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from triptych.errors import ArgumentError
from triptych.layers.naming import Layer
from triptych.ops.add_rms_norm import add_rms_norm
from triptych.ops.rms_norm import ROUNDINGS, Rounding, rms_norm


class _Norm(Layer):
    """What RMSNorm and AddRMSNorm share: arguments, parameters, state and printed form, as in torch.nn.RMSNorm."""

    __constants__ = ["normalized_shape", "eps", "elementwise_affine", "offset", "rounding"]  # noqa: RUF012
    eps: float | None
    elementwise_affine: bool

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        rounding: Rounding = "after_weight",
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.normalized_shape = _checked_shape(name, normalized_shape)
        if eps is not None and not (_is_finite(eps) and eps >= 0):
            raise ArgumentError(f"{name}: eps is {eps!r}. It must be a finite number, 0 or greater, or None.")
        if not _is_finite(offset):
            raise ArgumentError(f"{name}: offset is {offset!r}. It must be a finite number.")
        if not isinstance(rounding, str) or rounding not in ROUNDINGS:
            raise ArgumentError(f"{name}: rounding is {rounding!r}. It must be 'after_weight' or 'before_weight'.")
        if offset and not elementwise_affine:
            raise ArgumentError(
                f"{name}: offset is {offset} but elementwise_affine is False: no weight to add it to. "
                f"Leave offset at 0, or elementwise_affine at True."
            )
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.offset = offset
        self.rounding = rounding
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to 1: the weight to 1 - offset."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def extra_repr(self) -> str:
        text = f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        if self.offset:
            text += f", offset={self.offset}"
        if self.rounding != "after_weight":
            text += f", rounding={self.rounding!r}"
        return text

    def _flat(self, x: Tensor) -> Tensor:
        """x with the normalised dimensions as one."""
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{type(self).__name__}: the input is a {type(x).__name__}. It must be a torch.Tensor.")
        # Under torch.jit.trace sizes are recorded values; there the op checks them, when it runs.
        known = not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if known and tuple(x.shape[-len(self.normalized_shape) :]) != self.normalized_shape:
            raise ArgumentError(
                f"{type(self).__name__}: the input has shape {list(x.shape)}. Its last dimensions must be "
                f"{list(self.normalized_shape)}, the layer's normalized_shape."
            )
        return x if len(self.normalized_shape) == 1 else x.flatten(-len(self.normalized_shape))

    def _flat_weight(self) -> Tensor | None:
        weight = self.weight
        return weight if weight is None or len(self.normalized_shape) == 1 else weight.flatten()


def _checked_shape(layer: str, normalized_shape: Any) -> tuple[int, ...]:
    """normalized_shape as a tuple. ArgumentError unless it is one size or several."""
    several = isinstance(normalized_shape, Iterable) and not isinstance(normalized_shape, str | Tensor)
    sizes: tuple[Any, ...] = tuple(normalized_shape) if several else (normalized_shape,)
    if not sizes:
        raise ArgumentError(f"{layer}: normalized_shape is empty. Name at least one dimension to normalise.")
    if not all(map(_is_size, sizes)):
        raise ArgumentError(
            f"{layer}: normalized_shape is {normalized_shape!r}. It must be one size or a sequence of sizes, each an "
            f"integer, 0 or greater, for example 4096 or (16, 64)."
        )
    return tuple(int(size) for size in sizes)


def _is_size(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _autocasts(x: Tensor) -> bool:
    kind = x.device.type
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def _is_finite(value: object) -> bool:
    # bool is an int, and a tensor of one element passes for a number: neither is meant.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


class RMSNorm(_Norm):
    """Root mean square layer normalisation; takes the arguments of torch.nn.RMSNorm and loads its state_dict.

    Args:
        normalized_shape: the trailing dimensions to normalise together; an int is one dimension.
        eps: added to the mean square; None means that of float32, or of float64 for a float64 input, as in torch.
        elementwise_affine: whether there is a weight of normalized_shape.
        device, dtype: of the weight. A float32 weight beside 16-bit activations is supported.
        offset: added to the weight: 1.0 for Gemma, whose weights are stored around 0.
        rounding: "after_weight" as torch.nn.RMSNorm, "before_weight" as Llama's own code; see `triptych.rms_norm`.

    Shape: [..., *normalized_shape] to the same.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = rms_norm(
            self._flat(x),
            self._flat_weight(),
            eps=self.eps,
            offset=self.offset,
            rounding=self.rounding,
            layer=self.layer_name,
        )
        return y if len(self.normalized_shape) == 1 else y.view(x.shape)


class AddRMSNorm(_Norm):
    """Residual addition and RMSNorm of the sum, fused: `y, h = layer(x, residual)` with h = x + residual.

    Takes the arguments of `RMSNorm` and has the same state_dict. Under torch.autocast, where x comes out of a layer in
    16 bits and the residual does not, the narrower one is converted, as `x + residual` does.

    Shape: two tensors [..., *normalized_shape] to two of the same.
    """

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(x, Tensor) and isinstance(residual, Tensor) and x.dtype != residual.dtype and _autocasts(x):
            dtype = torch.promote_types(x.dtype, residual.dtype)
            x, residual = x.to(dtype), residual.to(dtype)
        y, h = add_rms_norm(
            self._flat(x),
            self._flat(residual),
            self._flat_weight(),
            eps=self.eps,
            offset=self.offset,
            rounding=self.rounding,
            layer=self.layer_name,
        )
        return (y, h) if len(self.normalized_shape) == 1 else (y.view(x.shape), h.view(x.shape))
