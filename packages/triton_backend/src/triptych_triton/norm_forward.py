# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803, N806, SIM300 (compile-time constants of kernels are in capitals)
"""RMSNorm forward, with or without the addition of a residual before it: host launch, then kernels.

    M rows, N columns; x, residual, y, h [M, N]; weight [N]; rstd [M]
    h = narrow(x + residual), or x;  rstd = 1 / sqrt(mean(h^2) + eps);  y = narrow(h * rstd * (weight + offset))

One kernel holds whole rows in registers. Rows too wide for that are read twice, the second time from the L2 cache.
"""

import torch
import triton
import triton.language as tl

from triptych_triton.launch import launch
from triptych_triton.rounding import accumulator_dtype, bound, narrow, number, widen
from triptych_triton.rows import as_rows, empty_rows
from triptych_triton.tiles import ceil_div, forward_tile


def norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    rounding: str,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """y, h and rstd, freshly allocated and row-major; h is None without a residual."""
    n = x.shape[-1]
    y = empty_rows(x)
    h = None if residual is None else empty_rows(x)
    rstd = _empty_per_row(x)
    rows = rstd.numel()
    if rows == 0:
        return y, h, rstd
    if n == 0:
        return y, h, rstd.fill_(eps**-0.5 if eps > 0 else torch.inf)  # the square of no elements is 0

    x, x_stride = as_rows(x)
    residual_stride = 0
    if residual is not None:
        residual, residual_stride = as_rows(residual)
    if weight is not None:
        weight = weight.contiguous()

    tile = forward_tile(n, rstd.element_size())
    launch(
        _forward_whole_rows if tile.whole_row else _forward_wide_rows,
        (ceil_div(rows, tile.rows),),
        x.device,
        x,
        residual,
        weight,
        y,
        h,
        rstd,
        x_stride,
        residual_stride,
        rows,
        n,
        eps,
        offset,
        NARROW_XHAT=rounding == "before_weight",
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )
    return y, h, rstd


def _empty_per_row(x: torch.Tensor) -> torch.Tensor:
    """rstd, unwritten."""
    leading = x.shape[:-1]
    dtype = accumulator_dtype(x.dtype)
    # Sizes as separate arguments are parsed in a third of the time that a torch.Size takes; none at all is not a call.
    return x.new_empty(*leading, dtype=dtype) if leading else x.new_empty((), dtype=dtype)


# Kernels. Absent tensors arrive as None, a constant, and their code is compiled away. The number of rows is not
# specialised: it varies from call to call and decides no access width. eps and offset are float64 so that float64
# inputs get all of their digits.


@triton.jit(do_not_specialize=["rows"])
def _forward_whole_rows(
    x,
    residual,
    weight,
    y,
    h,
    rstd,
    x_stride,
    residual_stride,
    rows,
    n,
    eps: tl.float64,
    offset: tl.float64,
    NARROW_XHAT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    STORAGE: tl.constexpr = y.dtype.element_ty
    ACC: tl.constexpr = rstd.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < n)[None, :]
    place = (row * n)[:, None] + column[None, :]

    value = widen(tl.load(x + (row * x_stride)[:, None] + column[None, :], mask=inside, other=0.0), ACC)
    if residual is not None:
        added = tl.load(residual + (row * residual_stride)[:, None] + column[None, :], mask=inside, other=0.0)
        stored = narrow(value + widen(added, ACC), STORAGE)
        tl.store(h + place, stored, mask=inside)
        value = widen(stored, ACC)

    # Rows past the end count as ones: with eps = 0 they would divide by zero, of which the interpreter warns.
    squares = tl.where(row < rows, tl.sum(value * value, axis=1), 1.0)
    scale = _reciprocal_root(squares, n, eps, ACC)
    tl.store(rstd + row, scale, mask=row < rows)
    gain = _load_gain(weight, offset, column, column < n, ACC)
    tl.store(y + place, _scaled(value, scale[:, None], gain, NARROW_XHAT, STORAGE, ACC), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _forward_wide_rows(
    x,
    residual,
    weight,
    y,
    h,
    rstd,
    x_stride,
    residual_stride,
    rows,
    n,
    eps: tl.float64,
    offset: tl.float64,
    NARROW_XHAT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tl.static_assert(ROWS == 1)
    STORAGE: tl.constexpr = y.dtype.element_ty
    ACC: tl.constexpr = rstd.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    width = n.to(tl.int64)
    x += row * x_stride
    y += row * n
    if residual is not None:
        residual += row * residual_stride
        h += row * n

    squares = tl.zeros([COLUMNS], dtype=ACC)
    for start in range(0, bound(width), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        value = widen(tl.load(x + column, mask=inside, other=0.0, eviction_policy="evict_last"), ACC)
        if residual is not None:
            added = widen(tl.load(residual + column, mask=inside, other=0.0, eviction_policy="evict_first"), ACC)
            stored = narrow(value + added, STORAGE)
            tl.store(h + column, stored, mask=inside)
            value = widen(stored, ACC)
        squares += value * value
    scale = _reciprocal_root(tl.sum(squares, axis=0), n, eps, ACC)
    tl.store(rstd + row + tl.arange(0, 1), scale)

    # A thread may read back elements of h that another thread of the program wrote.
    tl.debug_barrier()
    again = x if residual is None else h
    for start in range(0, bound(width), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        value = widen(tl.load(again + column, mask=inside, other=0.0, eviction_policy="evict_first"), ACC)
        gain = _load_gain(weight, offset, column, inside, ACC)
        tl.store(y + column, _scaled(value, scale, gain, NARROW_XHAT, STORAGE, ACC), mask=inside)


@triton.jit
def _reciprocal_root(squares, n, eps, ACC: tl.constexpr):
    """1 / sqrt(squares / n + eps), correctly rounded step by step: one value a row, so precision costs nothing."""
    if ACC == tl.float32:
        return tl.div_rn(number(1.0, ACC), tl.sqrt_rn(tl.div_rn(squares, number(n, ACC)) + number(eps, ACC)))
    else:
        return number(1.0, ACC) / tl.sqrt(squares / number(n, ACC) + number(eps, ACC))


@triton.jit
def _load_gain(weight, offset, column, inside, ACC: tl.constexpr):
    """weight + offset at `column`, or 1."""
    if weight is None:
        return number(1.0, ACC)
    else:
        gain = widen(tl.load(weight + column, mask=inside, other=0.0, eviction_policy="evict_last"), ACC)
        return gain + number(offset, ACC)


@triton.jit
def _scaled(value, scale, gain, NARROW_XHAT: tl.constexpr, STORAGE: tl.constexpr, ACC: tl.constexpr):
    xhat = value * scale
    if NARROW_XHAT:
        xhat = widen(narrow(xhat, STORAGE), ACC)
    return narrow(xhat * gain, STORAGE)
