"""Telling torch what to do about DTensors, once there can be any.

torch.distributed.tensor costs half a second to import, which only those pay who use it; and an operator may be called
directly, or by an exported graph, so that no code of ours sees the first DTensor coming. So the import is watched for,
where it has not happened yet.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from triptych.opspec import OpSpec

MODULE = "torch.distributed.tensor"
_waiting: list[Callable[[], None]] = []


def define(spec: OpSpec) -> None:
    """Have the operators of an op take DTensors."""

    def register() -> None:
        from triptych.sharding.running import rule_of

        for phase in spec.phases:
            _take(spec.operator_name(phase), rule_of(spec, phase))

    _when_there(register)


def define_in_place(name: str) -> None:
    """Have an operator take DTensors that writes its second argument into the first one: each process its part."""

    def rule(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> None:
        old, new = args
        with torch.no_grad():
            func(old.to_local(), new.redistribute(placements=old.placements).to_local())

    _when_there(lambda: _take(name, rule))


def _take(name: str, rule: Callable[..., Any]) -> None:
    from torch.distributed.tensor import DTensor

    torch.library.register_torch_dispatch(f"triptych::{name}", DTensor, rule)


def _when_there(register: Callable[[], None]) -> None:
    """Do it now if the module is there, else when it has been imported."""
    if (module := sys.modules.get(MODULE)) is not None and hasattr(module, "DTensor"):
        register()
        return
    if not _waiting:
        sys.meta_path.insert(0, _Watch())
    _waiting.append(register)


class _Watch(MetaPathFinder):
    """Finds nothing itself. Has what was found for `MODULE` register the ops when it has been imported, and is gone."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        if found is not None and found.loader is not None:
            loader: Any = found.loader
            _call_after(loader)
        return found


def _call_after(loader: Loader) -> None:
    """Have this loader, which is for one module, register the ops once the module is there."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        while _waiting:
            _waiting.pop(0)()

    loader.exec_module = exec_module  # type: ignore[method-assign]
