"""From a function call to a kernel.

Plain eager tensors take the short path (shortpath.py): one look-up of what was selected for this call signature under
the policy in force, then the kernels inside an autograd function (autograd.py). Everything else (compile, export, fake
and meta tensors, tensor subclasses, functorch, dispatch modes) goes through the operator `torch.ops.triptych.<op>`
(operator.py). Both select here, with the same function, before anything is launched.

torch.autocast ends here: an implementation gets the tensors that the op was given, and returns what the op declares.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from typing import Any

import torch
from torch.autograd import forward_ad

from triptych import caches, in_force, inline, intercept, operator, refusals, registry, scope, shortpath
from triptych.autograd import backward_of
from triptych.backend import ask
from triptych.call import BACKWARD, FORWARD, Call, TensorMeta
from triptych.checking import check_outputs, check_scalars
from triptych.counters import Counter
from triptych.errors import ArgumentError, DerivativeError, forward_mode_text
from triptych.opspec import OpSpec, PhaseFunction, Tensors
from triptych.policy import Rule
from triptych.select import Decision, select


class Plan:
    """What was selected for one call signature under one policy, ready to run.

    `run` and `backward_run` are the implementations, `count` and `backward_count` step their counters. `needs` says
    which outputs of backward are wanted, `results` which of them is the gradient of each forward tensor, if any.
    """

    __slots__ = (
        "backward",
        "backward_count",
        "backward_run",
        "count",
        "forward",
        "grad_metas",
        "needs",
        "results",
        "run",
    )

    def __init__(
        self,
        forward: Decision,
        count: Counter,
        backward: Decision | None,
        backward_count: Counter | None,
        grad_metas: tuple[TensorMeta, ...],
        needs: tuple[bool, ...],
        results: tuple[int | None, ...],
    ) -> None:
        self.forward = forward
        self.run: PhaseFunction = forward.function
        self.count = count.next
        self.backward = backward
        self.backward_run: PhaseFunction | None = None if backward is None else backward.function
        self.backward_count = None if backward_count is None else backward_count.next
        self.grad_metas = grad_metas
        self.needs = needs
        self.results = results

    def check_first_results(self, spec: OpSpec) -> None:
        """Have what the implementations return checked the first time they run, and not again."""

        def checked(decision: Decision, attribute: str) -> PhaseFunction:
            def run(*args: Any) -> Tensors:
                outputs = decision.function(*args)
                check_outputs(spec, decision, outputs, _expected(spec, decision.call.phase, args))
                setattr(self, attribute, decision.function)
                return outputs

            return run

        self.run = checked(self.forward, "run")
        if self.backward is not None:
            self.backward_run = checked(self.backward, "backward_run")


class Op:
    """An op in this process. `call(layer, *tensors, *scalars)` returns its one differentiable output, or a tuple."""

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec
        self._tensor_count = len(spec.forward.tensors)
        self._varying = {phase: _places(spec, phase) for phase in spec.phases}
        self._kept = spec.visible
        self._start_counting()
        self.call, self.apply = shortpath.write(self, backward_of(self))
        os.register_at_fork(after_in_child=self._start_counting)

    def _start_counting(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], Counter] = {}
        self.next_forward = itertools.count().__next__
        self.next_backward = itertools.count().__next__

    def run_phase(self, layer: str, phase: str, args: tuple[Any, ...]) -> Tensors:
        """One phase alone, selected by the policy in force now: the body of the operators."""
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():
                return self.run_phase(layer, phase, args)
        now = scope.current()
        index = self.next_forward() if phase == FORWARD else self.next_backward()
        rule = now.policy.rule_for(self.spec.name, phase, layer, index, scope.rank())
        varying = self._varying[phase]
        signature = [_signature(value) if place not in varying else _kind(value) for place, value in enumerate(args)]
        key = (self, phase, layer, id(rule), *signature)
        found = now.plans.get(key)
        if found is None:
            self.check(args, phase)
            call = _call(self.spec, phase, tuple(map(_meta, args)))
            decision = _select(call, layer, rule)
            found = (decision, self.count(phase, decision.chosen))
            now.remember(key, found)
        decision, count = found
        count.next()
        if intercept.active:
            return self.intercepted(decision, index, args)
        outputs = decision.function(*args)
        check_outputs(self.spec, decision, outputs)
        return outputs

    def check(self, args: tuple[Any, ...], phase: str = FORWARD) -> None:
        """Raise ArgumentError unless the arguments of a phase fit together."""
        check_scalars(self.spec, args[len(self.spec.phase(phase).tensors) :], phase)
        self.spec.check_of(phase)(*args)

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
        count = self._tensor_count
        stand_ins = (_stand_in(meta) if isinstance(meta, TensorMeta) else meta for meta in metas[:count])
        self.spec.check(*stand_ins, *metas[count:])
        rule = scope.current().policy.rule_for(self.spec.name, phase, layer, 0, scope.rank())
        if phase == FORWARD:
            call = _call(self.spec, phase, metas)
        else:
            call = self._backward_call(metas, (True,) * len(self.spec.gradients))[0]
        return select(call, layer, rule, registry.backends.names(), registry.backends.get)

    def intercepted(self, decision: Decision, index: int, args: tuple[Any, ...]) -> Tensors:
        """Run what was decided inside the active interceptors."""
        return intercept.run(intercept.Invocation(self.spec, index, decision, args))

    def through_operator(self, layer: str, *args: Any) -> Any:
        """The call as `torch.ops.triptych.<op>`, without the outputs that only backward needs.

        Under torch.compile in inline mode as `torch.ops.triptych_inline.<op>`, where the policy lets it.
        """
        if torch.compiler.is_dynamo_compiling():
            inlining = in_force.inlining  # must be read, for torch.compile to compare it before the graph runs again
            version = inline.version_of(self.spec.name, layer, inlining)
            if version:
                return inline.run(self.spec, args, layer, version)
        recorded = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if not torch.compiler.is_compiling() and not recorded:
            self.check(args)  # what the schema would say of a wrong type is of no use to a user
            _check_transforms(self.spec.name, args[: self._tensor_count])
        outputs = operator.run(self.spec, FORWARD, args, layer)
        return outputs[0] if self._kept == 1 else outputs[: self._kept]

    def plan(
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
        self.check(args)
        metas = tuple(map(_meta, args))
        forward = _select(_call(self.spec, FORWARD, metas), layer, rule)
        backward = backward_count = None
        grad_metas: tuple[TensorMeta, ...] = ()
        needs: tuple[bool, ...] = ()
        results: tuple[int | None, ...] = ()
        if backward_rule is not None:
            needs, results = self._wanted(args)
            call, grad_metas = self._backward_call(metas, needs)
            backward = _select(call, layer, backward_rule)
            backward_count = self.count(BACKWARD, backward.chosen)
        count = self.count(FORWARD, forward.chosen)
        plan = Plan(forward, count, backward, backward_count, grad_metas, needs, results)
        plan.check_first_results(self.spec)
        now.remember(key, plan)
        return plan

    def traced_plan(self, rule: Rule, layer: str, args: tuple[Any, ...]) -> Plan:
        """What `rule` selects for tensors that a tracer looks at. Kept nowhere, counted nowhere.

        Raises:
            Refused: nothing that it names can run a phase.
        """
        metas = tuple(_traced_meta(value) if isinstance(value, torch.Tensor) else value for value in args)
        forward = _select(_call(self.spec, FORWARD, metas), layer, rule)
        if self.spec.backward is None:
            return Plan(forward, Counter(), None, None, (), (), ())
        needs, results = self._wanted(args)
        call, grad_metas = self._backward_call(metas, needs)
        return Plan(forward, Counter(), _select(call, layer, rule), Counter(), grad_metas, needs, results)

    def _wanted(self, args: tuple[Any, ...]) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
        """`needs` and `results` of a plan."""
        tensors = dict(zip(self.spec.forward.tensor_names, args, strict=False))
        requires_grad = {each: value is not None and value.requires_grad for each, value in tensors.items()}
        results = tuple(self.spec.result_for(each) if wants else None for each, wants in requires_grad.items())
        return self.spec.wanted(requires_grad), results

    def _backward_call(self, metas: tuple[Any, ...], wanted: tuple[bool, ...]) -> tuple[Call, tuple[TensorMeta, ...]]:
        """The backward call that belongs to a forward call, as far as it is known before forward ran."""
        spec, count = self.spec, self._tensor_count
        device = next(meta.device for meta in metas[:count] if meta is not None)
        outputs = _expected(spec, FORWARD, metas)
        by_name = dict(zip(spec.forward.outputs, outputs, strict=True))
        grads = tuple(
            TensorMeta(by_name[name].shape, None, by_name[name].dtype, device, aligned=False)
            for name in spec.differentiable
        )
        args = spec.backward_arguments(grads, metas, outputs, wanted)
        return _call(spec, BACKWARD, args), grads


def _check_transforms(name: str, tensors: tuple[Any, ...]) -> None:
    """Refuse forward-mode differentiation, for which the operator would give a wrong answer."""
    if forward_ad._current_level >= 0 and any(
        isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
        for tensor in tensors
    ):
        raise DerivativeError(forward_mode_text(name))


def _select(call: Call, layer: str, rule: Rule) -> Decision:
    """Select for a call that is about to run: what is chosen is prepared, what is passed over is logged."""
    backends = registry.backends
    decision = select(
        call, layer, rule, backends.names(), backends.get, lambda each, asked: ask(each, "prepare", asked)
    )
    refusals.log(decision)
    return decision


def _signature(value: Any) -> Any:
    """What selection may depend on, hashable."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15)
    return value


