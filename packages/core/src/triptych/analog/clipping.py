"""Weight clipping: after a step of whatever optimiser trains a layer, once, before the weights are used again.

    LAYER_GAUSSIAN                W <- clamp(W, -b, b),      b = sigma * std(W), unbiased, over the whole matrix
    LAYER_GAUSSIAN_PER_CHANNEL    the same for each row, an output channel, of the matrix
    LEARNABLE_PER_CHANNEL         the learned clip a <- max(a, smallest normal number), so that it stays positive

A convolution's weight counts as [out, -1]. The bound depends on what it clips: clipping twice is not clipping once.

Who clips, and when:
- A torch.optim optimiser that holds the parameter, or the master copy that Megatron names `main_param`: a hook on every
  optimiser's step clips what it holds, at its end. A step inside another optimiser's step (a closure's, a wrapper's)
  leaves it to the outer one. Where a fused optimiser was told by a GradScaler to change nothing, nothing is clipped.
- DeepSpeed with float32 masters (ZeRO, bf16): the hook sees the step of the optimiser inside and clips the masters that
  changed, through DeepSpeed's public functions, before DeepSpeed copies them to the weights.
- Anything else, a hand-written `weight.data -= ...` or an optimiser over copies of its own: nobody says that a step is
  over. Once a gradient has arrived, each training forward compares the parameter with what it was then and clips it if
  it differs: `settle`, the only place where a forward changes a parameter. Masters that it cannot know stay unclipped.

Values that no step made are left alone: those of load_state_dict, and of the layer's set_weights, quantize_weights and
reset_parameters (`restart`); others, nn.init or averaged weights copied in, before the first gradient, and later too
while an optimiser of torch.optim holds the parameter. Without one, `settle` takes them for a step, unless the parameter
is frozen. The device is never waited for: a decision that depends on values is made there, by an infinite bound.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from triptych.analog import sharded
from triptych.analog.config import WeightClipParameter
from triptych.analog.enums import WeightClipType
from triptych.errors import UsageError
from triptych.layers.naming import Layer

GAUSSIAN = (WeightClipType.LAYER_GAUSSIAN, WeightClipType.LAYER_GAUSSIAN_PER_CHANNEL)


# --- what layers and users call ---------------------------------------------------------------------------------------


def watch(layer: Layer) -> None:
    """Have the layer's parameter clipped from now on, if its configuration clips; stop it if it does not.

    For a layer's constructor, its `__setstate__` (a copy is another layer) and a change of its configuration. May be
    called again at any time.
    """
    parameter = clipped_parameter(layer)
    if parameter is None:
        forget(layer)
        return
    watched = _watch_of(parameter)
    if watched is None:
        watched = parameter.__dict__[_NAME] = _Watch()
    watched.listen(parameter)
    if layer.__dict__.get(_NAME) is not watched:
        layer.__dict__[_NAME] = watched
        _listen_to_optimizers()
        _remember(layer)


def forget(layer: nn.Module) -> None:
    """Leave no trace of `watch` on the layer. For a layer that becomes an ordinary module again."""
    layer.__dict__.pop(_NAME, None)
    hooks = layer._load_state_dict_post_hooks
    for key in [key for key, hook in hooks.items() if hook is _after_loading]:
        del hooks[key]


def restart(layer: nn.Module) -> None:
    """The parameter has values now that no step made: leave them alone. After whatever gives it other ones."""
    if isinstance(layer, Layer):
        watch(layer)
    watched = _watch_of(layer)
    if watched is not None:
        watched.due = watched.arrived = False


def settle(layer: Layer) -> None:
    """Clip what a step that no hook saw has changed. For the start of a layer's training forward.

    While a torch.optim optimiser holds the parameter it does nothing, and costs a look at a flag. torch.compile traces
    it, and compiles a forward once more when the first such step is suspected.

    Warns:
        UserWarning: the layer is to clip, but what it would clip is computed from other Parameters. Once a layer.
    """
    parameter = clipped_parameter(layer)
    if parameter is None:
        if not torch.compiler.is_compiling():
            _warn_if_computed(layer)
        return
    if sharded.piece(layer, _clipped_name(layer)) is not None:
        return  # what FSDP gathered for this pass; an optimiser holds the piece that it comes from
    watched = _watch_of(layer)
    if not torch.compiler.is_compiling() and not (
        watched is not None and watched.listens and _watch_of(parameter) is watched
    ):
        watch(layer)  # the parameter was replaced or swapped, or did not need a gradient before
        return
    if watched is None or not watched.due or not parameter.requires_grad:
        return  # what is changed while it is frozen is no step; a step just before that counts when it thaws
    if watched.kind != (parameter.dtype, parameter.device):
        watched.due = False  # it was brought to another dtype or device, which is no step
        return
    assert watched.seen is not None
    with torch.no_grad():
        # A step through `.data` is one that autograd is not told of. Clipping is part of it, and must not invalidate
        # graphs that the step did not: those of two forwards before one backward. Whoever steps like that answers for
        # a backward through older values. Any other step has counted up the version, and so does its clipping: a graph
        # that was made between the two holds weights that are about to change, and its backward must raise.
        # A compiled forward cannot branch on the version and takes the first way.
        told = not torch.compiler.is_compiling() and parameter._version != watched.version
        values = parameter if told else parameter.data
        _clip(layer, values, parameter.dtype, unless=(_fingerprint(values) == watched.seen).all())
        watched.seen.copy_(_fingerprint(values))
        if told:
            watched.version = parameter._version


@torch.no_grad()
def clip_weights(model: nn.Module) -> None:
    """Clip the weights of every analog layer of `model` (or of a layer) now, as its configuration says.

    Optimisers that are subclasses of torch.optim.Optimizer, and DeepSpeed, need no such call. Under DeepSpeed every
    process must make it.
    """
    done: set[int] = set()
    for layer in model.modules():
        parameter = clipped_parameter(layer)
        if parameter is None or id(parameter) in done:
            continue
        done.add(id(parameter))
        if is_deepspeed(parameter):
            _clip_deepspeed(layer, parameter, only_if_changed=False)
        else:
            for values in _copies(parameter):
                _clip(layer, values, parameter.dtype)
        watched = _watch_of(parameter)
        if watched is not None and watched.due:
            watched.look(parameter)


def clipped_parameter(layer: nn.Module) -> nn.Parameter | None:
    """The parameter that clipping concerns: the weight, the learned clip, or None for a layer that does not clip."""
    if not isinstance(layer, Layer) or not hasattr(layer, "rpu_config"):
        return None
    # Not `layer.weight`, which a parametrisation would compute, and spectral_norm take for one more iteration.
    parameter = layer._parameters.get(_clipped_name(layer))
    # Not one under functional_call, a parametrisation or a flattening wrapper: then there is nothing to write to.
    return parameter if isinstance(parameter, nn.Parameter) else None


def _clipped_name(layer: nn.Module) -> str:
    """What the layer calls the parameter that clipping concerns; "" if it does not clip."""
    kind = _settings(layer).type
    if kind is WeightClipType.NONE:
        return ""
    return "weight" if kind in GAUSSIAN else "learnable_weight_clip"


def _warn_if_computed(layer: Layer) -> None:
    """Say once that what the layer is to clip is computed from Parameters of its own, which nobody clips.

    Replicas of DataParallel, functional_call and wrappers that flatten put other tensors where Parameters were. They
    are not meant: it is up to the original, or refused at the step.
    """
    if layer in _told or not hasattr(layer, "rpu_config") or not (name := _clipped_name(layer)):
        return
    parts = list(layer.named_parameters(recurse=False))  # weight_g and weight_v of weight_norm, weight_orig of the rest
    found = [key for key, part in parts if key.startswith(f"{name}_") and isinstance(part, nn.Parameter)]
    if name not in layer._parameters and parametrize.is_parametrized(layer, name):
        chain = layer.get_submodule(f"parametrizations.{name}")
        parts = list(chain.named_parameters(recurse=False))
        found += [f"parametrizations.{name}.{key}" for key, part in parts if isinstance(part, nn.Parameter)]
    if name in layer._parameters or not found:
        return
    _told.add(layer)
    title = type(layer).__name__ + (f" {layer.layer_name!r}" if layer.layer_name else "")
    warnings.warn(
        f"{title}: clip.type is {_settings(layer).type.value!r}, but {name} is computed from {', '.join(found)}, and "
        f"nothing is clipped. Make it plain again (torch.nn.utils.parametrize.remove_parametrizations, "
        f"torch.nn.utils.prune.remove, torch.nn.utils.remove_weight_norm), or set clip.type to 'None'.",
        UserWarning,
        stacklevel=2,
    )


def _settings(layer: Any) -> WeightClipParameter:
    clip: WeightClipParameter = layer.rpu_config.clip
    return clip


# --- clipping ---------------------------------------------------------------------------------------------------------


def _clip(layer: nn.Module, values: Tensor, dtype: torch.dtype, unless: Tensor | None = None) -> None:
    """Clip `values`, the layer's parameter of `dtype` or a copy of it, in place.

    Args:
        unless: a condition on the device under which they stay as they are.
    """
    clip = _settings(layer)
    if clip.type not in GAUSSIAN:
        values.clamp_(min=torch.finfo(dtype).smallest_normal)
        return
    if values.dim() < 2:
        raise UsageError(
            f"{type(layer).__name__} {getattr(layer, 'layer_name', '')!r}: its weight is clipped at {clip.sigma} "
            f"standard deviations, but all that is here of it after the step is a flat piece of {values.numel()} "
            f"elements, as under FullyShardedDataParallel. Use torch.distributed.fsdp.fully_shard, which keeps rows "
            f"together, or set clip.type to 'None' and call triptych.analog.clip_weights where the weights are whole."
        )
    rows = _wide(values).flatten(1)
    whole = clip.type is WeightClipType.LAYER_GAUSSIAN
    if (rows.numel() if whole else rows.shape[1]) < 2:
        return  # there is no standard deviation
    bound = clip.sigma * (rows.std() if whole else rows.std(dim=1).view(-1, *[1] * (values.dim() - 1)))
    if unless is not None:
        bound = torch.where(unless, float("inf"), bound)
    bound = bound.to(values.dtype)
    values.clamp_(-bound, bound)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _fingerprint(values: Tensor) -> Tensor:
    """int64 [rows]: sums of the bits. A change of any one element changes it; a master has that of its 16-bit copy."""
    wide = _wide(values.detach())
    bits = wide.view(torch.int64 if wide.dtype == torch.float64 else torch.int32)
    return bits.flatten(1).sum(dim=1) if bits.dim() > 1 else bits.to(torch.int64)


def _copies(parameter: nn.Parameter) -> tuple[Tensor, ...]:
    """The parameter, and the float32 master of it that Megatron's optimiser hangs on it unless it is a shard."""
    main = getattr(parameter, "main_param", None)
    if isinstance(main, Tensor) and main.shape == parameter.shape:
        return parameter, main
    return (parameter,)


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def is_deepspeed(parameter: object) -> bool:
    """Whether DeepSpeed keeps a float32 master of the parameter elsewhere: it marks the ones that it does."""
    return hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")


