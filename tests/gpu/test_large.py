"""Tensors past 2^31 elements: the last rows are as right as the first (M1)."""

from __future__ import annotations

import pytest
import torch

import triptych
from triptych import registry
from triptych.testing import ran

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

COLUMNS = 4096
ROWS = 2**31 // COLUMNS + 1000
ENDS = (slice(0, 3), slice(ROWS // 2, ROWS // 2 + 3), slice(ROWS - 3, ROWS))


@pytest.mark.parametrize("backend", ["cuda", "triton", "torch"])
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_rows_past_two_to_the_31_elements(backend: str, op: str) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 60 * 2**30:
        pytest.skip(f"needs 60 GiB of free device memory, {free / 2**30:.0f} GiB are free")
    torch.manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(COLUMNS, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > 2**31
    spec = registry.ops.get(op)
    tensors = (x, weight) if op == "rms_norm" else (x, x, weight)
    scalars = (1e-6, 0.0, "after_weight")
    with triptych.use(backend), ran({(op, phase, backend): 1 for phase in ("forward", "backward")}):
        outputs = getattr(torch.ops.triptych, op)(*tensors, *scalars, "")
        rstd = outputs[-1]
        gradients = (x,) if op == "rms_norm" else (x, x)
        saved = outputs[1] if op == "add_rms_norm" else x
        operator = getattr(torch.ops.triptych, f"{op}_backward")
        dx, _ = operator(*gradients, saved, weight, rstd, *scalars, True, True, "")
    for rows in ENDS:
        part = tuple(tensor if tensor is weight else tensor[rows] for tensor in tensors)
        reference = spec.forward.reference(*part, *scalars)
        bounds = spec.forward.bound(*part, *scalars)
        for name, output, expected, bound in zip(spec.forward.outputs, outputs, reference, bounds, strict=True):
            assert bool(((output[rows].double() - expected).abs() <= bound).all()), (name, rows)
        assert spec.backward is not None
        back = (*(x[rows] for _ in gradients), saved[rows], weight, rstd[rows], *scalars, True, False)
        expected, bound = spec.backward.reference(*back)[0], spec.backward.bound(*back)[0]
        assert bool(((dx[rows].double() - expected).abs() <= bound).all()), ("dx", rows)
