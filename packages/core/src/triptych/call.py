"""What was asked: one call of one phase of one op, as plain data.

A `Call` holds no tensor. It is what selection looks at, what a refusal talks about, what `triptych explain` builds
from its options and what a capture stores beside the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Scalar = float | int | bool | str

FORWARD = "forward"
BACKWARD = "backward"
PHASES = (FORWARD, BACKWARD)


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The metadata of one tensor argument.

    Attributes:
        shape: sizes, as in `torch.Tensor.shape`.
        stride: strides in elements; None when they are not known yet (a gradient, whose strides are known only
            when it arrives: a backend must then accept any).
        dtype, device: as in torch.
        aligned: whether the first element lies on a 16-byte boundary.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    aligned: bool = True

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """The metadata of `tensor`, which must be backed by memory (not fake, not meta)."""
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.device,
            tensor.data_ptr() % 16 == 0,
        )

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> TensorMeta:
        """The metadata of a freshly allocated tensor."""
        return cls(shape, contiguous_stride(shape), dtype, device)

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def __str__(self) -> str:
        text = f"{dtype_name(self.dtype)}[{', '.join(map(str, self.shape))}]"
        if self.stride is None:
            return f"{text} with any strides on {self.device}"
        if self.stride != contiguous_stride(self.shape):
            text += f" with strides ({', '.join(map(str, self.stride))})"
        return f"{text} on {self.device}" + ("" if self.aligned else ", not 16-byte aligned")

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "stride": None if self.stride is None else list(self.stride),
            "dtype": dtype_name(self.dtype),
            "device": str(self.device),
            "aligned": self.aligned,
        }


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one phase of an op: the op's name, the phase, its tensors' metadata and its scalars."""

    op: str
    phase: str
    tensors: tuple[tuple[str, TensorMeta | None], ...]
    scalars: tuple[tuple[str, Scalar], ...]

    def tensor(self, name: str) -> TensorMeta | None:
        """The metadata of the tensor parameter `name`; None when the call leaves it out."""
        for known, meta in self.tensors:
            if known == name:
                return meta
        raise KeyError(f"{self.op}.{self.phase} has no tensor parameter {name!r}")

    def scalar(self, name: str) -> Scalar:
        """The value of the scalar parameter `name`."""
        for known, value in self.scalars:
            if known == name:
                return value
        raise KeyError(f"{self.op}.{self.phase} has no scalar parameter {name!r}")

    @property
    def device(self) -> torch.device:
        """The device of the first tensor, on which the call runs."""
        return next(meta.device for _, meta in self.tensors if meta is not None)

    def __str__(self) -> str:
        parts = [f"{name}={'None' if meta is None else meta}" for name, meta in self.tensors]
        parts += [f"{name}={value!r}" for name, value in self.scalars]
        return f"{self.op}.{self.phase}({', '.join(parts)})"

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "phase": self.phase,
            "tensors": {name: None if meta is None else meta.to_json() for name, meta in self.tensors},
            "scalars": dict(self.scalars),
        }


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The row-major strides of `shape`, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
