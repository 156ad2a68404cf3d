"""What a piece of loaded code is, as a short text that is the same in every process that loads the same code.

Not the text of a file: that may have been changed since it was imported. Not the version of a distribution: that stays
while a developer edits. What is taken is what will run: bytecode, constants, defaults, what closures hold, and the same
of every function and class that it names, as far as they belong to one of the packages that the roots belong to.
Comments, line numbers and paths have no part in it.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Callable, Iterator, Mapping

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))


def of(*roots: object) -> str:
    """Sixteen hexadecimal digits for functions, classes, and plain or frozen data that hold such."""
    walk = _Walk({_package(root) for root in _flat(roots)} - {""})
    walk.add(roots)
    return walk.digest.hexdigest()[:16]


class _Walk:
    """One pass over everything that can be reached. What was seen is named by when it was first seen."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # so that no identity is used twice
        self.digest = hashlib.sha256()

    def add(self, value: object) -> None:
        if isinstance(value, _PLAIN):
            self._write(f"{type(value).__name__} {value!r}")
        elif isinstance(value, enum.Enum):
            self._write(f"{type(value).__qualname__} {value.name}")
        elif id(value) in self._seen:
            self._write(f"seen {self._seen[id(value)]}")
        else:
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)
            self._write(type(value).__qualname__)
            for part in self._parts(value):
                self.add(part)

    def _write(self, text: str) -> None:
        self.digest.update(text.encode() + b"\0")

    def _parts(self, value: object) -> Iterator[object]:
        if isinstance(value, types.CodeType):
            yield from (value.co_code, value.co_names, value.co_varnames, value.co_freevars, value.co_consts)
            yield value.co_argcount, value.co_kwonlyargcount, value.co_flags, value.co_exceptiontable
        elif isinstance(value, tuple | list):
            yield from value
        elif isinstance(value, set | frozenset):
            yield from sorted(value, key=repr)
        elif isinstance(value, Mapping):
            yield from value.items()
        elif isinstance(value, types.MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, type):
            yield from self._of_class(value)
        elif dataclasses.is_dataclass(value):
            yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        elif hasattr(value, "__wrapped__"):  # functools.cache and the like
            yield value.__wrapped__
        else:
            yield _name(value)

    def _of_function(self, function: types.FunctionType) -> Iterator[object]:
        if not self._is_ours(function):
            yield f"{function.__module__}.{function.__qualname__}"
            return
        yield function.__code__
        yield from (function.__defaults__, function.__kwdefaults__)
        yield from (_content(cell) for cell in function.__closure__ or ())
        yield from self._named(function)

    def _of_class(self, cls: type) -> Iterator[object]:
        yield f"{cls.__module__}.{cls.__qualname__}"
        if self._is_ours(cls):
            yield from cls.__bases__
            for name, member in sorted(vars(cls).items()):
                inner = getattr(member, "__func__", getattr(member, "fget", member))
                if isinstance(inner, (types.FunctionType, *_PLAIN)) and name not in ("__doc__", "__module__"):
                    yield name, inner

    def _named(self, function: types.FunctionType) -> Iterator[object]:
        """The globals that a function names, and what it names in modules: x of `module.x`."""
        names = sorted(set(_all_names(function.__code__)))
        for name in names:
            found = function.__globals__.get(name, vars(builtins).get(name))
            if isinstance(found, types.ModuleType):
                yield name, found.__name__
                if self._is_ours(found):
                    yield from (_taken(inner, vars(found)[inner]) for inner in names if inner in vars(found))
            elif name in function.__globals__:
                yield _taken(name, found)

    def _is_ours(self, value: object) -> bool:
        return _package(value) in self._packages


def _taken(name: str, value: object) -> tuple[str, object]:
    """A global with what counts of it: a container that is no constant holds state, which differs by process."""
    return name, type(value).__qualname__ if isinstance(value, dict | list | set) and not name.isupper() else value


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"


def _all_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _all_names(constant)


def _flat(values: object) -> Iterator[object]:
    """The functions among the roots, also those in tuples and dataclasses."""
    if isinstance(values, tuple | list):
        for value in values:
            yield from _flat(value)
    elif dataclasses.is_dataclass(values) and not isinstance(values, type):
        yield from _flat([getattr(values, field.name) for field in dataclasses.fields(values)])
    elif isinstance(values, Callable):  # type: ignore[arg-type]
        yield values


def _package(value: object) -> str:
    """The top package that something was defined in."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return str(name or "").partition(".")[0]


def _name(value: object) -> str:
    """What stands for an object that is neither code nor data: without its address, which differs by process."""
    shown = repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}" if " at 0x" in shown else shown
