"""Input ranges that follow the batches, in one process or in several that train one model.

A layer calibrates by what it sees, and under data parallelism a process sees its own part of a batch. So all of them
put together what they have of each tile, and every one calibrates from all of it, as one process would from the whole
batch:

    n, mean, squares       elements, their mean, the sum of the squared distances from it
    lowest, highest        the extremes

    of two processes       n = n1 + n2,   mean = (n1 mean1 + n2 mean2) / n
                           squares = squares1 + n1 (mean1 - mean)^2 + squares2 + n2 (mean2 - mean)^2

The op is given two elements for each tile that have this very deviation, s / sqrt(2) and -s / sqrt(2), or these very
extremes, so that it decides as ever what counts as a batch. While a layer calibrates like this, each of its training
forwards gathers seven numbers a tile and waits for the device twice; afterwards it does nothing.

Which processes: those that `synchronise_ranges` was told; else those over which fully_shard has spread the range; else
those of the DistributedDataParallel that is calling the layer. A wrapper under which a range would be lost is refused.
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from triptych import traced
from triptych.analog import sharded
from triptych.analog.clipping import is_deepspeed
from triptych.analog.crossbar import Crossbar, calibrate, check_transforms, recomputing
from triptych.analog.state import COUNT, EXTREMES, RANGE
from triptych.errors import ArgumentError, UsageError
from triptych.ops._norm_bounds import statistics_dtype
from triptych.ops.input_range_update import input_range_update
from triptych.ops.tile_std import tile_std
from triptych.tiling import tile_slices

if TYPE_CHECKING:
    from triptych.analog.layer import AnalogLayer

Groups = tuple[Any, ...]
"""Process groups, across each of which in turn to put statistics together."""


# --- what users and layers call ---------------------------------------------------------------------------------------


def synchronise_ranges(model: nn.Module, group: Any = None) -> None:
    """Have the analog layers of a model calibrate their input ranges from the batches of all processes of a group.

    DistributedDataParallel and fully_shard need no such call. Others do, that train copies of a model on different
    data: gradients that are averaged by hand, say. Ranges, counts and extremes are those of the group's first process
    from now on. Every process of the group must call this, and must make the same training forwards while ranges are
    calibrated, as with torch.nn.SyncBatchNorm. A copy of a layer does as the layer does; one that is read from a file
    has to be told again.

    Args:
        model: the model, of which every process of the group has the same.
        group: a process group of torch.distributed; None means all processes.

    Raises:
        UsageError: torch.distributed is not initialised, or the ranges are spread over processes already.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "synchronise_ranges: there is no process group. Call torch.distributed.init_process_group first; in one "
            "process there is nothing to synchronise."
        )
    _groups.append(dist.group.WORLD if group is None else group)
    for module in model.modules():
        if not _has_ranges(module):
            continue
        if sharded.mesh_of(module._parameters[RANGE]) is not None:
            raise UsageError(
                "synchronise_ranges: the input ranges are DTensors, spread over processes by fully_shard or "
                "parallelize_module. Those of fully_shard are calibrated together without this call; leave it out."
            )
        for name in (RANGE, COUNT, *EXTREMES):
            tensor = getattr(module, name)
            if tensor is not None:
                dist.broadcast(tensor.detach(), group=_groups[-1], group_src=0)
        module.__dict__[_GROUP] = len(_groups) - 1


def follow(layer: AnalogLayer, inputs: Sequence[Tensor]) -> None:
    """Let a layer's input range, its counts and its extremes follow one more batch, in place.

    What runs inside a backward pass is a forward that activation checkpointing does a second time: its batch has been
    counted.

    Args:
        inputs: what each crossbar is given.

    Raises:
        UsageError: what is calibrated would be lost, or processes that calibrate together have different ranges.
    """
    check_transforms(layer.layer_name)
    if torch.compiler.is_compiling():
        spread = sharded.mesh_of(layer.input_range) is not None  # tensor parallelism: the op's sharding rule does it
        if not traced.exporting() and not spread and _in_a_group():
            # Who calls the layer, and what it has in its Parameter's place, is known when the graph runs.
            kept = [each.detach() for each in _state(layer)]
            torch.ops.triptych.follow([x.detach() for x in inputs], kept, layer.__dict__[_NUMBER])
            return
    elif recomputing():
        return
    elif groups := _groups_of(layer):
        _follow_together(layer, inputs, groups)
        return
    for each, x in zip(layer._crossbars(), inputs, strict=True):
        calibrate(layer._circuit, each, x, layer.layer_name)


