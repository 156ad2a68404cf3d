"""The op as a PyTorch operator: what torch.library itself can check."""

from __future__ import annotations

from typing import Any

import torch

from triptych.call import BACKWARD, FORWARD
from triptych.testing import grid
from triptych.testing.checks.catalogue import check
from triptych.testing.checks.gradients import differentiable_inputs, leaves_of
from triptych.testing.grid import Case
from triptych.testing.running import backward_arguments, needs_every_phase, ran_only, under
from triptych.testing.subject import Subject


def _opcheck(subject: Subject, case: Case, phase: str, args: tuple[Any, ...]) -> None:
    operator = getattr(torch.ops.triptych, case.spec.operator_name(phase)).default
    with under(subject.backend), ran_only(subject.backend, case.op):
        torch.library.opcheck(operator, (*args, ""))


@check(grid.operator_cases)
def opcheck_forward(subject: Subject, case: Case) -> None:
    """torch.library.opcheck passes on forward: schema, fake, autograd registration, AOT dispatch."""
    needs_every_phase(subject, case)
    _opcheck(subject, case, FORWARD, (*leaves_of(case, differentiable_inputs(case)), *case.scalars))


@check(grid.differentiable(grid.operator_cases))
def opcheck_backward(subject: Subject, case: Case) -> None:
    """torch.library.opcheck passes on backward."""
    needs_every_phase(subject, case)
    _opcheck(subject, case, BACKWARD, backward_arguments(subject, case))
