"""Triptych: PyTorch kernels in three implementations behind one registry, so that bugs are found by swapping them."""

import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from triptych import ends, layers, tools
from triptych.errors import (
    ArgumentError,
    BuildError,
    CheckFailed,
    DerivativeError,
    EnvironmentVariableError,
    PluginError,
    PolicyError,
    Refused,
    TriptychError,
    UsageError,
)
from triptych.explain import explain
from triptych.layers import name_layers
from triptych.ops.add_rms_norm import add_rms_norm
from triptych.ops.rms_norm import rms_norm
from triptych.report import calls, report
from triptych.scope import use

if _TYPE_CHECKING:
    from triptych import analog

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BuildError",
    "CheckFailed",
    "DerivativeError",
    "EnvironmentVariableError",
    "PluginError",
    "PolicyError",
    "Refused",
    "TriptychError",
    "UsageError",
    "add_rms_norm",
    "analog",
    "calls",
    "explain",
    "layers",
    "name_layers",
    "report",
    "rms_norm",
    "use",
]


def __getattr__(name: str) -> _Any:
    """`triptych.analog` is imported when it is first used: torch.optim comes with it, as large as torch itself."""
    if name != "analog":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return importlib.import_module("triptych.analog")


ends.record_if_asked(_os.environ)
tools.name_layers_if_asked(_os.environ)