def _clip_deepspeed(layer: nn.Module, parameter: nn.Parameter, only_if_changed: bool) -> None:
    """Clip the master, wherever its pieces are, and outside of a step the weight too. Every process must come here."""
    deepspeed = importlib.import_module("deepspeed.utils")
    watched = _watch_of(parameter)
    assert watched is not None
    whole = not hasattr(parameter, "ds_id")  # ZeRO-3 scatters the 16-bit weights as well
    if watched.seen is None and whole:
        watched.seen = _fingerprint(parameter)  # still what it was before the step, and the first master equals it
    master = deepspeed.safe_get_full_fp32_param(parameter)
    unchanged = None
    if only_if_changed and watched.seen is not None:
        unchanged = (_fingerprint(master) == watched.seen).all()
    _clip(layer, master, parameter.dtype, unless=unchanged)
    deepspeed.safe_set_full_fp32_param(parameter, master)
    watched.seen = _fingerprint(master)
    if not only_if_changed and whole:
        parameter.copy_(master)


# --- what is known of a parameter -------------------------------------------------------------------------------------


class _Watch:
    """What happened to a parameter since it was last clipped.

    Attributes:
        arrived: a gradient has arrived.
        due: a gradient has arrived, and no optimiser is known whose hook will tell that a step is over.
        listens: whether it is told of gradients.
        kind: the dtype and device that the parameter had when `seen` was taken.
        seen: the fingerprint that the parameter had at that gradient, or after the last clipping since.
        version: how often autograd had been told of changes to it by then.
    """

    def __init__(self) -> None:
        self.arrived = False
        self.due = False
        self.kind: tuple[torch.dtype, torch.device] | None = None
        self.version = 0
        self.listens = False
        self.seen: Tensor | None = None
        self._holder: weakref.ref[Optimizer] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a layer is another layer: nothing is known of its parameter. And a Parameter that was saved must
        # load with weights_only, which makes no _Watch, and where there is no Triptych.
        return OrderedDict, ()

    def listen(self, parameter: nn.Parameter) -> None:
        """Be told of the parameter's gradients."""
        if not self.listens and parameter.requires_grad and parameter.is_leaf:
            others = parameter._post_accumulate_grad_hooks
            if others is not None:
                # After torch.utils.swap_tensors (torch 2.13) the Parameter has still its dictionary of hooks, but no
                # gradient finds its way there, and to register another does not help. To assign it does.
                for key in [key for key, hook in others.items() if isinstance(getattr(hook, "__self__", None), _Watch)]:
                    del others[key]
                parameter._post_accumulate_grad_hooks = others
            parameter.register_post_accumulate_grad_hook(self._gradient_arrived)  # type: ignore[no-untyped-call]
            self.listens = True

    def hold(self, optimizer: Optimizer) -> None:
        """An optimiser of torch.optim holds the parameter: for as long as it lives, its steps tell."""
        self.due = False
        if self._holder is None or self._holder() is not optimizer:
            self._holder = weakref.ref(optimizer)

    def _gradient_arrived(self, parameter: Tensor) -> None:
        self.arrived = True
        held = self._holder is not None and self._holder() is not None
        if not (self.due or held or is_deepspeed(parameter)):
            self.look(parameter)
            self.due = True

    def look(self, parameter: Tensor) -> None:
        """Take down what the parameter is now."""
        self.seen, self.kind = _fingerprint(parameter), (parameter.dtype, parameter.device)
        self.version = parameter._version


