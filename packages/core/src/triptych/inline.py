"""Inline mode: `torch.ops.triptych_inline.<op>`, an operator that a tracer takes apart.

torch.compile puts it into the graph in place of `torch.ops.triptych.<op>` where `in_force.inlining` says so. It is
composite: when the graph is traced for a compiler it becomes what the `torch` backend's implementation does, inside an
autograd function whose backward is that implementation's own. A derivative taken through forward's operations would be
another one: that of a quantiser is 0.

Its last argument, `version`, says what the implementation was; see caches.py.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from triptych import caches, compile_mode, fingerprint, operator, registry, scope, traced
from triptych.backend import ask
from triptych.call import FORWARD
from triptych.errors import PluginError, Refused, TriptychError
from triptych.opspec import OpSpec
from triptych.policy import Rule

if TYPE_CHECKING:
    from triptych.dispatch import Op

NAMESPACE = "triptych_inline"
_RULE = Rule(compile_mode.BACKEND, "compile mode inline", None, None, None, None, None, (compile_mode.BACKEND,))

_specs: dict[str, OpSpec] = {}
_traced_ops: set[str] = set()
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def define(op: Op) -> None:
    """Define the operator of `op` that is traced through."""

    _specs[op.spec.name] = op.spec

    def body(*args: Any) -> Any:
        *values, layer, _ = args
        outputs = _traced(op, layer, tuple(values))
        return outputs[0] if op.spec.visible == 1 else outputs

    _library.define(f"{op.spec.name}{_schema(op.spec)}", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(op.spec.name, body, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


def run(spec: OpSpec, args: tuple[Any, ...], layer: str, version: str) -> Any:
    """The op, to be traced through; what a caller of it gets."""
    return getattr(torch.ops.triptych_inline, spec.name).default(*args, layer, version)


@traced.constant
def version_of(name: str, layer: str, inlining: str) -> str:
    """Which version of an op's implementation to trace through, under the policy in force; "" for none.

    For traced code that has read `in_force.inlining`: whatever this decides by is in that text, which is compared
    before a graph runs again.
    """
    caches.keep()
    if not inlining or traced.exporting() or _against_rules(name, layer):
        return ""
    try:
        version = _version(name)
    except TriptychError as cause:
        compile_mode.log_once(f"Compile mode inline is not applied to {name}, which stays opaque: {cause}")
        return ""
    _traced_ops.add(name)
    return version


def against(name: str, layer: str) -> str:
    """Why torch.compile would see a call as opaque although the mode is inline, as a clause; "" if it would not."""
    try:
        _version(name)
    except TriptychError as cause:
        return str(cause).removesuffix(".")
    return compile_mode.obstacle() or _against_rules(name, layer)


def traced_ops() -> tuple[str, ...]:
    """The ops that torch.compile has traced through in this process."""
    return tuple(sorted(_traced_ops))


def _against_rules(name: str, layer: str) -> str:
    return compile_mode.against(scope.current().policy, name, _specs[name].phases, layer, scope.rank())


@functools.cache
def _version(name: str) -> str:
    """The fingerprint of the implementation of every phase.

    Raises:
        TriptychError: there is none.
    """
    backend = registry.backends.get(compile_mode.BACKEND)
    reasons = ask(backend, "reasons_unavailable")
    functions = [ask(backend, "implementation", name, phase) for phase in _specs[name].phases]
    if reasons or None in functions:
        reasons = reasons or [f"backend {compile_mode.BACKEND!r} does not implement it."]
        raise PluginError(" ".join(reasons))
    return fingerprint.of(*functions)


registry.backends.on_change.append(_version.cache_clear)
registry.ops.on_change.append(_version.cache_clear)


def _schema(spec: OpSpec) -> str:
    """The parameters of the op's own operator and `version`; the results that a caller gets."""
    parameters = spec.forward.schema().partition(") -> (")[0]
    returns = ", ".join(f"Tensor {name}" for name in spec.forward.outputs[: spec.visible])
    return f"{parameters}, str version) -> ({returns})"


def _traced(op: Op, layer: str, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """The outputs that a caller gets, from operations that a tracer sees."""
    if torch._C._is_any_autocast_enabled():
        with torch._C._DisableAutocast():
            return _traced(op, layer, args)
    spec = op.spec
    op.check(args)
    kinds = {type(each).__name__ for each in args if hasattr(type(each), "__tensor_flatten__")}
    if kinds:  # a DTensor, say: how an op is split is known of the op, not of the operations that it consists of
        text = f"Compile mode inline is not applied to {spec.name} of a {', '.join(sorted(kinds))}, which stays opaque."
        compile_mode.log_once(text)
        return operator.run(spec, FORWARD, args, layer)[: spec.visible]
    try:
        plan = op.traced_plan(_RULE, layer, args)
    except Refused as cause:
        reasons = " ".join(reason for _, reasons in cause.rejected for reason in reasons)
        compile_mode.log_once(f"Compile mode inline is not applied to calls of {spec.name} that stay opaque: {reasons}")
        return operator.run(spec, FORWARD, args, layer)[: spec.visible]
    if spec.backward is None:
        with torch.no_grad():
            return plan.run(*args)[: spec.visible]
    count = len(spec.forward.tensors)
    outputs = op.apply((plan, 0, 0, args[count:]), *args[:count])
    return (outputs,) if spec.visible == 1 else outputs
