"""Each op as real PyTorch operators: `torch.ops.triptych.<op>` and `torch.ops.triptych.<op>_backward`.

The operator is opaque to tracers: it has a schema, a fake kernel and an autograd formula, and selects its backend when
it runs, so that a policy switch needs no recompile. The forward operator returns everything that forward computes
(rms_norm: y and rstd); the public functions return only what is differentiable.

In eager mode backward selects under the policy that was in force in forward. In a compiled or exported graph only
operator outputs pass from forward to backward; there backward follows the policy that is in force when it runs.

torch.func differentiates no operator whose derivative is written in Python. Under its transforms a phase is therefore
an autograd function around the operator, with the same derivative and a rule for vmap.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from triptych import batching, scope
from triptych.call import BACKWARD, FORWARD
from triptych.errors import DerivativeError, forward_mode_text, second_derivative_text
from triptych.opspec import OpSpec, Tensors
from triptych.sharding import arrival

if TYPE_CHECKING:
    from triptych.dispatch import Op

_library = torch.library.Library("triptych", "FRAGMENT")  # type: ignore[no-untyped-call]
_functions: dict[str, type[torch.autograd.Function]] = {}
"""By operator, what stands for it under the transforms of torch.func."""


def define(op: Op) -> None:
    """Define the operators of `op`."""
    for phase in op.spec.phases:
        _define_phase(op, phase)
        _define_vmap(op.spec, phase)
    if op.spec.backward is None:
        _define_no_gradient(op.spec)
    else:
        _define_autograd(op)
    arrival.define(op.spec)


def run(spec: OpSpec, phase: str, args: tuple[Any, ...], layer: str) -> Tensors:
    """A phase as its operator; all its outputs."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return _tuple(_functions[spec.operator_name(phase)].apply(*args, layer))  # type: ignore[no-untyped-call]
    return _run_bare(spec, phase, args, layer)


def _run_bare(spec: OpSpec, phase: str, args: tuple[Any, ...], layer: str) -> Tensors:
    return _tuple(getattr(torch.ops.triptych, spec.operator_name(phase)).default(*args, layer))


def _tuple(outputs: Any) -> Tensors:
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def _alone(outputs: Tensors) -> Any:
    """What an operator returns: torch takes a schema with one output to return a tensor, not a tuple of one."""
    return outputs[0] if len(outputs) == 1 else outputs


def _define_phase(op: Op, phase: str) -> None:
    spec = op.spec
    name = spec.operator_name(phase)
    fake = spec.phase(phase).fake

    def body(*args: Any) -> Any:
        return _alone(op.run_phase(args[-1], phase, args[:-1]))

    def empty(*args: Any) -> Any:
        spec.check_of(phase)(*args[:-1])
        return _alone(fake(*args[:-1]))

    schema = f"{name}{spec.phase(phase).schema()}"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(name, body, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"triptych::{name}", empty, lib=_library)


def _define_vmap(spec: OpSpec, phase: str) -> None:
    rule = _vmap_rule(spec, phase, _run_bare)
    torch.library.register_vmap(f"triptych::{spec.operator_name(phase)}", rule, lib=_library)


def _vmap_rule(spec: OpSpec, phase: str, run: Callable[..., Tensors]) -> Callable[..., Any]:
    def single(*args: Any) -> Tensors:
        return run(spec, phase, args[:-1], args[-1])

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        outputs, dims = batching.one_by_one(spec.operator_name(phase), info, in_dims, args, single)
        return (outputs[0], dims[0]) if len(outputs) == 1 else (outputs, dims)

    return rule


def _register_derivative(spec: OpSpec, phase: str, setup_context: Any, backward: Any) -> None:
    """Give a phase its derivative: as an operator, and as the function that stands for it under torch.func."""
    name = spec.operator_name(phase)
    torch.library.register_autograd(f"triptych::{name}", backward, setup_context=setup_context, lib=_library)

    def forward(*args: Any) -> Any:
        return _alone(run(spec, phase, args[:-1], args[-1]))

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise DerivativeError(forward_mode_text(name))

    members = {
        "forward": forward,
        "setup_context": setup_context or (lambda ctx, inputs, output: None),
        "backward": backward,
        "vmap": _vmap_rule(spec, phase, run),
        "jvp": jvp,
    }
    body = {key: staticmethod(function) for key, function in members.items()}
    bases = (torch.autograd.Function,)
    _functions[name] = types.new_class(f"triptych.{name}", bases, exec_body=lambda members: members.update(body))


def _define_autograd(op: Op) -> None:
    spec = op.spec
    names = spec.forward.tensor_names
    count, kept = len(names), len(spec.differentiable)
    assert spec.backward is not None
    optional = tuple(name.endswith("?") for name in spec.backward.tensors[:kept])

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        output = (output,) if len(spec.forward.outputs) == 1 else output
        *args, ctx.layer = inputs
        ctx.scalars = tuple(args[count:])
        values = dict(zip(names + spec.forward.outputs, (*args[:count], *output), strict=True))
        ctx.save_for_backward(*(values[name] for name in spec.saved))
        ctx.mark_non_differentiable(*output[kept:])
        ctx.set_materialize_grads(False)
        # Eager autograd runs backward on threads of its own, often after the block of forward's policy has ended.
        ctx.scope = None if torch.compiler.is_compiling() else scope.current()
        ctx.likes = tuple((out.shape, out.dtype, out.device) for out in output[:kept])

    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        wants = dict(zip(names, ctx.needs_input_grad[:count], strict=True))
        needs = spec.wanted(wants)
        given = [
            grad if grad is not None or allowed else torch.zeros(shape, dtype=dtype, device=device)
            for grad, allowed, (shape, dtype, device) in zip(grads[:kept], optional, ctx.likes, strict=True)
        ]
        with contextlib.nullcontext() if ctx.scope is None else scope.within(ctx.scope):
            results = run(spec, BACKWARD, (*given, *ctx.saved_tensors, *ctx.scalars, *needs), ctx.layer)
        by_input: dict[str, torch.Tensor | None] = dict.fromkeys(names)
        for result, inputs, need in zip(results, spec.gradients, needs, strict=True):
            for name in inputs:
                if need and wants[name]:
                    by_input[name] = result
        return (*by_input.values(), *((None,) * len(spec.forward.scalars)), None)

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise DerivativeError(second_derivative_text(spec.name))

    _register_derivative(spec, FORWARD, setup_context, backward)
    _register_derivative(spec, BACKWARD, None, refuse)


def _define_no_gradient(spec: OpSpec) -> None:
    """Let the outputs of an op without backward carry no gradient, whatever its inputs do."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(*((output,) if len(spec.forward.outputs) == 1 else output))

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise AssertionError(f"{spec.name} has no backward")

    _register_derivative(spec, FORWARD, setup_context, refuse)