_NAME = "_clip_watch"
"""The attribute of a Parameter that is its _Watch, and of each layer that has it: torch.compile reads it there.

Weak references to the Parameter would not do: torch.utils.swap_tensors refuses tensors to which any lead. It swaps the
attributes with the contents, so that the Parameter comes out of it with no _Watch, and gets another one.
"""
_layers: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()
"""The layers that clip, in the order in which they were made: the same in every process of a job."""
_numbers = itertools.count()
_told: weakref.WeakSet[Layer] = weakref.WeakSet()
"""The layers of which `_warn_if_computed` has spoken."""


def _watch_of(owner: nn.Parameter | nn.Module) -> _Watch | None:
    watched = owner.__dict__.get(_NAME)
    return watched if isinstance(watched, _Watch) else None


def _remember(layer: Layer) -> None:
    if not any(known is layer for known in _layers.values()):
        _layers[next(_numbers)] = layer
    if _after_loading not in layer._load_state_dict_post_hooks.values():
        layer.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]


def _after_loading(layer: nn.Module, _: Any) -> None:
    restart(layer)


def _watched() -> Iterator[tuple[Layer, nn.Parameter, _Watch]]:
    """Every parameter that is watched, once, with the first layer that has it."""
    done: set[int] = set()
    for layer in tuple(_layers.values()):
        parameter = clipped_parameter(layer)
        if parameter is not None and id(parameter) not in done:
            done.add(id(parameter))
            watch(layer)
            yield layer, parameter, getattr(layer, _NAME)


