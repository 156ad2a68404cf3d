"""What is done otherwise while a compiler traces through an op (`triptych.inline`), which then makes its own kernels.

In eager mode, and inside an opaque operator of a compiled graph, none of it applies.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

traced = torch.compiler.is_compiling
"""Whether a compiler is tracing."""


def operand(x: Tensor) -> Tensor:
    """`x` as an operand of something that is written into a fresh tensor, `out=torch.empty(...)`.

    A tracer makes that a result of its own, laid out as the operands are, and goes on as if it were the fresh tensor.
    """
    return x.contiguous() if traced() else x


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What `dtype` keeps of the values, in their own."""
    narrow = values.to(dtype)
    if dtype.itemsize == 2 and traced():
        # Inductor computes in float32 and leaves out a cast to 16 bits and back, and a view of the bits and back. An
        # operation on the bits, which changes none of them, it keeps.
        narrow = narrow.view(torch.int16).bitwise_and(-1).view(dtype)
    return narrow.to(values.dtype)
