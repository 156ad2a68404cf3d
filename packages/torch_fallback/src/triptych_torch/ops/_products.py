"""Matrix products with one rounding, sums in float32 (float64 for float64) and no shortcut through TF32 or bfloat16.

On CUDA 16-bit operands stay as they are. On the CPU they become float32, where PyTorch's bfloat16 product is not
oneDNN's; its float16 product is slow wherever the processor has no float16 arithmetic.

A compiler that traces through an op (`triptych.inline`) finds a product as one operator: which kernel adds in which
order, and the settings of float32 products, are matters of the moment when it runs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from triptych_torch.ops import _tracing
from triptych_torch.ops._tiles import wide_dtype

Tensor = torch.Tensor

_FEW_RESULTS = 1 << 22
"""Below so many, cuBLAS may split the sums of a 16-bit product between blocks and add the parts in 16 bit; a product
with float32 results adds them in float32."""

_TERMS = 1024
"""How many terms oneDNN's float32 product adds in one order whatever the number of threads. From 2048 on it splits them
between threads where there are few results."""

_FULL = ("none", "ieee")
"""Settings of float32 products that keep float32."""

_lock = threading.Lock()
_inside = {"cuda": 0, "cpu": 0}
"""How many products are being started, by kind of device."""
_before: dict[str, str] = {}
"""The process's setting when the first of them came."""


def operand_dtype(x: Tensor, result: torch.dtype) -> torch.dtype:
    """In which dtype to prepare the operands, made of x, of a product that comes out in `result`."""
    if x.is_cuda or (result is torch.bfloat16 and _has_bfloat16()):
        return x.dtype
    return wide_dtype(x.dtype)


def product(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a @ b + bias, fresh and contiguous, in `dtype`: that of the operands before `operand_dtype`, or the wide one.

    Args:
        a: [M, K].
        b: [K, N].
        dtype: of the result; rounded to once.
        bias: [N], of any dtype.
    """
    if _tracing.traced():
        traced: Tensor = torch.ops.triptych_torch.product(a, b, dtype, bias)
        return traced
    return _product(a, b, dtype, bias)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    if bias is None or (bias.dtype is dtype and _comes_out_in(a, b, dtype)):
        return _matmul(a, b, dtype, bias)
    total = _matmul(a, b, wide_dtype(dtype), None)
    return torch.add(total, bias, out=total if total.dtype is dtype else torch.empty_like(total, dtype=dtype))


_library = torch.library.Library("triptych_torch", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "product(Tensor a, Tensor b, ScalarType dtype, Tensor? bias) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("product", _product, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(
    "triptych_torch::product",
    lambda a, b, dtype, bias: torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device),
    lib=_library,
)


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    if a.numel() == 0 or b.numel() == 0:
        zeros = torch.zeros(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
        return zeros if bias is None else zeros.add_(bias)
    if _comes_out_in(a, b, dtype):
        with _full_float32(a):
            return _plain(a, b) if bias is None else torch.addmm(bias, a, b)
    if a.is_cuda and a.dtype.itemsize == 2:
        return torch.mm(a, b, out_dtype=torch.float32).to(dtype)
    wide = wide_dtype(dtype)
    with _full_float32(a):
        return _plain(a.to(wide), b.to(wide)).to(dtype)


def _comes_out_in(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether the product of a and b as they are has results in `dtype`, rounded once."""
    if a.dtype is not dtype or b.dtype is not dtype:
        return False
    if a.is_cuda and dtype.itemsize == 2:
        return a.shape[0] * b.shape[1] >= _FEW_RESULTS
    return True


# --- float32 --------------------------------------------------------------------------------------------------------


def _plain(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype is not torch.float32 or a.is_cuda or not _has_onednn():
        return torch.mm(a, b)
    # MKL's product, which torch.mm takes, has other bits with another number of threads, even of 8 terms.
    right = b.T
    total = _linear(a[:, :_TERMS], right[:, :_TERMS])
    for start in range(_TERMS, a.shape[1], _TERMS):
        total += _linear(a[:, start : start + _TERMS], right[:, start : start + _TERMS])
    return total


def _linear(a: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(weight), None, "none", [], "")
    return result


def _dense(matrix: Tensor) -> Tensor:
    """`matrix` where rows or columns follow one another without a gap, else a copy.

    oneDNN takes a slice of wider rows too, but as weights in a reference kernel: 640 ms for .3 at 512 x 128 x 384.
    """
    dense = matrix.is_contiguous() or matrix.T.is_contiguous()
    return matrix if dense else matrix.clone(memory_format=torch.contiguous_format)


@functools.cache
def _has_onednn() -> bool:
    """Whether oneDNN can stand in for MKL."""
    mkl, mkldnn = torch.backends.mkl, torch.backends.mkldnn
    return bool(mkl.is_available() and mkldnn.is_available())  # type: ignore[no-untyped-call]


@functools.cache
def _has_bfloat16() -> bool:
    """Whether bfloat16 products on the CPU are oneDNN's."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def _full_float32(a: Tensor) -> Iterator[None]:
    """No TF32 and no bfloat16 inside a float32 product, whatever the process has allowed for its own products.

    The setting is the process's: the first thread inside changes it, and the last one out changes it back.
    """
    if a.dtype.itemsize != 4:
        yield
        return
    device = "cuda" if a.is_cuda else "cpu"
    backends = torch.backends
    setting = backends.cuda.matmul if a.is_cuda else backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _lock:
        if not _inside[device]:
            _before[device] = setting.fp32_precision
            if _before[device] not in _FULL:
                setting.fp32_precision = "ieee"
        _inside[device] += 1
    try:
        yield
    finally:
        with _lock:
            _inside[device] -= 1
            if not _inside[device] and _before[device] not in _FULL:
                setting.fp32_precision = _before[device]
