"""Every exception Triptych raises, and how their texts are built.

    TriptychError
    ├── UsageError (ValueError)         what was asked cannot be meant
    │   ├── PolicyError                 a rule that does not parse, or names something unknown
    │   ├── ArgumentError               an op called with tensors or scalars that do not fit together
    │   └── EnvironmentVariableError    a variable that is unknown or has no valid value
    ├── Refused (RuntimeError)          no backend that the policy allows can run this call
    ├── PluginError (RuntimeError)      a plug-in is broken, missing or claimed twice
    ├── BuildError (RuntimeError)       a native part could not be compiled
    ├── CheckFailed (RuntimeError)      a check that the user switched on found a wrong result
    └── DerivativeError (NotImplementedError)
                                        a derivative was asked for that the kernels do not have

A text says what was asked, what was found, what would work and what to do, in that order.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class TriptychError(Exception):
    """Root of the tree: catching it catches everything Triptych raises on purpose."""


class UsageError(TriptychError, ValueError):
    """What was asked for cannot be meant: an unknown name, a value out of range."""


class PolicyError(UsageError):
    """A policy rule does not parse, or names an op, backend or phase that does not exist."""


class ArgumentError(UsageError):
    """An op was called with tensors or scalars that do not fit together. Nothing was launched."""


class EnvironmentVariableError(UsageError):
    """A variable that begins with TRIPTYCH_ is unknown, or the value of one that is read (RANK too) is not valid."""


class Refused(TriptychError, RuntimeError):
    """No backend that the policy allows can run the call. Nothing was launched.

    Attributes:
        rejected: pairs (backend name, reasons), in the order in which they were asked.
        record: the record of the decision as plain data, as `triptych.select.Decision.to_json` gives it; "chosen" is
            None.
    """

    def __init__(
        self,
        message: str,
        rejected: tuple[tuple[str, tuple[str, ...]], ...] = (),
        record: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.rejected = rejected
        reasons = [{"backend": name, "reasons": list(sentences)} for name, sentences in rejected]
        self.record: dict[str, Any] = {"chosen": None, "rejected": reasons, **(record or {})}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rejected, self.record)


class PluginError(TriptychError, RuntimeError):
    """A backend or op plug-in is broken, missing, or claimed by two distributions."""


class BuildError(TriptychError, RuntimeError):
    """A native part of a backend could not be compiled."""


class CheckFailed(TriptychError, RuntimeError):
    """A check that the user switched on (non-finite values, a mismatch, an asynchronous device error) failed.

    Attributes:
        signature: a short text that is the same for every occurrence of the same fault.
    """

    def __init__(self, message: str, signature: str) -> None:
        super().__init__(message)
        self.signature = signature

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.signature)


class DerivativeError(TriptychError, NotImplementedError):
    """A derivative was asked for that the kernels do not have: a second one, a forward-mode one."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that names what would have worked: the close matches first, else everything there is."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(repr(match) for match in close)}?"
    if not names:
        return "None are installed."
    return f"Known: {', '.join(names)}."


def second_derivative_text(name: str) -> str:
    return (
        f"{name} was differentiated twice; Triptych's kernels have a first derivative only. Where a second one is "
        f"needed, compute this layer with torch.nn.functional."
    )


def forward_mode_text(name: str) -> str:
    return (
        f"{name} was called under forward-mode differentiation (jvp, dual numbers); Triptych's kernels have a "
        f"reverse-mode derivative only. Where a forward-mode one is needed, compute this layer with "
        f"torch.nn.functional."
    )
