"""Any strided tensor [..., N] as rows of N neighbouring elements."""

import torch


def as_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A tensor whose rows of N elements are each dense, and the distance in elements from one row to the next.

    The tensor is the one given where its leading dimensions collapse to one stride, a contiguous copy otherwise.
    Pass a kernel the pointer and the stride of this pair and of no other: a stride taken from a view of the same
    values walks off the end.
    """
    if tensor.is_contiguous():
        return tensor, tensor.shape[-1]
    stride = collapsed_stride(tensor.shape, tensor.stride())
    if stride is None:
        return tensor.contiguous(), tensor.shape[-1]
    return tensor, stride


def collapsed_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The one distance between successive rows of a non-empty [..., N] layout, or None if there is not one."""
    if shape[-1] != 1 and strides[-1] != 1:
        return None
    row_stride = expected = None
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size == 1:
            continue  # never stepped along, so its stride says nothing
        if row_stride is None:
            row_stride = stride
        elif stride != expected:
            return None
        expected = stride * size
    return shape[-1] if row_stride is None else row_stride


def empty_rows(like: torch.Tensor) -> torch.Tensor:
    """An unwritten row-major tensor of the same shape, dtype and device, whatever the strides of `like`."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)
