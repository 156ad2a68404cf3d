"""A call of an op's operator on DTensors: each process calls the operator again, on its part.

Operands that decide stay where they are, the others are moved to where the rule wants them, and outputs are DTensors
that say of themselves whether they are sharded, replicated or partial. An op without a rule runs on whole operands.

What follows from shapes, placements and scalars is worked out once for each signature.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from triptych.call import FORWARD
from triptych.errors import ArgumentError
from triptych.opspec import OpSpec
from triptych.sharding import agreement, exchange, parts
from triptych.sharding.placing import ELSEWHERE, PARTIAL, Operand, Where, choose, dim_of, sizes
from triptych.sharding.rule import Calls, Output, Part, Sharding
from triptych.sharding.tiles import whole_tiles

logger = logging.getLogger("triptych.sharding")

_LIMIT = 4096
_told: set[str] = set()
_layouts: dict[Any, _Layout] = {}


@dataclass(frozen=True)
class _Layout:
    """What was worked out for one signature.

    Attributes:
        part: the part of this process; None for an op without a rule.
        placements: for each tensor, where it must be.
        outputs: for each output, the shape and the strides of the whole, and where it is but for sums.
    """

    part: Part | None
    placements: tuple[tuple[Placement, ...], ...]
    outputs: tuple[tuple[torch.Size, tuple[int, ...], tuple[Placement, ...]], ...]


def rule_of(spec: OpSpec, phase: str) -> Callable[..., Any]:
    """What the operator of a phase does with DTensors: a rule for torch.library.register_torch_dispatch."""
    names, count = spec.phase(phase).tensor_names, len(spec.phase(phase).tensors)
    # Seeds are drawn, and missing gradients are made, as plain tensors: the same on every process, and whole.
    plain = {
        spec.sharding.seed if spec.sharding else "",
        *(names[: len(spec.differentiable)] if phase != FORWARD else ()),
    }
    may_be_plain = frozenset(plain & set(names))

    def rule(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if kwargs:
            known = [argument.name for argument in func._schema.arguments]
            args = (*args, *(kwargs[name] for name in known[len(args) :]))
        with torch.no_grad():  # this is below autograd; moving operands is not to be differentiated
            return _run(spec, phase, func, args, count, may_be_plain)

    return rule


def _run(spec: OpSpec, phase: str, func: Any, args: tuple[Any, ...], count: int, may_be_plain: frozenset[str]) -> Any:
    signature, layer = spec.phase(phase), args[-1]
    op = spec.operator_name(phase)
    mesh = _mesh(op, signature.tensor_names, args[:count], may_be_plain)
    spread = tuple(_spread(value, mesh) for value in args[:count])
    layout = _layout(spec, phase, mesh, spread, args[count:-1])
    local = [
        None if value is None else _moved(op, name, value, placements, spec.sharding)
        for name, value, placements in zip(signature.tensor_names, spread, layout.placements, strict=True)
    ]

    def run(*mine: Any) -> tuple[torch.Tensor, ...]:
        outputs = func(*mine, layer)
        return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)

    outputs: tuple[Output, ...]
    rule, part = spec.sharding, layout.part
    if rule is None or part is None:
        outputs = run(*local, *args[count:-1])
    else:
        if rule.seed in signature.tensor_names:
            agreement.check(mesh, args[signature.tensor_names.index(rule.seed)])
        mine = parts.arguments(spec, rule, phase, part, (*local, *args[count:-1]))
        outputs = exchange.over(mesh, part, parts.exchange_of(rule, phase, part, Calls(run, layer), mine))
    wrapped = []
    for number, (output, (shape, stride, placements)) in enumerate(zip(outputs, layout.outputs, strict=True)):
        if (
            rule is not None
            and part is not None
            and len(shape) == len(rule.pattern(phase).outputs[number].named(len(shape)))
        ):
            sums = parts.partial_along(rule, phase, number, output, part)
            placements = tuple(Partial("sum") if i in sums else each for i, each in enumerate(placements))
        tensor = parts.tensor_of(output)
        wrapped.append(DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride))
    return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)


def _mesh(op: str, names: tuple[str, ...], tensors: tuple[Any, ...], may_be_plain: frozenset[str]) -> DeviceMesh:
    """The mesh of the call.

    Raises:
        ArgumentError: there are two, or a plain tensor stands beside DTensors.
    """
    meshes = {name: each.device_mesh for name, each in zip(names, tensors, strict=True) if isinstance(each, DTensor)}
    first, mesh = next(iter(meshes.items()))
    for name, each in zip(names, tensors, strict=True):
        if name in meshes:
            if meshes[name] != mesh:
                raise ArgumentError(
                    f"{op}: {name} is spread over {meshes[name]} and {first} over {mesh}. All tensors of a call must "
                    f"be spread over one mesh; distribute them over that of the largest one."
                )
        elif each is not None and name not in may_be_plain:
            raise ArgumentError(
                f"{op}: {name} is a plain tensor and {first} is a DTensor. All tensors of a call must be DTensors: "
                f"torch.distributed.tensor.distribute_tensor makes one of a Parameter or buffer, distribute_module and "
                f"parallelize_module of all that a layer has, and DTensor.from_local of what each rank has a part of."
            )
    if mesh.get_coordinate() is None:
        raise ArgumentError(f"{op}: this process is not part of {mesh}, over which {first} is spread.")
    return mesh


def _spread(value: Any, mesh: DeviceMesh) -> Any:
    if value is None or isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _moved(op: str, name: str, value: Any, placements: tuple[Placement, ...], rule: Sharding | None) -> torch.Tensor:
    """The part of a tensor that this process has, once it is where it must be."""
    if value.placements != placements:
        if rule is not None and name in rule.stays:
            raise ArgumentError(
                f"{op}: {name} is placed {list(value.placements)} and must be {list(placements)} here, where forward "
                f"left it. Give backward the {name} of the forward whose inputs are the other arguments."
            )
        # Detached: torch 2.11 takes a result for a view of a tensor that requires a gradient, and has no rule for that.
        value = value.detach().redistribute(placements=placements)
    local: torch.Tensor = value.to_local()
    return local


# --- what is worked out once ------------------------------------------------------------------------------------------


def _layout(spec: OpSpec, phase: str, mesh: DeviceMesh, tensors: tuple[Any, ...], scalars: tuple[Any, ...]) -> _Layout:
    key: Any = None
    if not torch.compiler.is_compiling():  # there sizes may be symbols, and are not to be kept
        seen = tuple(None if each is None else (each.shape, each.dtype, each.placements) for each in tensors)
        key = (spec.operator_name(phase), mesh, seen, tuple(map(_kind, scalars)))
        if (known := _layouts.get(key)) is not None:
            return known
    found = _worked_out(spec, phase, mesh, tensors, scalars)
    if key is not None:
        if len(_layouts) >= _LIMIT:
            _layouts.clear()
        _layouts[key] = found
    return found


def _kind(value: Any) -> Any:
    """A float by its sign: nothing else of it has a part in shapes."""
    return (value > 0) if isinstance(value, float) and math.isfinite(value) else value


def _worked_out(
    spec: OpSpec, phase: str, mesh: DeviceMesh, tensors: tuple[Any, ...], scalars: tuple[Any, ...]
) -> _Layout:
    metas = tuple(
        None if each is None else torch.empty(each.shape, dtype=each.dtype, device="meta") for each in tensors
    )
    spec.check_of(phase)(*metas, *scalars)
    outputs = spec.phase(phase).fake(*metas, *scalars)
    rule = spec.sharding
    replicated: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
    if rule is None:
        _tell(spec)
        whole = tuple((each.shape, tuple(each.stride()), replicated) for each in outputs)
        return _Layout(None, (replicated,) * len(tensors), whole)
    pattern, names = rule.pattern(phase), spec.phase(phase).tensor_names
    operands = tuple(
        Operand(
            name,
            axes,
            tuple(each.shape),
            each.numel() * each.dtype.itemsize,
            tuple(_where(placement) for placement in each.placements),
        )
        for name, axes, each in zip(names, pattern.tensors, tensors, strict=True)
        if each is not None
    )
    known = tuple(each for each in operands if each.name not in rule.stays)
    tiles = parts.tiles_of(spec, rule, phase, scalars)
    counts = tuple(mesh.shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    whole_sizes = sizes(spec.operator_name(phase), known)
    axes = choose(spec.operator_name(phase), rule, known, counts, tiles)
    along = tuple(i for i, axis in enumerate(axes) if axis == "n")
    all_tiles = tiles
    if tiles and along:
        by_place = whole_tiles(whole_sizes["n"], tiles, tuple(counts[i] for i in along))
        assert by_place is not None
        tiles = by_place[tuple(coordinate[i] for i in along)]
    part = Part(axes, tuple(coordinate), counts, whole_sizes, tiles, all_tiles)

    def placed(dims: tuple[str, ...]) -> tuple[Placement, ...]:
        found = (dim_of(dims, axis, bool(rule.tiles)) if axis else None for axis in axes)
        return tuple(Replicate() if dim is None else Shard(dim) for dim in found)

    placements = tuple(
        replicated if each is None or len(dims := each_axes.named(each.dim())) != each.dim() else placed(dims)
        for each_axes, each in zip(pattern.tensors, tensors, strict=True)
    )
    whole = tuple(
        (each.shape, tuple(each.stride()), placed(dims) if len(dims) == each.dim() else replicated)
        for each, dims in ((each, out.named(each.dim())) for each, out in zip(outputs, pattern.outputs, strict=True))
    )
    return _Layout(part, placements, whole)


def _where(placement: Placement) -> Where:
    if type(placement) is Shard:
        return placement.dim
    if placement.is_partial():
        return PARTIAL
    return None if placement.is_replicate() else ELSEWHERE


def _tell(spec: OpSpec) -> None:
    if spec.name not in _told:
        _told.add(spec.name)
        logger.warning(
            "%s has no sharding rule: its operands are gathered and every rank computes the whole. Give its OpSpec a "
            "`sharding`.",
            spec.name,
        )