# --- layers in compiled graphs ----------------------------------------------------------------------------------------

_NUMBER = "_range_number"
"""The attribute of a layer by which a graph, which holds numbers and tensors, finds it."""
_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, AnalogLayer] = weakref.WeakValueDictionary()


def enrol(layer: AnalogLayer) -> None:
    """Give a new layer, or a copy of one, a number."""
    layer.__dict__[_NUMBER] = number = next(_numbers)
    layer.__dict__.pop(_DONE, None)
    _layers[number] = layer


def leave(layer: nn.Module) -> None:
    """Undo `enrol` and `synchronise_ranges`, for a layer that becomes an ordinary module again."""
    for name in (_NUMBER, _DONE, _GROUP):
        layer.__dict__.pop(name, None)


def _follow_numbered(inputs: Sequence[Tensor], kept: Sequence[Tensor], number: int) -> None:
    """`follow` where a compiled graph runs; `kept` are the layer's tensors, or copies that the graph puts back."""
    if recomputing():
        return
    layer = _layers[number]
    groups = _groups_of(layer)
    if groups:
        _follow_together(layer, inputs, groups)
        for mine, new in zip(kept, _state(layer), strict=True):
            if mine.data_ptr() != new.data_ptr():
                mine.copy_(new.detach())
        return
    low, high = kept[2:] or (None, None)
    weight: Any = None  # nobody looks at it
    whole = Crossbar(weight, None, kept[0], kept[1], low, high, None)
    for part, x in enumerate(inputs):
        calibrate(layer._circuit, whole.part(part, len(inputs)), x, layer.layer_name)


_library = torch.library.Library("triptych", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "follow(Tensor[] inputs, Tensor(a!)[] state, int layer) -> ()", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("follow", _follow_numbered, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("triptych::follow", lambda inputs, state, layer: None, lib=_library)


def _state(layer: AnalogLayer) -> tuple[Tensor, ...]:
    """What calibration changes: the range, the counts, and where they exist the extremes."""
    tensors = (layer.input_range, layer.input_range_update_idx, layer.x_min, layer.x_max)
    return tuple(each for each in tensors if each is not None)


# --- which processes --------------------------------------------------------------------------------------------------

_GROUP = "_range_group"
"""The attribute of a layer that says which of `_groups` it calibrates with: process groups cannot be copied."""
_groups: list[Any] = []


def _has_ranges(module: nn.Module) -> bool:
    return hasattr(module, "rpu_config") and module._parameters.get(RANGE) is not None


def _groups_of(layer: AnalogLayer) -> Groups:
    """The groups with which a layer calibrates; empty if it does so alone."""
    if not _in_a_group():
        return ()
    _check_kept(layer)
    known = _told_or_spread(layer)
    if known is not None:
        return known
    for caller in _callers():
        if isinstance(caller, nn.parallel.DistributedDataParallel):
            return _larger(caller.process_group)
        if type(caller).__name__ == "FullyShardedDataParallel":
            _refuse_unless_calibrated(layer, "FullyShardedDataParallel", "before the model is wrapped")
    return ()


def groups_of(layer: AnalogLayer, model: nn.Module) -> Groups:
    """The groups with which a layer of a model calibrates; for whoever has the model, and is not called by it."""
    if not _in_a_group():
        return ()
    known = _told_or_spread(layer)
    if known is not None:
        return known
    mesh, fsdp = sharded.mesh_of(layer._parameters.get(RANGE)), sys.modules.get("torch.distributed.fsdp")
    modules = tuple(model.modules())
    if mesh is not None and fsdp is not None and any(isinstance(each, fsdp.FSDPModule) for each in modules):
        return tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim))
    replicas = [each for each in modules if isinstance(each, nn.parallel.DistributedDataParallel)]
    return _larger(replicas[0].process_group) if replicas else ()


