"""torch.autocast changes nothing of what an op computes: neither dtypes nor bits, forward or backward, on any path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from triptych import operator, registry
from triptych.call import FORWARD
from triptych.testing import grid
from triptych.testing.assertions import assert_same_bits
from triptych.testing.running import ran, under

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def results(case: grid.Case, path: str) -> tuple[torch.Tensor, ...]:
    """Outputs and gradients of a case, through the short path or the operator."""
    spec = case.spec
    leaves = [
        None if tensor is None else tensor.requires_grad_(spec.backward is not None and tensor.is_floating_point())
        for tensor in case.tensors()
    ]
    if path == "short path":
        outputs = case.live.call("", *leaves, *case.scalars)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    else:
        outputs = operator.run(spec, FORWARD, (*leaves, *case.scalars), "")
    carrying = outputs[: len(spec.differentiable)]
    inputs = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found: tuple[Any, ...] = ()
    if carrying:
        wanted = [torch.full_like(output, 0.5) for output in carrying]
        found = torch.autograd.grad(carrying, inputs, wanted, allow_unused=True)
    return (*(output.detach() for output in outputs), *(each for each in found if each is not None))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["composite", "torch"])
@pytest.mark.parametrize("path", ["short path", "operator"])
@pytest.mark.parametrize("op", registry.ops.names())
def test_autocast_does_not_reach_an_implementation(op: str, path: str, backend: str, device: str) -> None:
    for dtype in grid.FLOOR_DTYPES:
        case = grid.Case(op, grid.stand_in(op), dtype, device)
        calls = {(op, phase, backend): 2 for phase in case.spec.phases}
        other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
        with under(backend), ran(calls):
            plain = results(case, path)
            with torch.autocast(device, dtype=other):
                cast = results(case, path)
        assert_same_bits([f"result {place}" for place in range(len(plain))], cast, plain, "under autocast and without")


def test_what_is_around_an_op_is_still_cast() -> None:
    case = grid.Case("rms_norm", grid.stand_in("rms_norm"), torch.float32, "cpu")
    with under("composite"), torch.autocast("cpu", dtype=torch.bfloat16):
        results(case, "short path")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
