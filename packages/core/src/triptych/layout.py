"""Tensors as what they are: views of storages. Copies that keep every stride, offset and sharing."""

from __future__ import annotations

from typing import Any

import torch


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of `tensor` as bytes: a view, not a copy."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def view(
    storage: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """The tensor of this dtype, shape, stride and offset (in elements) over the storage of `storage`."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage.untyped_storage(), offset, shape, stride)


def materialised(value: Any) -> Any:
    """`value`, or a copy of it where it is a tensor whose memory does not hold its elements as they are.

    A tensor with the negative bit means the negated elements; a zero tensor (as forward-mode autograd makes them) has
    no memory at all, and reading its storage ends the process.
    """
    if isinstance(value, torch.Tensor) and (value._is_zerotensor() or value.is_neg()):
        return torch.zeros_like(value) if value._is_zerotensor() else value.resolve_neg()
    return value


def distinct_storages(args: tuple[Any, ...]) -> dict[int, torch.Tensor]:
    """For each storage behind the tensors among `args`, by its identity, one tensor that has it."""
    return {each.untyped_storage()._cdata: each for each in args if isinstance(each, torch.Tensor)}


def clone_exactly(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`args` with every tensor over a copy of its storage: same strides and offsets, shared where it was shared."""
    with torch.no_grad():
        args = tuple(materialised(each) for each in args)
        copies = {key: whole(tensor).clone() for key, tensor in distinct_storages(args).items()}
        return tuple(_over_copy(each, copies) if isinstance(each, torch.Tensor) else each for each in args)


def _over_copy(tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    copy = copies[tensor.untyped_storage()._cdata]
    return view(copy, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
