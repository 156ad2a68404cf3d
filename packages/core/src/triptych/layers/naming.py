"""Layer names: the module path under which policies, traces and reports know a layer."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


def name_layers(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Give every Triptych layer in `model` its module path as its name.

    A layer is any module with a `layer_name` attribute. A module that is used in several places keeps its first path.
    Names are plain attributes: they are not part of the state_dict. Under torch.compile a name is a constant of the
    graph; compile the whole model, not block by block, or leave layers unnamed.

    Args:
        model: the root; wrappers of torch.compile and of data parallelism leave no trace in the names.
        prefix: put before each path, with a dot.

    Returns:
        The named layers by name.
    """
    named: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if hasattr(module, "layer_name"):
            parts = [part for part in path.split(".") if part not in ("_orig_mod", "module", "_fsdp_wrapped_module")]
            name = ".".join(([prefix] if prefix else []) + parts)
            module.layer_name = name
            named[name] = module
    return named


def name_layers_when_called() -> Callable[[], None]:
    """Name the layers of every model at its first call, unless they have names already. Returns the undo.

    For programs that never call `name_layers`: switched on while a tool is on that reports or selects by layer. When a
    model is being called already, its layers are named at once.
    """
    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def hook(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or module in seen:
            return
        layers = [inner for inner in module.modules() if hasattr(inner, "layer_name")]
        seen.update(module.modules())
        if layers and not any(inner.layer_name for inner in layers):
            name_layers(module)

    # torch.compile warns of any global hook. This one may run twice; a program that turns warnings into errors must not
    # fail because a tool is on.
    warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks", UserWarning)
    handle = register_module_forward_pre_hook(hook)
    outermost = _outermost_running_module()
    if outermost is not None:
        hook(outermost, ())
    return handle.remove


def _outermost_running_module() -> nn.Module | None:
    """The module whose call encloses all others on this thread's stack: its paths are the right ones."""
    outermost = None
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is nn.Module._call_impl.__code__:
            outermost = frame.f_locals["self"]
    return outermost
