"""What the analog ops check alike: numbers, tensors that belong to another one, seeds."""

from __future__ import annotations

import math

import torch

from triptych.errors import ArgumentError
from triptych.ops._norm_bounds import statistics_dtype
from triptych.ops.rms_norm import check_plain

Tensor = torch.Tensor


def check_floats(op: str, **values: float) -> None:
    """Raise ArgumentError unless every value is a finite number."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise ArgumentError(f"{op}: {name} is {value}. It must be a finite number.")


def check_like(
    op: str, name: str, tensor: object, other_name: str, other: Tensor, shape: tuple[int, ...], meaning: str
) -> None:
    """Raise ArgumentError unless a tensor has a shape, and the device and dtype of another one.

    float32 beside a 16-bit one is also right.

    Args:
        op, name, tensor: what is checked.
        other_name, other: the tensor that it belongs to.
        shape, meaning: the shape it must have, and why.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{op}: {name} is a {type(tensor).__name__}. It must be a torch.Tensor.")
    check_plain(op, name, tensor)
    if tuple(tensor.shape) != shape:
        raise ArgumentError(
            f"{op}: {name} has shape {list(tensor.shape)} and {other_name} has shape {list(other.shape)}. {name} must "
            f"have shape {list(shape)}: {meaning}."
        )
    check_device(op, name, tensor, other_name, other)
    allowed = {other.dtype, statistics_dtype(other.dtype)}
    if tensor.dtype not in allowed:
        raise ArgumentError(
            f"{op}: {name} has dtype {tensor.dtype} and {other_name} has dtype {other.dtype}. {name} must be "
            f"{' or '.join(sorted(str(each) for each in allowed))}; convert it with {name}.to(...)."
        )


def check_device(op: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ArgumentError unless both tensors are on one device."""
    if tensor.device != other.device:
        raise ArgumentError(
            f"{op}: {name} is on {tensor.device} and {other_name} is on {other.device}. Move one to the other's device."
        )


def check_seed(op: str, seed: object, other: Tensor, needed: bool, why: str) -> None:
    """Raise ArgumentError unless there is a seed where one is needed, and it is one.

    Args:
        op: the op.
        seed: what was given.
        other: the tensor on whose device it must be.
        needed, why: whether there is noise, and what says so.
    """
    if seed is None:
        if needed:
            raise ArgumentError(
                f"{op}: {why} but there is no seed. Pass one as an int64 tensor of shape [1] on {other.device}, such "
                f"as torch.randint(2**63 - 1, (1,), device=...)."
            )
        return
    if not isinstance(seed, Tensor):
        raise ArgumentError(
            f"{op}: seed is a {type(seed).__name__}. It must be an int64 tensor of shape [1]: a number would be a "
            f"constant of a captured graph."
        )
    if seed.dtype is not torch.int64 or tuple(seed.shape) != (1,):
        raise ArgumentError(
            f"{op}: seed has dtype {seed.dtype} and shape {list(seed.shape)}. It must be an int64 tensor of shape [1]."
        )
    check_device(op, "seed", seed, "the data", other)