def _places(spec: OpSpec, phase: str) -> frozenset[int]:
    """Where in a phase's arguments the scalars stand that may take a new value with every call."""
    signature = spec.phase(phase)
    start = len(signature.tensors)
    return frozenset(start + i for i, name in enumerate(signature.scalar_names) if name in spec.varying)


def _kind(value: Any) -> Any:
    """A varying scalar in a key, as shortpath writes it: one plan for whatever positive number it is."""
    return (isinstance(value, int | float) and 0.0 < value < math.inf) or value


def _meta(value: Any) -> Any:
    return TensorMeta.of(value) if isinstance(value, torch.Tensor) else value


def _traced_meta(tensor: torch.Tensor) -> TensorMeta:
    """The metadata of a tensor that may have no memory, and so no address."""
    return TensorMeta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)


def _expected(spec: OpSpec, phase: str, args: tuple[Any, ...]) -> tuple[TensorMeta, ...]:
    """The metadata of what a phase must return for these arguments, tensors or their metadata."""
    metas = tuple(map(_meta, args))
    device = next(value.device for value in metas if isinstance(value, TensorMeta))
    stand_ins = tuple(_stand_in(value) if isinstance(value, TensorMeta) else value for value in metas)
    outputs = spec.phase(phase).fake(*stand_ins)
    return tuple(TensorMeta(tuple(out.shape), tuple(out.stride()), out.dtype, device) for out in outputs)


def _stand_in(meta: TensorMeta) -> torch.Tensor:
    stride = meta.stride
    if stride is None:
        return torch.empty(meta.shape, dtype=meta.dtype, device="meta")
    return torch.empty_strided(meta.shape, stride, dtype=meta.dtype, device="meta")


def _call(spec: OpSpec, phase: str, args: tuple[Any, ...]) -> Call:
    signature = spec.phase(phase)
    names = signature.tensor_names
    tensors = tuple(zip(names, args, strict=False))
    scalars = tuple(zip(signature.scalar_names, args[len(names) :], strict=True))
    return Call(spec.name, phase, tensors, scalars)


_live: dict[str, Op] = {}


def define(spec: OpSpec) -> Op:
    """The callable of an op, with its operators under `torch.ops.triptych`. Once a process for each name."""
    if spec.name in _live:
        if _live[spec.name].spec is not spec:
            raise ArgumentError(f"An op called {spec.name!r} is already defined in this process. Choose another name.")
        return _live[spec.name]
    op = _live[spec.name] = Op(spec)
    operator.define(op)
    inline.define(op)
    caches.declare(spec)
    return op


def live() -> dict[str, Op]:
    """The ops defined in this process so far, by name."""
    return dict(sorted(_live.items()))
