"""Memory as a test instrument: what lies around inputs, what fresh memory holds, addresses past 2^31."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from triptych.call import contiguous_stride
from triptych.layout import whole
from triptych.testing.running import Skip

PATTERNS = (0x7F, 0xC1)
"""Bytes to fill memory with: a huge positive number (or NaN, in float16), and a moderate negative one."""

NAN_PATTERN = 0xFF
"""Fills memory with NaN in every floating dtype."""

_MAP_NORESERVE = 0x4000  # not named by the mmap module before Python 3.13


# --- guard zones around inputs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guarded:
    """A copy of a tensor, of the same strides and alignment, inside a larger allocation filled with a pattern.

    Attributes:
        tensor: the copy.
        memory: the whole allocation as bytes: zones before and after the tensor, the tensor, the gaps between its rows.
    """

    tensor: torch.Tensor
    memory: torch.Tensor


def guarded(tensor: torch.Tensor, pattern: int) -> Guarded:
    """Copy `tensor` into memory filled with the byte `pattern`.

    The zones are four times the tensor's extent (4 KiB to 1 MiB), so that a walk with wrong strides lands in them.
    """
    size = tensor.element_size()
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    extent = extent if tensor.numel() else 0
    zone = min(max(4096, 4 * extent * size), 1 << 20) // 64 * 64
    before = zone + tensor.data_ptr() % 64 if tensor.numel() else zone
    memory = torch.empty((before + extent * size + zone) // 64 * 64 + 64, dtype=torch.uint8, device=tensor.device)
    memory.fill_(pattern)
    copy = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), before // size)
    target, source = copy, tensor
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:  # several indices, one element: write it once
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
    return Guarded(copy, memory)


def guard_all(args: tuple[Any, ...], pattern: int) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """`args` with each tensor guarded, and the memories in which they lie."""
    pairs = [guarded(value, pattern) if isinstance(value, torch.Tensor) else value for value in args]
    memories = [pair.memory for pair in pairs if isinstance(pair, Guarded)]
    return tuple(pair.tensor if isinstance(pair, Guarded) else pair for pair in pairs), memories


# --- fresh memory that holds a pattern --------------------------------------------------------------------------------


class FreshMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, uninitialised tensors hold a pattern, and those from `torch.empty` have a guarded tail.

    The mode sees every allocation that goes through PyTorch's dispatcher, from Python or from C++ (at::empty). What
    allocates below it is met where it gets its memory: `filled` also sets glibc's malloc and fills what the CUDA
    caching allocator will hand out.
    """

    TAIL = 4096

    def __init__(self, pattern: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pattern = pattern
        self._tails: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func is aten.empty.memory_format:
            return self._empty(func, args, kwargs)
        result = func(*args, **kwargs)
        if func in (
            aten.empty_strided.default,
            aten.empty_like.default,
            aten.new_empty.default,
            aten.new_empty_strided.default,
        ):
            _fill(result, self.pattern)
        return result

    def _empty(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        (size,) = args
        probe: torch.Tensor = func([0], **{**kwargs, "memory_format": None})
        count = 1
        for n in size:
            count *= n
        ordinary = kwargs.get("memory_format") in (None, torch.contiguous_format)
        if not count or not ordinary or probe.is_meta or probe.layout is not torch.strided:
            result: torch.Tensor = func(size, **kwargs)
            _fill(result, self.pattern)
            return result
        tail = self.TAIL // probe.element_size()
        longer: torch.Tensor = func([count + tail], **{**kwargs, "memory_format": None})
        _fill(longer, self.pattern)
        self._tails.append(longer[count:].view(torch.uint8))
        return longer.as_strided(size, contiguous_stride(tuple(size)))

    def assert_tails_untouched(self) -> None:
        """Assert that nothing was written behind the end of an allocation."""
        for tail in self._tails:
            written = (tail != self.pattern).nonzero()
            if len(written):
                raise AssertionError(
                    f"{len(written)} bytes were written past the end of an allocation, "
                    f"the first {int(written[0])} bytes behind it"
                )


@contextmanager
def filled(pattern: int, device: torch.device) -> Iterator[FreshMemory]:
    """Memory that is allocated in the block holds the byte `pattern` until it is written."""
    if device.type == "cuda":
        _fill_cuda_cache(pattern, device)
    with _malloc_fills(pattern) if device.type == "cpu" else nullcontext(), FreshMemory(pattern) as mode:
        yield mode


def _fill(tensor: torch.Tensor, pattern: int) -> None:
    if tensor.is_meta or tensor.layout is not torch.strided:
        return
    whole(tensor).fill_(pattern)


@contextmanager
def _malloc_fills(pattern: int) -> Iterator[None]:
    """glibc's M_PERTURB fills each allocation with the complement of its value; elsewhere this does nothing."""
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    m_perturb = -6
    libc = ctypes.CDLL(None)
    libc.mallopt(m_perturb, pattern ^ 0xFF)
    try:
        yield
    finally:
        libc.mallopt(m_perturb, 0)


def _fill_cuda_cache(pattern: int, device: torch.device) -> None:
    """Fill free blocks of the caching allocator: of its small pool (up to 1 MiB) and of its large one."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    blocks = [torch.empty(1 << 20, dtype=torch.uint8, device=device) for _ in range(4)]
    blocks += [torch.empty(n << 20, dtype=torch.uint8, device=device) for n in (16, 64)]
    for block in blocks:
        block.fill_(pattern)
    torch.cuda.synchronize(device)


# --- a large and mostly untouched allocation --------------------------------------------------------------------------


def sparse(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat tensor of `count` elements, of which no page has been touched on the CPU. Skip where it cannot be had."""
    size = torch.empty(0, dtype=dtype).element_size()
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if free < 1.2 * count * size:
            raise Skip(f"the probe needs {count * size / 2**30:.0f} GiB of device memory, {free / 2**30:.0f} are free")
        return torch.empty(count, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except (OSError, ValueError, AttributeError) as cause:
        raise Skip(f"{count * size / 2**30:.0f} GiB of addresses cannot be reserved here") from cause
    return torch.frombuffer(pages, dtype=dtype)
