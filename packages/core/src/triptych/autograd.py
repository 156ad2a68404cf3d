"""The backward of an op on the short path: runs what the plan says.

It was selected in forward: backward runs on autograd's own threads, where no `use` block is visible, and often after
the block has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _functorch as functorch

from triptych import intercept, operator, scope
from triptych.call import BACKWARD
from triptych.errors import DerivativeError, second_derivative_text
from triptych.opspec import OpSpec, Tensors
from triptych.remake import made_again

if TYPE_CHECKING:
    from triptych.dispatch import Op, Plan


def backward_of(op: Op) -> Callable[..., Any]:
    """The backward of the autograd function whose inputs are the op's tensors, behind what was selected for them."""
    spec = op.spec
    kept = len(spec.differentiable)
    cut = bool(spec.returned)
    several = spec.visible > 1  # with one output, backward never runs without its gradient
    optional = () if spec.backward is None else tuple(name.endswith("?") for name in spec.backward.tensors[:kept])
    remade = tuple(spec.saved.index(name) for name in spec.remade)

    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():
                return backward(ctx, *grads)
        plan, _, index, scalars = ctx.selected
        if cut:
            grads = grads[:kept]
        if several:
            grads = tuple(
                torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
                if grad is None and not may_be_none
                else grad
                for grad, may_be_none, meta in zip(grads, optional, plan.grad_metas, strict=True)
            )
        saved = made_again(ctx.saved_tensors, remade, ctx.makers, len(spec.saved)) if remade else ctx.saved_tensors
        args = (*grads, *saved, *scalars, *plan.needs)
        if any(map(_is_batch, grads)):
            results = _backward_of_batch(spec, plan, args)
        elif torch.is_grad_enabled():
            with torch.no_grad():
                results = _backward(op, plan, index, args)
            tied = (*results, *grads, *saved)
            results = NoSecondDerivative.apply(spec.name, len(results), *tied)  # type: ignore[no-untyped-call]
        else:
            results = _backward(op, plan, index, args)
        return (None, *[None if i is None else results[i] for i in plan.results])

    return backward


def _backward(op: Op, plan: Plan, index: int, args: tuple[Any, ...]) -> Tensors:
    assert plan.backward is not None and plan.backward_run is not None and plan.backward_count is not None
    plan.backward_count()
    if intercept.active:
        return op.intercepted(plan.backward, index, args)
    outputs: Tensors = plan.backward_run(*args)
    return outputs


def _backward_of_batch(spec: OpSpec, plan: Plan, args: tuple[Any, ...]) -> Tensors:
    """As its operator, which torch knows how to run on a batch of gradients, on the backend that was selected."""
    assert plan.backward is not None
    rules = f"{spec.name}.backward={plan.backward.chosen}"
    with scope.within(scope.current().extended(rules, "the selection of forward")):
        return operator.run(spec, BACKWARD, args, plan.backward.layer)


def _is_batch(grad: torch.Tensor | None) -> bool:
    """Whether a gradient is many: torch.func.vmap or is_grads_batched is around backward."""
    return grad is not None and (
        functorch.peek_interpreter_stack() is not None or functorch.is_legacy_batchedtensor(grad)
    )


class NoSecondDerivative(torch.autograd.Function):
    """Ties gradients to what they were computed from, so that differentiating them raises instead of giving zeros."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: torch.Tensor) -> Tensors:
        ctx.name = name
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise DerivativeError(second_derivative_text(ctx.name))