# --- the hooks on every optimiser's step ------------------------------------------------------------------------------

_installed: list[Any] = []


def _listen_to_optimizers() -> None:
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before_step))
        _installed.append(register_optimizer_step_post_hook(_after_step))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = _tensors_of(optimizer)
    for _, parameter, watched in _watched():
        if not held.isdisjoint(map(id, _copies(parameter))):
            watched.hold(optimizer)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = _tensors_of(optimizer)
    _, *outer = [frame.f_locals["self"] for frame in _stack() if frame.f_code is _STEP] or [optimizer]
    held_outside = frozenset().union(*map(_tensors_of, outer))
    found_inf = getattr(optimizer, "found_inf", None)  # a GradScaler's, to an optimiser that decides on the device
    in_deepspeed = any(frame.f_globals.get("__name__", "").startswith("deepspeed.") for frame in _stack())
    for layer, parameter, watched in _watched():
        if in_deepspeed and is_deepspeed(parameter):
            _clip_deepspeed(layer, parameter, only_if_changed=True)
        for values in _copies(parameter):
            changed = watched.arrived or values.grad is not None
            if changed and id(values) in held and id(values) not in held_outside:
                _clip(layer, values, parameter.dtype, unless=None if found_inf is None else found_inf.view(()) > 0)
                watched.arrived = False


def _tensors_of(optimizer: Optimizer) -> frozenset[int]:
    return frozenset(id(tensor) for group in optimizer.param_groups for tensor in group["params"])


def _stack() -> Iterator[FrameType]:
    """The frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


_STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""The code that calls the hooks around every optimiser's step."""
