"""Assertions on results: within a bound, bit for bit, in layout, in storage. NaN never counts as equal to a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from triptych.call import contiguous_stride, dtype_name
from triptych.compare import agreement
from triptych.opspec import Tensors

Agreement = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Elementwise, whether an output agrees with its reference within a bound: a function of `triptych.compare`."""


def assert_within(
    names: Sequence[str],
    outputs: Tensors,
    references: Tensors,
    bounds: Tensors,
    what: str = "",
    agree: Agreement = agreement,
) -> None:
    """Assert that every output lies within its bound of its reference, elementwise."""
    assert len(outputs) == len(names), f"{what}{len(outputs)} outputs; the op has {len(names)}"
    for name, output, reference, bound in zip(names, outputs, references, bounds, strict=True):
        assert output.shape == reference.shape, (
            f"{what}{name} has shape {list(output.shape)}; expected {list(reference.shape)}"
        )
        passed = agree(output, reference, bound)
        if bool(passed.all()):
            continue
        index = tuple(int(i) for i in (~passed).nonzero()[0])
        error = (output[index].double() - reference[index].double()).abs()
        hint = "; Sample.nan says where NaN is right" if bool(output[index].isnan() & reference[index].isnan()) else ""
        raise AssertionError(
            f"{what}{name}: {int((~passed).sum())} of {passed.numel()} elements lie outside the bound; the first, "
            f"at {list(index)}: {output[index].item()!r}, reference {reference[index].item()!r}, "
            f"error {error.item():.3g}, bound {bound[index].item():.3g}{hint}"
        )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of the elements, in row-major order: bit-for-bit comparison tells NaNs and signed zeros apart."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(
    names: Sequence[str], first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], what: str
) -> None:
    """Assert that two sets of results are equal bit for bit; `what` says which two, for the message."""
    for name, one, other in zip(names, first, second, strict=True):
        assert one.shape == other.shape, f"{name}: shapes {list(one.shape)} and {list(other.shape)}: {what}"
        assert one.dtype == other.dtype, f"{name}: dtypes {one.dtype} and {other.dtype}: {what}"
        different = as_bytes(one) != as_bytes(other)
        if bool(different.any()):
            elements = different.view(-1, one.element_size()).any(-1)
            index = int(elements.nonzero()[0])
            raise AssertionError(
                f"{name}: {int(elements.sum())} of {one.numel()} elements differ, the first at flat index {index}: "
                f"{one.reshape(-1)[index].item()!r} and {other.reshape(-1)[index].item()!r}: {what}"
            )


def assert_declared(names: Sequence[str], outputs: Tensors, fakes: Tensors, what: str = "") -> None:
    """Assert that outputs have the shape, dtype, device and row-major layout that the op's fake declares."""
    assert isinstance(outputs, tuple), f"{what}returned a {type(outputs).__name__}; expected a tuple of tensors"
    assert len(outputs) == len(names), f"{what}{len(outputs)} outputs; the op has {len(names)}"
    for name, output, fake in zip(names, outputs, fakes, strict=True):
        assert type(output) is torch.Tensor, f"{what}{name} is a {type(output).__name__}; expected a torch.Tensor"
        found = f"{dtype_name(output.dtype)}{list(output.shape)} on {output.device}"
        declared = f"{dtype_name(fake.dtype)}{list(fake.shape)} on {fake.device}"
        assert found == declared, f"{what}{name} is {found}; the op declares {declared}"
        row_major = contiguous_stride(tuple(output.shape))
        assert output.is_contiguous(), f"{what}{name} has strides {output.stride()}; row-major outputs have {row_major}"
        assert not output.requires_grad, f"{what}{name} requires a gradient; a phase returns plain tensors"


def storage_of(tensor: torch.Tensor) -> int:
    """Which storage a tensor lies in, as a number that is the same for two tensors of one storage."""
    number: int = tensor.untyped_storage()._cdata
    return number


def assert_no_alias(names: Sequence[str], outputs: Tensors, others: dict[str, torch.Tensor]) -> None:
    """Assert that no output shares its storage with another output or with one of `others`."""
    owners = {storage_of(tensor): name for name, tensor in others.items()}
    for name, output in zip(names, outputs, strict=True):
        owner = owners.setdefault(storage_of(output), name)
        assert owner == name, f"{name} shares its memory with {owner}; outputs are freshly allocated"