def _told_or_spread(layer: AnalogLayer) -> Groups | None:
    """The groups that `synchronise_ranges` was told, or over which fully_shard has spread the range."""
    number = layer.__dict__.get(_GROUP)
    if number is not None:
        if number >= len(_groups):
            raise UsageError(
                f"{layer.title}: it calibrates its input range together with other processes, but was read from a "
                f"file. Call triptych.analog.synchronise_ranges on the model in this program, too."
            )
        return _larger(_groups[number])
    here = layer._parameters.get(RANGE)
    piece = sharded.piece(layer, RANGE)
    if piece is not None:
        mesh, inner = sharded.mesh_of(piece), sharded.mesh_of(here)
        outer = mesh.ndim - (0 if inner is None else inner.ndim)  # fully_shard's dimensions come first
        return tuple(mesh.get_group(dimension) for dimension in range(outer))
    return None


def _in_a_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _larger(group: Any) -> Groups:
    return (group,) if dist.get_world_size(group) > 1 else ()


def _callers() -> Iterator[nn.Module]:
    """The modules on this thread's stack, innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if isinstance(found, nn.Module):
            yield found
        frame = frame.f_back


def _check_kept(layer: AnalogLayer) -> None:
    """Raise if DeepSpeed keeps a float32 master of the range, from which each step makes the range again."""
    if is_deepspeed(layer.input_range):
        _refuse_unless_calibrated(layer, "DeepSpeed", "before deepspeed.initialize")


def _refuse_unless_calibrated(layer: AnalogLayer, keeper: str, when: str) -> None:
    if not _calibrated(layer):
        raise UsageError(
            f"{layer.title}: it is to calibrate its input range in the first {layer._circuit.init_from_data} batches "
            f"of training, but {keeper} keeps the Parameter elsewhere, and what a forward writes into it is lost. "
            f"Call triptych.analog.calibrate_input_ranges(model, ...) {when}, or set "
            f"pre_post.input_range.init_from_data to 0."
        )


# --- calibrating together ---------------------------------------------------------------------------------------------

_DONE = "_ranges_done"
"""The attribute of a layer that says whether all its tiles were calibrated: with the counts, and their version then."""


def _calibrated(layer: AnalogLayer) -> bool:
    """Whether there is nothing left to calibrate. Looks at the counts, and waits for the device, once."""
    counts = layer.input_range_update_idx
    assert counts is not None
    known = layer.__dict__.get(_DONE)
    if known is None or known[0] is not counts or known[1] != (counts._version, layer._circuit.init_from_data):
        done = bool((counts >= layer._circuit.init_from_data).all())
        known = layer.__dict__[_DONE] = (counts, (counts._version, layer._circuit.init_from_data), done)
    return bool(known[2])


@torch.no_grad()
def _follow_together(layer: AnalogLayer, inputs: Sequence[Tensor], groups: Groups) -> None:
    if _calibrated(layer):
        return
    if any(sharded.mesh_of(x) is not None for x in inputs):
        raise ArgumentError(
            f"{layer.title}: it is to calibrate its input range under data parallelism from an input that is itself "
            f"spread over processes (a DTensor). Set the ranges with triptych.analog.calibrate_input_ranges(model, "
            f"...) before the model is parallelised, or set pre_post.input_range.init_from_data to 0."
        )
    circuit, counts = layer._circuit, layer.input_range_update_idx
    assert counts is not None
    before = sharded.whole(layer, RANGE)
    own = torch.cat([_statistics(layer, x.detach()) for x in inputs])
    has = torch.stack((before.double(), counts.double()), dim=1)
    found = together(torch.cat((own, has), dim=1), groups, layer.title)
    fast = circuit.mode == "fast"
    wide = statistics_dtype(before.dtype)
    extremes = [each for each in (layer.x_min, layer.x_max) if each is not None]
    update = input_range_update(
        (found[:, 3:5].t() if fast else _pair(found)).to(wide).contiguous(),
        before.to(wide),
        counts,
        *extremes,
        tiles=counts.numel(),
        mode="extremes" if fast else "std",
        init_from_data=circuit.init_from_data,
        init_std_alpha=circuit.init_std_alpha,
        act_range_momentum=circuit.act_range_momentum,
        layer=layer.layer_name,
    )
    largest = torch.finfo(before.dtype).max
    sharded.write(layer, RANGE, update[0].clamp(-largest, largest))
    for old, new in zip((counts, *extremes), update[1:], strict=False):
        old.copy_(new)
    # Looking at the counts again waits for the device, so that no all-gather of FSDP's, which has a stream of its own,
    # runs before what was written here.
    _calibrated(layer)


def _statistics(layer: AnalogLayer, x: Tensor) -> Tensor:
    """float64 [T, 5]: n, mean, squares, lowest and highest of each tile of a crossbar's input."""
    std = tile_std(x, tiles=layer.tiles, layer=layer.layer_name).double()
    rows = []
    for tile, columns in enumerate(tile_slices(x.shape[-1], layer.tiles)):
        values = x[..., columns]
        n = values.numel()
        total = values.sum(dtype=torch.float64)
        squares = std[tile].square() * (n - 1) if n > 1 else total * 0  # of one element; NaN if it is no number
        low, high = torch.aminmax(values) if n else (total + math.inf, total - math.inf)
        rows.append(torch.stack((torch.full_like(total, n), total / max(n, 1), squares, low.double(), high.double())))
    return torch.stack(rows)


