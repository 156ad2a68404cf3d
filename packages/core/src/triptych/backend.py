"""What a backend is: a name, what it suits, reasons against a call, and an implementation for each (op, phase).

A plug-in exposes one `Backend` object through an entry point in the group `triptych.backends`. Loading it must be
cheap: what is heavy (triton, a compiled extension) is imported when an implementation is first asked for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from triptych.call import PHASES, Call
from triptych.errors import PluginError, TriptychError
from triptych.opspec import PhaseFunction


class Backend:
    """The interface, with safe defaults: a backend that overrides nothing implements nothing and suits no device.

    Attributes:
        name: what policies call it.
        distribution: the distribution that ships it, for records and reports.
    """

    def __init__(self, name: str, distribution: str = "") -> None:
        self.name = name
        self.distribution = distribution

    @functools.cached_property
    def version(self) -> str:
        """The installed version of `distribution`, or "" when it is not an installed distribution."""
        try:
            return importlib.metadata.version(self.distribution) if self.distribution else ""
        except importlib.metadata.PackageNotFoundError:
            return ""

    def ops(self) -> tuple[str, ...]:
        """The names of the ops of which it implements at least one phase. Must not import anything heavy."""
        return ()

    def priority(self, device_type: str) -> int | None:
        """Its place in `auto` on a device type: higher is asked first; None keeps it out of `auto`."""
        return None

    def reasons_unavailable(self) -> list[str]:
        """Why nothing of this backend can run in this process, whatever the call; empty when something can."""
        return []

    def implementation(self, op: str, phase: str) -> PhaseFunction | None:
        """The function that runs this phase, or None when there is none. May import what is heavy."""
        return None

    def reasons_against(self, call: Call) -> list[str]:
        """Why this call cannot run here; empty when it can.

        Each reason is a whole sentence: what was found, what is needed, the remedy. Asked for forward and backward
        before either is launched; a gradient's strides are unknown then and must not be a reason.
        """
        return []

    def reasons_against_auto(self, call: Call) -> list[str]:
        """Further reasons that count only when the backend was not asked for by name (a build not made yet)."""
        return []

    def prepare(self, call: Call) -> None:
        """Do once what must be done before this call can run, such as building a native part.

        Called when the backend was chosen, before anything is launched. A TriptychError raised here counts as a reason
        against the call: a list of preferences moves on. `triptych explain` does not call it.
        """

    def __repr__(self) -> str:
        return f"<backend {self.name!r} of {self.distribution or 'this process'} {self.version}>".replace(" >", ">")


class PackageBackend(Backend):
    """A backend whose package has one module an op: `<package>.ops.<op>`.

    A module defines `forward`, `backward` or both, and may define `reasons_against(call) -> list[str]`. A new op is a
    new file there and nothing else.
    """

    def __init__(self, name: str, package: str, distribution: str, priority: Mapping[str, int] | None = None) -> None:
        super().__init__(name, distribution)
        self.package = package
        self._priority = dict(priority or {})
        self._modules: dict[str, ModuleType] = {}

    def ops(self) -> tuple[str, ...]:
        spec = importlib.util.find_spec(f"{self.package}.ops")
        if spec is None or spec.submodule_search_locations is None:
            return ()
        modules = pkgutil.iter_modules(spec.submodule_search_locations)
        return tuple(sorted(module.name for module in modules if not module.name.startswith("_")))

    def priority(self, device_type: str) -> int | None:
        return self._priority.get(device_type)

    def implementation(self, op: str, phase: str) -> PhaseFunction | None:
        assert phase in PHASES, phase
        module = self._module(op)
        return None if module is None else getattr(module, phase, None)

    def reasons_against(self, call: Call) -> list[str]:
        module = self._module(call.op)
        ask = getattr(module, "reasons_against", None)
        return [] if ask is None else list(ask(call))

    def _module(self, op: str) -> ModuleType | None:
        if op not in self._modules:
            if op not in self.ops():
                return None
            try:
                self._modules[op] = importlib.import_module(f"{self.package}.ops.{op}")
            except Exception as cause:
                raise PluginError(
                    f"Backend {self.name!r} could not load its {op}: importing {self.package}.ops.{op} raised "
                    f"{type(cause).__name__}: {cause}. Reinstall {self.distribution}, or choose another backend."
                ) from cause
        return self._modules[op]


def ask(backend: Backend, question: str, *args: object) -> Any:
    """The answer of one of a backend's methods, checked: a plug-in that errs is a broken plug-in, not our crash.

    Raises:
        PluginError: the method raised, or answered with something that is not what its signature says.
        TriptychError: the method raised it on purpose.
    """
    try:
        answer = getattr(backend, question)(*args)
    except TriptychError:
        raise
    except (Exception, SystemExit) as cause:
        raise _broken(backend, question, f"raised {type(cause).__name__}: {cause}") from cause
    if not _ANSWERS[question](answer):
        raise _broken(backend, question, f"answered {answer!r}, which is not {_WANTED[question]}")
    return answer


def origin_of(backend: Backend) -> tuple[str, str]:
    """Distribution and version of a backend.

    Raises:
        PluginError: they cannot be read.
    """
    try:
        return str(backend.distribution), str(backend.version)
    except Exception as cause:
        raise PluginError(
            f"Backend {backend.name!r} is broken: reading its distribution and version raised {type(cause).__name__}: "
            f"{cause}. Report it to its authors, or choose another backend."
        ) from cause


def _broken(backend: Backend, question: str, what: str) -> PluginError:
    authors = getattr(backend, "distribution", "") or "the plug-in"
    return PluginError(
        f"Backend {backend.name!r} is broken: its {question} {what}. Report it to the authors of {authors}, or choose "
        f"another backend."
    )


def _is_texts(answer: object) -> bool:
    return isinstance(answer, (list, tuple)) and all(isinstance(each, str) for each in answer)


_ANSWERS: dict[str, Callable[[object], bool]] = {
    "ops": _is_texts,
    "priority": lambda answer: answer is None or isinstance(answer, int),
    "reasons_unavailable": _is_texts,
    "reasons_against": _is_texts,
    "reasons_against_auto": _is_texts,
    "implementation": lambda answer: answer is None or callable(answer),
    "prepare": lambda answer: answer is None,
}
_WANTED = {
    "ops": "a tuple of op names",
    "priority": "a whole number or None",
    "reasons_unavailable": "a list of sentences",
    "reasons_against": "a list of sentences",
    "reasons_against_auto": "a list of sentences",
    "implementation": "a function or None",
    "prepare": "None",
}
