"""Layer names: the module path under which policies, traces and reports know a layer."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


class Layer(nn.Module):
    """A module that runs Triptych ops under a name: the base of every layer, here and in other packages.

    Attributes:
        layer_name: what it passes to its ops as `layer`; "" while it has no name. A plain attribute: copied and pickled
            with the layer, and not part of the state_dict.
    """

    layer_name: str = ""


def name_layers(model: nn.Module, prefix: str = "") -> dict[str, Layer]:
    """Give every `Layer` in `model` its module path as its name. Other modules are left as they are.

    A layer that is used in several places keeps its first path. Under torch.compile a name is a constant of the graph;
    compile the whole model, not block by block, or leave layers unnamed.

    Args:
        model: the root; wrappers of torch.compile and of data parallelism leave no trace in the names.
        prefix: put before each path, with a dot.

    Returns:
        The named layers by name.
    """
    named: dict[str, Layer] = {}
    for name, layer in _layers_by_path(model, prefix):
        layer.layer_name = name
        named[name] = layer
    return named


def _layers_by_path(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, Layer]]:
    for path, module in model.named_modules():
        if isinstance(module, Layer):
            parts = [part for part in path.split(".") if part not in ("_orig_mod", "module", "_fsdp_wrapped_module")]
            yield ".".join(([prefix] if prefix else []) + parts), module


def name_layers_when_called() -> Callable[[], None]:
    """Name the layers of every model at its first call, except those that have names already. Returns the undo.

    For programs that never call `name_layers`: switched on while a tool is on that reports or selects by layer. When a
    model is being called already, its layers are named at once.
    """
    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def hook(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or module in seen:
            return
        seen.update(module.modules())
        for name, layer in _layers_by_path(module):
            if not layer.layer_name:
                layer.layer_name = name

    allow_warning = _ignore_warning()
    handle = register_module_forward_pre_hook(hook)
    outermost = _outermost_running_module()
    if outermost is not None:
        hook(outermost, ())

    def undo() -> None:
        handle.remove()
        allow_warning()

    return undo


def _ignore_warning() -> Callable[[], None]:
    """Ignore torch.compile's warning that a global hook may run twice. Returns the undo.

    The hook of this module may, and a program that turns warnings into errors must not fail because a tool is on.
    """
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks", UserWarning)
    ours = warnings.filters[0]

    def undo() -> None:
        # Only what we added: the program may have filters of its own by now, or have had this very one before.
        if ours not in before and ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]

    return undo


def _outermost_running_module() -> nn.Module | None:
    """The module whose call encloses all others on this thread's stack: its paths are the right ones."""
    outermost = None
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is nn.Module._call_impl.__code__:
            outermost = frame.f_locals["self"]
    return outermost
