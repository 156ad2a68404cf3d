# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals)
"""RMSNorm backward, with or without the gradient of a residual stream: host launch, then kernels.

    M rows, N columns; dy, dh, x, dx [M, N]; weight, dw [N]; rstd, dot [M]; partial [P, N]
    xhat = x * rstd;  wdy = dy * (weight + offset);  dot = mean(wdy * xhat)
    dx = narrow(rstd * (wdy - xhat * dot) + dh);  dw = narrow(sum over rows of dy * xhat)

dw is deterministic: each of P programs adds up the rows it walks over in a fixed order, in the accumulation type, and
a last kernel adds the P partial sums. P depends on the device and not on the number of rows, and so does the
workspace. One kernel does all of this with whole rows in registers. Rows too wide for that need `dot` first; then
each program takes a range of columns, whose part of dw fits its registers at any N.
"""

import torch
import triton
import triton.language as tl

from triptych_triton.launch import Limits, launch, limits
from triptych_triton.rounding import bound, keep_packed, narrow, number, widen
from triptych_triton.rows import as_rows, empty_rows
from triptych_triton.tiles import Walk, backward_walk, ceil_div, forward_tile

# Up to this many blocks of rows, one program that walks over them all takes less time than launching a second kernel
# to add partial sums (about 1 us a block against 12 us of host time).
_BLOCKS_WITHOUT_PARTIALS = 4

# The block of the kernel that adds partial sums: columns of half a cache line, so that even N = 1024 has 64 programs.
_SUM_ROWS = 256
_SUM_COLUMNS = 16

# Shared memory for reductions beside the blocks that are fetched ahead.
_OTHER_SHARED = 4096