def together(own: Tensor, groups: Groups, title: str) -> Tensor:
    """What all processes of the groups have of each tile.

    Args:
        own: float64 [tiles, 7]: this process's five statistics, the range and the count, which must be the same in
            all of them.

    Raises:
        UsageError: they are not.
    """
    for group in groups:
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, own.contiguous(), group=group)
        parts = torch.stack(gathered)
        if not bool((_bits(parts[..., 5:]) == _bits(own[:, 5:])).all()):
            raise UsageError(
                f"{title}: processes that calibrate their input ranges together start from different ones, or have "
                f"counted different batches: {parts[..., 5:].tolist()} (range and count of each tile). Load the same "
                f"state in all of them, or call triptych.analog.synchronise_ranges, which takes that of the first."
            )
        own = _merged(parts)
    return own


def _bits(values: Tensor) -> Tensor:
    """For comparing: NaN, too, is what it is."""
    return values.contiguous().view(torch.int64)


def _merged(parts: Tensor) -> Tensor:
    """[P, tiles, 7] to [tiles, 7]."""
    n, mean, squares = parts[..., 0], parts[..., 1], parts[..., 2]
    total = n.sum(0)
    centre = (n * mean).sum(0) / total.clamp_min(1)
    # Where means are equal they must come out as exactly that: a tile without information has a deviation of 0.
    centre = torch.where((mean == mean[:1]).all(0), mean[0], centre)
    spread = (squares + n * (mean - centre).square()).sum(0)
    return torch.stack((total, centre, spread, parts[..., 3].amin(0), parts[..., 4].amax(0), *parts[0, :, 5:].t()), 1)


def _pair(found: Tensor) -> Tensor:
    """[2, tiles]: two elements for each tile that have the deviation of all. NaN where there is none."""
    n, squares = found[:, 0], found[:, 2]
    half = torch.where(n > 1, squares / (n - 1).clamp_min(1) / 2, math.nan).sqrt()
    return torch.stack((half, -half))
