# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803, SIM108 (compile-time constants of kernels are in capitals)
"""Products of matrices with full accumulators and one rounding: through cuBLAS where it does that, else by a kernel.

    out [M, N] = a [M, K] b [K, N] (+ bias [N]); each operand's rows or columns are dense

cuBLAS accumulates 16-bit products in float32, but when it splits K among programs to fill the device, torch lets it add
their partial results in 16 bits. It has no reason to split where the output alone fills the device; smaller outputs are
asked for in float32 and rounded here. float32 products stay float32: where the process allows TF32, the kernel is used.
"""

import torch
import triton
import triton.language as tl

from triptych_triton.launch import launch
from triptych_triton.rounding import INTERPRETED, accumulator_dtype, bound, narrow, widen
from triptych_triton.tiles import ceil_div

_INTERPRETED = tl.constexpr(INTERPRETED)
_FLOATS = {torch.float32: tl.float32, torch.float64: tl.float64}

# Two waves of the largest blocks of cuBLAS, 128 by 256, on 132 SMs.
_FILLS_THE_DEVICE = 1 << 23


def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """a b + bias, accumulated in float32 (float64 for float64) and rounded once to a's dtype; into `out` if given.

    Args:
        a, b: matrices of one dtype and of any strides.
        bias: a vector, of their dtype or wider.
        out: a matrix whose rows are dense.
    """
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1])
    if out.numel() == 0:
        return out
    if a.shape[1] == 0:
        return out.zero_() if bias is None else out.copy_(bias.expand(out.shape))
    if not a.is_cuda or INTERPRETED or (a.dtype == torch.float32 and not _float32_stays_full()):
        return _by_kernel(_dense(a), _dense(b), bias, out)
    if torch.is_autocast_enabled("cuda"):
        with torch.autocast("cuda", enabled=False):
            return _by_cublas(a, b, bias, out)
    return _by_cublas(a, b, bias, out)


def _by_cublas(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    rounds_once = a.element_size() > 2 or out.numel() >= _FILLS_THE_DEVICE
    if rounds_once and bias is None:
        return torch.mm(a, b, out=out)
    if rounds_once and bias is not None and bias.dtype == a.dtype:
        return torch.addmm(bias, a, b, out=out)
    wide = torch.mm(a, b, out_dtype=torch.float32) if a.element_size() == 2 else torch.mm(a, b)
    return out.copy_(wide if bias is None else wide.add_(bias))


def _float32_stays_full() -> bool:
    """Whether this process has cuBLAS multiply float32 as float32."""
    return torch.backends.cuda.matmul.fp32_precision in ("ieee", "none")


def _dense(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, or a copy of it if neither its rows nor its columns are dense."""
    return matrix if 1 in matrix.stride() else matrix.contiguous()


def _by_kernel(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    a_by_rows, b_by_rows = a.stride(1) == 1, b.stride(1) == 1
    side = 32 if a.dtype == torch.float64 else 64
    rows, columns = out.shape
    launch(
        _multiply,
        (ceil_div(rows, side) * ceil_div(columns, side),),
        a.device,
        a,
        b,
        None if bias is None else bias.contiguous(),
        out,
        rows,
        columns,
        a.shape[1],
        a.stride(0) if a_by_rows else a.stride(1),
        b.stride(0) if b_by_rows else b.stride(1),
        out.stride(0),
        ACC=_FLOATS[accumulator_dtype(a.dtype)],
        A_BY_ROWS=a_by_rows,
        B_BY_ROWS=b_by_rows,
        SIDE=side,
        DEPTH=32,
    )
    return out


@triton.jit(
    do_not_specialize=["rows", "columns", "depth", "a_stride", "b_stride", "out_stride"],
    do_not_specialize_on_alignment=["a", "b", "bias", "out"],
)
def _multiply(
    a,
    b,
    bias,
    out,
    rows,
    columns,
    depth,
    a_stride,
    b_stride,
    out_stride,
    ACC: tl.constexpr,
    A_BY_ROWS: tl.constexpr,
    B_BY_ROWS: tl.constexpr,
    SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    across = (columns + SIDE - 1) // SIDE
    row = (tl.program_id(0) // across).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    column = (tl.program_id(0) % across).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    total = tl.zeros([SIDE, SIDE], dtype=ACC)
    for first in range(0, bound(depth), DEPTH):
        k = first + tl.arange(0, DEPTH).to(tl.int64)
        if A_BY_ROWS:
            a_place = (row * a_stride)[:, None] + k[None, :]
        else:
            a_place = row[:, None] + (k * a_stride)[None, :]
        if B_BY_ROWS:
            b_place = (k * b_stride)[:, None] + column[None, :]
        else:
            b_place = k[:, None] + (column * b_stride)[None, :]
        a_block = tl.load(a + a_place, mask=(row < rows)[:, None] & (k < depth)[None, :], other=0.0)
        b_block = tl.load(b + b_place, mask=(k < depth)[:, None] & (column < columns)[None, :], other=0.0)
        total = multiply_blocks(a_block, b_block, total)
    if bias is not None:
        total += widen(tl.load(bias + column, mask=column < columns, other=0.0), ACC)[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + (row * out_stride)[:, None] + column[None, :], narrow(total, out.dtype.element_ty), mask=inside)


@triton.jit
def multiply_blocks(a, b, total):
    """total + a b in total's type. The interpreter, which holds bfloat16 as bits, multiplies wide."""
    if _INTERPRETED:
        return total + tl.dot(widen(a, total.dtype), widen(b, total.dtype), out_dtype=total.dtype)
    else:
        return tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)
