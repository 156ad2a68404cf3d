"""RMSNorm, a drop-in for torch.nn.RMSNorm, and AddRMSNorm, which also does the residual addition before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triptych.errors import ArgumentError
from triptych.ops.add_rms_norm import add_rms_norm
from triptych.ops.rms_norm import ROUNDINGS, Rounding, rms_norm


class _Norm(nn.Module):
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
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape: tuple[int, ...] = shape
        if not self.normalized_shape:
            raise ArgumentError(f"{name}: normalized_shape is empty. Name at least one dimension to normalise.")
        if eps is not None and not 0 <= eps < float("inf"):
            raise ArgumentError(f"{name}: eps is {eps}. It must be a finite number, 0 or greater, or None.")
        if rounding not in ROUNDINGS:
            raise ArgumentError(f"{name}: rounding is {rounding!r}. It must be 'after_weight' or 'before_weight'.")
        if offset and not elementwise_affine:
            raise ArgumentError(f"{name}: offset is {offset} but elementwise_affine is False: no weight to add it to.")
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.offset = offset
        self.rounding = rounding
        self.layer_name = ""
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
        if tuple(x.shape[-len(self.normalized_shape) :]) != self.normalized_shape:
            raise ArgumentError(
                f"{type(self).__name__}: the input has shape {list(x.shape)}. Its last dimensions must be "
                f"{list(self.normalized_shape)}, the layer's normalized_shape."
            )
        return x if len(self.normalized_shape) == 1 else x.flatten(-len(self.normalized_shape))

    def _flat_weight(self) -> Tensor | None:
        weight = self.weight
        return weight if weight is None or len(self.normalized_shape) == 1 else weight.flatten()


class RMSNorm(_Norm):
    """Root mean square layer normalisation; takes the arguments of torch.nn.RMSNorm and loads its state_dict.

    Args:
        normalized_shape: the trailing dimensions to normalise together; an int is one dimension.
        eps: added to the mean square; None means `torch.finfo(x.dtype).eps`.
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

    Takes the arguments of `RMSNorm` and has the same state_dict.

    Shape: two tensors [..., *normalized_shape] to two of the same.
    """

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
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
