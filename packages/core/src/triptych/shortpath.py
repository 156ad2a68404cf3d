"""The short path of an op: from plain eager tensors to what was selected for them.

Two functions an op are written from its signature, as dataclasses writes __init__: a loop over the arguments would cost
more than everything that is done to them (6.0 us a call against 3.2). For rms_norm the text reads, shortened:

    def call(layer, x, weight, eps, offset, rounding):
        if is_compiling(): return op.through_operator(layer, x, weight, eps, offset, rounding)
        if type(x) is not Parameter and type(x) is not Tensor: return op.through_operator(...)
        x_grad = grad_enabled() and x.requires_grad
        key = ('rms_norm', layer, eps, offset, rounding, x.shape, x.stride(), x.dtype, x.device, ...)
        plan = (used_scope() or scopes._process or current_scope()).plans.get(key)
        ...
        if x_grad or weight_grad: return apply((plan, index, backward_index, (eps, offset, rounding)), x, weight)
        return plan.run(x, weight, eps, offset, rounding)[0]

    def forward(ctx, selected, x, weight):
        plan, index, _, scalars = ctx.selected = selected
        y, rstd = plan.run(x, weight, *scalars)
        ctx.save_for_backward(x, weight, rstd)
        return y

In the key, a scalar that may vary from call to call (OpSpec.varying) stands as True while it is positive and finite:
whatever value it takes next, the plan is there. Any other value, NaN included, is looked up, and checked, by itself.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.overrides
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from triptych import intercept, remake, scope
from triptych.opspec import OpSpec

if TYPE_CHECKING:
    from triptych.dispatch import Op


def write(op: Op, backward: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The function `call(layer, *tensors, *scalars)` of an op: returns its one differentiable output, or a tuple.

    And `apply((plan, index, backward_index, scalars), *tensors)`, the op's autograd function, which runs a plan.

    Args:
        op: what to do about a signature that has no plan yet, and about everything that is not a plain eager tensor.
        backward: the backward of the op's autograd function.
    """
    name = f"triptych.{op.spec.name}"
    members: dict[str, Any] = {"intercept": intercept, "op": op}
    exec(compile(forward_source(op.spec), f"<forward of {name}>", "exec"), members)
    body = {"forward": staticmethod(members["forward"]), "backward": staticmethod(backward)}
    function: Any = types.new_class(name, (torch.autograd.Function,), exec_body=lambda members: members.update(body))
    namespace: dict[str, Any] = {
        "INFINITY": math.inf,
        "Parameter": Parameter,
        "Tensor": torch.Tensor,
        "apply": function.apply,
        "as_given": torch._C._DisableAutocast,
        "autocasting": torch._C._is_any_autocast_enabled,
        "current_scope": scope.current,
        "dispatch_modes": torch._C._len_torch_dispatch_stack,
        "function_modes": torch._C._len_torch_function_stack,
        "forward_ad": torch.autograd.forward_ad,
        "functorch": torch._C._functorch.peek_interpreter_stack,
        "grad_enabled": torch.is_grad_enabled,
        "intercept": intercept,
        # Tracing without dynamo has fake tensors, which are a type of their own.
        "is_compiling": torch.compiler.is_dynamo_compiling,
        "no_grad": torch.no_grad,
        "observed": _observed,
        "op": op,
        "scopes": scope,
        "tracing": torch._C._get_tracing_state,
        "used_scope": scope.used,
    }
    exec(compile(call_source(op.spec), f"<call of {name}>", "exec"), namespace)
    call: Callable[..., Any] = namespace["call"]
    return call, function.apply


def _observed() -> bool:
    """Whether a function mode would miss the call. torch.set_default_device is one, and has no interest in it."""
    stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(type(mode) is not DeviceContext for mode in stack)


def kept(spec: OpSpec) -> str:
    """The subscript that takes from all outputs of forward those that the caller gets."""
    count = spec.visible
    return "[0]" if count == 1 else f"[:{count}]"


