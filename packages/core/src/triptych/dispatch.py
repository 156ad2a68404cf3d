"""From a function call to a kernel.

Plain eager tensors take the short path: one look-up of what was selected for this call signature under the policy in
force, then the kernels inside a bare autograd function. Everything else (compile, export, fake and meta tensors,
tensor subclasses, functorch, dispatch modes) goes through the operator `torch.ops.triptych.<op>`; see operator.py.
Both paths select with the same function and end in the same two lines.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter

from triptych import intercept, registry, scope
from triptych.call import BACKWARD, FORWARD, Call, TensorMeta
from triptych.counters import Counter
from triptych.errors import ArgumentError
from triptych.opspec import OpSpec, PhaseFunction, Tensors
from triptych.select import Decision, select

_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_functorch: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_grad_enabled = torch.is_grad_enabled
_Tensor = torch.Tensor


class Plan:
    """What was selected for one call signature under one policy, ready to run."""

    __slots__ = ("backward", "backward_count", "backward_run", "count", "forward", "grad_metas", "run", "scalars")

    def __init__(
        self,
        forward: Decision,
        count: Counter,
        backward: Decision | None,
        backward_count: Counter | None,
        scalars: tuple[Any, ...],
        grad_metas: tuple[TensorMeta, ...],
    ) -> None:
        self.forward = forward
        self.run: PhaseFunction = forward.function
        self.count = count
        self.backward = backward
        self.backward_run = None if backward is None else backward.function
        self.backward_count = backward_count
        self.scalars = scalars
        self.grad_metas = grad_metas


class Op:
    """An op as a callable: `op(layer, *tensors, *scalars)` returns its differentiable outputs."""

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec
        self._tensor_count = len(spec.forward.tensors)
        self._kept = len(spec.differentiable) or len(spec.forward.outputs)
        self._next_index = {phase: itertools.count().__next__ for phase in spec.phases}
        self._counts: dict[tuple[str, str], Counter] = {}
        self._lock = threading.Lock()
        self._autograd = _autograd_function(self)
        os.register_at_fork(after_in_child=self._after_fork)

    def __call__(self, layer: str, *args: Any) -> Tensors:
        if torch.compiler.is_compiling():
            return self._through_operator(layer, args)
        grad = _grad_enabled()
        needs_grad = False
        parts: list[Any] = [layer, self, args[self._tensor_count :]]
        for tensor in args[: self._tensor_count]:
            if tensor is None:
                parts.append(None)
                continue
            kind = type(tensor)
            if kind is not _Tensor and kind is not Parameter:
                return self._through_operator(layer, args)
            requires = grad and tensor.requires_grad
            needs_grad = needs_grad or requires
            parts += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, requires)
        if _dispatch_modes() or _function_modes() or _functorch() is not None:
            return self._through_operator(layer, args)
        for tensor in args[: self._tensor_count]:
            if tensor is not None:
                parts.append(tensor.data_ptr() & 15)
        key = tuple(parts)
        now = scope.current()
        plan = now.plans.get(key)
        if plan is None and any(tensor is not None and tensor.is_meta for tensor in args[: self._tensor_count]):
            return self._through_operator(layer, args)
        index = self._next_index[FORWARD]()
        backward_index = self._next_index[BACKWARD]() if needs_grad else -1
        if plan is None:
            plan = self._plan(now, key, layer, args, index, backward_index)
        if needs_grad:
            outputs: Tensors = self._autograd.apply(plan, index, backward_index, *args)
            return outputs
        return self._run(plan.forward, plan.run, plan.count, index, args)[: self._kept]

    def run_phase(self, layer: str, phase: str, args: tuple[Any, ...]) -> Tensors:
        """One phase alone, selected by the policy in force now: the body of the operators."""
        now = scope.current()
        index = self._next_index[phase]()
        rule = now.policy.rule_for(self.spec.name, phase, layer, index, scope.rank())
        key = (self, phase, layer, id(rule), *map(_signature, args))
        found = now.plans.get(key)
        if found is None:
            if phase == FORWARD:
                self.spec.check(*args)
            call = _call(self.spec, phase, tuple(map(_meta, args)))
            decision = select(call, layer, rule, registry.backends.names(), registry.backends.get)
            found = (decision, self.count(phase, decision.chosen))
            now.remember(key, found)
        decision, count = found
        return self._run(decision, decision.function, count, index, args)

    def count(self, phase: str, backend: str) -> Counter:
        """The counter of one phase on one backend."""
        with self._lock:
            return self._counts.setdefault((phase, backend), Counter())

    def counts(self) -> dict[tuple[str, str], int]:
        """How many calls ran, by (phase, backend)."""
        with self._lock:
            counters = dict(self._counts)
        return {pair: counter.value for pair, counter in sorted(counters.items())}

    def decide(self, layer: str, metas: tuple[Any, ...], phase: str) -> Decision:
        """The decision for call 0 of a phase, from metadata alone. Records nothing, counts nothing.

        Args:
            layer: name of the calling layer.
            metas: the *forward* arguments with a TensorMeta in place of each tensor.
            phase: for backward, every gradient is taken as wanted.
        """
        now = scope.current()
        rule = now.policy.rule_for(self.spec.name, phase, layer, 0, scope.rank())
        if phase == FORWARD:
            call = _call(self.spec, phase, metas)
        else:
            call = self._backward_call(metas, (True,) * len(self.spec.gradients))[0]
        return select(call, layer, rule, registry.backends.names(), registry.backends.get)

    def _run(
        self, decision: Decision, function: PhaseFunction, count: Counter, index: int, args: tuple[Any, ...]
    ) -> Tensors:
        count.next()
        if intercept.active:
            return intercept.run(intercept.Invocation(self.spec, index, decision, args))
        return function(*args)

    def _through_operator(self, layer: str, args: tuple[Any, ...]) -> Tensors:
        operator = getattr(torch.ops.triptych, self.spec.name).default
        outputs: Tensors = operator(*args, layer)
        return outputs[: self._kept]

    def _plan(
        self, now: scope.Scope, key: Any, layer: str, args: tuple[Any, ...], index: int, backward_index: int
    ) -> Plan:
        """Select for a call whose signature has no plan yet; all refusals come from here, before any launch."""
        name, rank = self.spec.name, scope.rank()
        rule = now.policy.rule_for(name, FORWARD, layer, index, rank)
        needs_grad = backward_index >= 0
        backward_rule = now.policy.rule_for(name, BACKWARD, layer, backward_index, rank) if needs_grad else None
        if now.policy.is_dynamic(name):
            key = (key, id(rule), id(backward_rule))
            if (known := now.plans.get(key)) is not None:
                assert isinstance(known, Plan)
                return known
        self.spec.check(*args)
        metas = tuple(map(_meta, args))
        names, get = registry.backends.names(), registry.backends.get
        forward = select(_call(self.spec, FORWARD, metas), layer, rule, names, get)
        backward = backward_count = None
        grad_metas: tuple[TensorMeta, ...] = ()
        if backward_rule is not None:
            tensors = zip(self.spec.forward.tensor_names, args, strict=False)
            wanted = self.spec.wanted({each: value is not None and value.requires_grad for each, value in tensors})
            call, grad_metas = self._backward_call(metas, wanted)
            backward = select(call, layer, backward_rule, names, get)
            backward_count = self.count(BACKWARD, backward.chosen)
        scalars = args[self._tensor_count :]
        count = self.count(FORWARD, forward.chosen)
        plan = Plan(forward, count, backward, backward_count, scalars, grad_metas)
        now.remember(key, plan)
        return plan

    def _backward_call(
        self, metas: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Call, tuple[TensorMeta, ...]]:
        """The backward call that belongs to a forward call, as far as it is known before forward ran."""
        spec, count = self.spec, self._tensor_count
        device = next(meta.device for meta in metas[:count] if meta is not None)
        stand_ins = tuple(meta if meta is None else _stand_in(meta) for meta in metas[:count])
        outputs = tuple(
            TensorMeta(tuple(out.shape), tuple(out.stride()), out.dtype, device)
            for out in spec.forward.fake(*stand_ins, *metas[count:])
        )
        by_name = dict(zip(spec.forward.outputs, outputs, strict=True))
        grads = tuple(
            TensorMeta(by_name[name].shape, None, by_name[name].dtype, device, aligned=False)
            for name in spec.differentiable
        )
        args = spec.backward_arguments(grads, metas, outputs, wanted)
        return _call(spec, BACKWARD, args), grads

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._next_index = {phase: itertools.count().__next__ for phase in self.spec.phases}
        self._counts = {}


def _autograd_function(op: Op) -> type[torch.autograd.Function]:
    """The autograd function of an op: runs what the plan says, forward and backward."""
    spec = op.spec
    count = len(spec.forward.tensors)
    kept = len(spec.differentiable)
    names = spec.forward.tensor_names
    saved = tuple(
        (True, spec.forward.outputs.index(name)) if name in spec.forward.outputs else (False, names.index(name))
        for name in spec.saved
    )
    optional = () if spec.backward is None else tuple(name.endswith("?") for name in spec.backward.tensors[:kept])
    sources = tuple(tuple(names.index(name) for name in inputs) for inputs in spec.gradients)
    leading = 3  # plan, index, backward_index
    trailing = (None,) * len(spec.forward.scalars)

    class OpFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, plan: Plan, index: int, backward_index: int, *args: Any) -> Tensors:
            outputs = op._run(plan.forward, plan.run, plan.count, index, args)
            ctx.save_for_backward(*[outputs[i] if is_output else args[i] for is_output, i in saved])
            ctx.set_materialize_grads(False)
            ctx.plan = plan
            ctx.backward_index = backward_index
            return outputs[:kept]

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
            plan: Plan = ctx.plan
            if None in grads:
                grads = tuple(
                    grad if grad is not None or allowed else _zeros(meta)
                    for grad, allowed, meta in zip(grads, optional, plan.grad_metas, strict=True)
                )
            wants = ctx.needs_input_grad
            needs = [any([wants[leading + i] for i in inputs]) for inputs in sources]
            args = (*grads, *ctx.saved_tensors, *plan.scalars, *needs)
            assert plan.backward is not None and plan.backward_run is not None and plan.backward_count is not None
            if _grad_enabled():
                with torch.no_grad():
                    results = op._run(plan.backward, plan.backward_run, plan.backward_count, ctx.backward_index, args)
                results = _NoSecondDerivative.apply(spec.name, len(results), *results, *grads, *ctx.saved_tensors)
            else:
                results = op._run(plan.backward, plan.backward_run, plan.backward_count, ctx.backward_index, args)
            by_input: list[torch.Tensor | None] = [None] * count
            for result, inputs, need in zip(results, sources, needs, strict=True):
                if need:
                    for i in inputs:
                        if wants[leading + i]:
                            by_input[i] = result
            return (None, None, None, *by_input, *trailing)

    OpFunction.__name__ = OpFunction.__qualname__ = f"triptych.{spec.name}"
    return OpFunction


class _NoSecondDerivative(torch.autograd.Function):
    """Ties gradients to what they were computed from, so that differentiating them raises instead of giving zeros."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: torch.Tensor) -> Tensors:
        ctx.name = name
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError(second_derivative_text(ctx.name))