def norm_backward(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    rounding: str,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dw, freshly allocated; one that is not needed, and dw without a weight, is empty."""
    n = x.shape[-1]
    rows = rstd.numel()
    need_dw = need_dw and weight is not None
    dx = empty_rows(x) if need_dx else x.new_empty(0)
    dw = (x if weight is None else weight).new_empty(n if need_dw else 0)
    if not (need_dx or need_dw) or n == 0:
        return dx, dw
    if rows == 0:
        return dx, dw.zero_()

    dy, dy_stride = as_rows(dy)
    x, x_stride = as_rows(x)
    dh_stride = 0
    if dh is not None:
        dh, dh_stride = as_rows(dh)
    rstd = rstd.contiguous()
    if weight is not None:
        weight = weight.contiguous()

    device = x.device
    walk = backward_walk(n, rstd.element_size())
    row_blocks = ceil_div(rows, walk.rows)
    column_blocks = ceil_div(n, walk.columns)
    walkers = min(row_blocks, ceil_div(limits(device).multiprocessors * walk.programs_per_sm, column_blocks))
    if need_dw and row_blocks <= _BLOCKS_WITHOUT_PARTIALS:
        walkers = 1
    partial = None
    if need_dw:
        partial = dw if walkers == 1 else x.new_empty(walkers, n, dtype=rstd.dtype)
    dot = None
    if need_dx and not walk.whole_row:
        dot = _row_dots(dy, dy_stride, x, x_stride, weight, rstd, rows, n, offset)

    launch(
        _walk_rows,
        (column_blocks, walkers),
        device,
        dy,
        dh,
        x,
        weight,
        rstd,
        dot,
        dx if need_dx else None,
        partial,
        dy_stride,
        dh_stride,
        x_stride,
        rows,
        n,
        offset,
        NARROW_XHAT=rounding == "before_weight",
        ROWS=walk.rows,
        COLUMNS=walk.columns,
        STAGES=_stages(walk, x.element_size() * (2 if dh is None else 3), limits(device)),
        num_warps=walk.warps,
    )
    if partial is not None and partial is not dw:
        launch(
            _add_partials,
            (ceil_div(n, _SUM_COLUMNS),),
            device,
            partial,
            dw,
            walkers,
            n,
            ROWS=_SUM_ROWS,
            COLUMNS=_SUM_COLUMNS,
            num_warps=8,
        )
    return dx, dw


def _row_dots(
    dy: torch.Tensor,
    dy_stride: int,
    x: torch.Tensor,
    x_stride: int,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    rows: int,
    n: int,
    offset: float,
) -> torch.Tensor:
    """mean(wdy * xhat) of each row, for rows that no program holds."""
    dot = torch.empty_like(rstd)
    tile = forward_tile(n, rstd.element_size())
    arguments = (dy, x, weight, rstd, dot, dy_stride, x_stride, n, offset)
    launch(_dot_along_rows, (rows,), x.device, *arguments, COLUMNS=tile.columns, num_warps=tile.warps)
    return dot


def _stages(walk: Walk, bytes_per_element: int, device: Limits) -> int:
    """Blocks in work at a time, the one in registers included, as Triton counts stages.

    A device with little shared memory fetches fewer ahead, or none; it is not refused.
    """
    room = device.shared_bytes // walk.programs_per_sm - _OTHER_SHARED
    blocks = room // (walk.rows * walk.columns * bytes_per_element)
    return 1 + max(0, min(walk.fetched_ahead, blocks))


# Kernels. Absent tensors arrive as None, a constant, and their code is compiled away. Counts of rows and programs are
# not specialised: they vary from call to call and decide no access width.


@triton.jit(do_not_specialize=["rows"])
def _walk_rows(
    dy,
    dh,
    x,
    weight,
    rstd,
    dot,
    dx,
    partial,
    dy_stride,
    dh_stride,
    x_stride,
    rows,
    n,
    offset: tl.float64,
    NARROW_XHAT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx of every row that this program walks over, in its range of columns, and the rows' sum of dy * xhat."""
    STORAGE: tl.constexpr = x.dtype.element_ty
    ACC: tl.constexpr = rstd.dtype.element_ty
    # Rows of fewer columns lie across threads, so that adding them up costs shuffles: then it is done once, last.
    SUM_ROWS_LAST: tl.constexpr = COLUMNS < 1024

    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = column < n
    gain = number(1.0, ACC)
    if weight is not None:
        gain = widen(tl.load(weight + column, mask=in_row, other=0.0), ACC) + number(offset, ACC)
    dw = tl.zeros([ROWS if SUM_ROWS_LAST else 1, COLUMNS], dtype=ACC)

    walker = tl.program_id(1).to(tl.int64)
    walkers = tl.num_programs(1)
    for first in tl.range(bound(walker * ROWS), bound(rows), bound(walkers * ROWS), num_stages=STAGES):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        in_rows = row < rows
        inside = in_rows[:, None] & in_row[None, :]
        scale = tl.load(rstd + row, mask=in_rows, other=0.0)[:, None]
        dy_block = tl.load(dy + (row * dy_stride)[:, None] + column[None, :], mask=inside, other=0.0)
        x_block = tl.load(x + (row * x_stride)[:, None] + column[None, :], mask=inside, other=0.0)
        if dx is not None:
            if dot is None:
                products = widen(dy_block, ACC) * gain * (widen(x_block, ACC) * scale)
                along = (tl.sum(products, axis=1) / number(n, ACC))[:, None]
                if COLUMNS >= 1024:  # where a thread has several elements
                    dy_block = keep_packed(dy_block)
                    x_block = keep_packed(x_block)
            else:
                along = tl.load(dot + row, mask=in_rows, other=0.0)[:, None]
        xhat = widen(x_block, ACC) * scale
        dy_wide = widen(dy_block, ACC)
        if dx is not None:
            gradient = scale * (dy_wide * gain - xhat * along)
            if dh is not None:
                dh_block = tl.load(dh + (row * dh_stride)[:, None] + column[None, :], mask=inside, other=0.0)
                gradient += widen(dh_block, ACC)
            tl.store(dx + (row * n)[:, None] + column[None, :], narrow(gradient, STORAGE), mask=inside)
        if partial is not None:
            if NARROW_XHAT:
                xhat = widen(narrow(xhat, STORAGE), ACC)
            if SUM_ROWS_LAST:
                dw += dy_wide * xhat
            else:
                dw += tl.sum(dy_wide * xhat, axis=0, keep_dims=True)
    if partial is not None:
        total = tl.sum(dw, axis=0)
        tl.store(partial + walker * n + column, narrow(total, partial.dtype.element_ty), mask=in_row)


@triton.jit
def _dot_along_rows(dy, x, weight, rstd, dot, dy_stride, x_stride, n, offset: tl.float64, COLUMNS: tl.constexpr):
    """mean(wdy * xhat) of one row."""
    ACC: tl.constexpr = rstd.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    width = n.to(tl.int64)
    dy += row * dy_stride
    x += row * x_stride
    products = tl.zeros([COLUMNS], dtype=ACC)
    for start in range(0, bound(width), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        wdy = widen(tl.load(dy + column, mask=inside, other=0.0), ACC)
        if weight is not None:
            wdy *= widen(tl.load(weight + column, mask=inside, other=0.0), ACC) + number(offset, ACC)
        products += wdy * widen(tl.load(x + column, mask=inside, other=0.0), ACC)
    here = row + tl.arange(0, 1)
    mean = tl.sum(products, axis=0) / number(n, ACC)
    tl.store(dot + here, mean * tl.load(rstd + here))


@triton.jit(do_not_specialize=["count"])
def _add_partials(partial, dw, count, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """dw from `count` partial sums, in a fixed order."""
    ACC: tl.constexpr = partial.dtype.element_ty
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = column < n
    total = tl.zeros([ROWS, COLUMNS], dtype=ACC)
    for first in range(0, bound(count), ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < count)[:, None] & in_row[None, :]
        total += tl.load(partial + (row * n)[:, None] + column[None, :], mask=inside, other=0.0)
    tl.store(dw + column, narrow(tl.sum(total, axis=0), dw.dtype.element_ty), mask=in_row)