def forward_source(spec: OpSpec) -> str:
    """The text of `forward`, of the op's autograd function."""
    tensors = ", ".join(spec.forward.tensor_names)
    remade = ["    makers, sources = [], []"] if spec.remade else []
    for name in spec.remade:
        remade += [
            f"    recipe = getattr({name}, {remake.ATTRIBUTE!r}, None)",
            "    makers.append(None if recipe is None else recipe.maker)",
            f"    if recipe is not None: {name} = None; sources += recipe.sources",
        ]
    remade += ["    ctx.makers = tuple(makers)"] if spec.remade else []
    lines = [
        f"def forward(ctx, selected, {tensors}):",
        "    plan, index, _, scalars = ctx.selected = selected",
        "    plan.count()",
        "    if intercept.active:",
        f"        outputs = op.intercepted(plan.forward, index, ({tensors}, *scalars))",
        "    else:",
        f"        outputs = plan.run({tensors}, *scalars)",
        f"    {', '.join(spec.forward.outputs)}, = outputs",
        *remade,
        f"    ctx.save_for_backward({', '.join(spec.saved)}{', *sources' if remade else ''})",
        f"    ctx.mark_non_differentiable({', '.join(spec.returned)})" if spec.returned else "",
        # With one output, backward never runs without its gradient.
        "    ctx.set_materialize_grads(False)" if spec.visible > 1 else "",
        f"    return outputs{kept(spec)}",
    ]
    return "\n".join(lines) + "\n"


def call_source(spec: OpSpec) -> str:
    """The text of `call` for an op."""
    tensors = spec.forward.tensor_names
    optional = {name.removesuffix("?") for name in spec.forward.tensors if name.endswith("?")}
    scalars = spec.forward.scalar_names
    arguments = ", ".join((*tensors, *scalars))
    elsewhere = f"return op.through_operator(layer, {arguments})"
    lines = [f"def call(layer, {arguments}):", f"    if is_compiling(): {elsewhere}"]
    for name in tensors:
        absent = f"{name} is not None and " if name in optional else ""
        lines.append(f"    if {absent}type({name}) is not Parameter and type({name}) is not Tensor: {elsewhere}")
    # Whoever observes the dispatcher must see the operator: modes, functorch, torch.jit.trace, forward-mode AD.
    lines += [
        "    if dispatch_modes() or functorch() is not None or tracing() is not None "
        "or forward_ad._current_level >= 0:",
        f"        {elsewhere}",
        f"    if function_modes() and observed(): {elsewhere}",
        # An implementation in PyTorch's own operations would find its operands in another dtype.
        "    if autocasting():",
        f"        with as_given(): return call(layer, {arguments})",
    ]
    lines += ["    grad = grad_enabled()"]
    parts = [f"{spec.name!r}", "layer"]
    parts += [f"(0.0 < {name} < INFINITY) or {name}" if name in spec.varying else name for name in scalars]
    for name in tensors:
        metadata = (
            f"{name}.shape, {name}.is_contiguous() or {name}.stride(), {name}.dtype, {name}.device, "
            f"{name}.data_ptr() & 15"
        )
        if name in optional:
            lines.append(f"    {name}_grad = grad and {name} is not None and {name}.requires_grad")
            parts.append(f"None if {name} is None else ({metadata}, {name}_grad)")
        else:
            lines.append(f"    {name}_grad = grad and {name}.requires_grad")
            parts += [metadata, f"{name}_grad"]
    needs_grad = " or ".join(f"{name}_grad" for name in tensors)
    meta = " or ".join(
        f"{name} is not None and {name}.is_meta" if name in optional else f"{name}.is_meta" for name in tensors
    )
    if spec.backward is None:  # an implementation in PyTorch's own operations must leave no graph behind
        lines += [f"    if {needs_grad}:", f"        with no_grad(): return call(layer, {arguments})"]
    lines += [
        "    try:",
        f"        key = ({', '.join(parts)})",
        "        scope = used_scope() or scopes._process or current_scope()",
        "        plan = scope.plans.get(key)",
        "    except (TypeError, RuntimeError):",  # a scalar that has no hash, a tensor that has no strides
        f"        op.check(({arguments}))",
        "        raise",
        f"    if plan is None and ({meta}): {elsewhere}",
        "    index = op.next_forward()",
    ]
    if spec.backward is not None:
        lines += [
            f"    if {needs_grad}:",
            "        backward_index = op.next_backward()",
            f"        if plan is None: plan = op.plan(scope, key, layer, ({arguments}), index, backward_index)",
            f"        return apply((plan, index, backward_index, ({''.join(f'{name}, ' for name in scalars)})), "
            f"{', '.join(tensors)})",
        ]
    lines += [
        f"    if plan is None: plan = op.plan(scope, key, layer, ({arguments}), index, -1)",
        "    plan.count()",
        f"    if intercept.active: return op.intercepted(plan.forward, index, ({arguments})){kept(spec)}",
        f"    return plan.run({arguments}){kept(spec)}",
    ]
    return "\n".join(lines) + "\n"