def second_derivative_text(name: str) -> str:
    return (
        f"{name} was differentiated twice; Triptych's kernels have a first derivative only. Where a second one is "
        f"needed, compute this layer with torch.nn.functional."
    )


def _signature(value: Any) -> Any:
    """What selection may depend on, hashable."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15)
    return value


def _meta(value: Any) -> Any:
    return TensorMeta.of(value) if isinstance(value, torch.Tensor) else value


def _stand_in(meta: TensorMeta) -> torch.Tensor:
    stride = meta.stride
    if stride is None:
        return torch.empty(meta.shape, dtype=meta.dtype, device="meta")
    return torch.empty_strided(meta.shape, stride, dtype=meta.dtype, device="meta")


def _zeros(meta: TensorMeta) -> torch.Tensor:
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)


def _call(spec: OpSpec, phase: str, args: tuple[Any, ...]) -> Call:
    signature = spec.phase(phase)
    names = signature.tensor_names
    tensors = tuple(zip(names, args, strict=False))
    scalars = tuple(zip(signature.scalar_names, args[len(names) :], strict=True))
    return Call(spec.name, phase, tensors, scalars)


_live: dict[str, Op] = {}


def define(spec: OpSpec) -> Op:
    """The callable of an op, with its operators under `torch.ops.triptych`. Once a process for each name."""
    from triptych import operator

    if spec.name in _live:
        if _live[spec.name].spec is not spec:
            raise ArgumentError(f"An op called {spec.name!r} is already defined in this process. Choose another name.")
        return _live[spec.name]
    op = _live[spec.name] = Op(spec)
    operator.define(op)
    return op


def live() -> dict[str, Op]:
    """The ops defined in this process so far, by name."""
    return dict(sorted(_live.items()))
