"""Which backends and ops there are: entry points, found once, loaded when needed, listed in a fixed order.

Listing reads metadata and imports nothing. A plug-in that fails to import is kept as broken with its cause and is
shown by `triptych info`; it never stops the others.
"""

from __future__ import annotations

import importlib.metadata
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from triptych.backend import Backend
from triptych.errors import PluginError, nearest
from triptych.opspec import OpSpec
from triptych.policy import AUTO, NAME

BACKENDS_GROUP = "triptych.backends"
OPS_GROUP = "triptych.ops"

T = TypeVar("T")


@dataclass
class _Entry(Generic[T]):
    """One name in a group: where it comes from, and what loading it gave."""

    name: str
    origin: str
    load: Callable[[], Any]
    loaded: T | None = None
    error: str = ""
    cause: BaseException | None = None


@dataclass
class Group(Generic[T]):
    """The plug-ins of one entry-point group, by name."""

    group: str
    kind: type[T]
    word: str
    _entries: dict[str, _Entry[T]] | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)
    on_change: list[Callable[[], None]] = field(default_factory=list)
    """Called after a plug-in was added or removed in process, so that cached selections can be dropped."""

    def names(self) -> tuple[str, ...]:
        """All names, broken plug-ins included, sorted."""
        return tuple(sorted(self._found()))

    def origin(self, name: str) -> str:
        """The distribution and version that provide `name`."""
        return self._entry(name).origin

    def get(self, name: str) -> T:
        """The plug-in called `name`, loaded on first use. PluginError when it is unknown or broken."""
        entry = self._entry(name)
        if entry.loaded is not None:
            return entry.loaded
        with self._lock:
            if entry.loaded is None and not entry.error:
                self._load(entry)
        if entry.error:
            # A new exception each time: one that is raised again and again would gather every traceback.
            raise PluginError(entry.error) from entry.cause
        assert entry.loaded is not None
        return entry.loaded

    def broken(self) -> dict[str, PluginError]:
        """Name and cause of every plug-in that cannot be loaded. Loads them all."""
        causes: dict[str, PluginError] = {}
        for name in self.names():
            try:
                self.get(name)
            except PluginError as cause:
                causes[name] = cause
        return causes

    @contextmanager
    def added(self, name: str, plugin: T) -> Iterator[T]:
        """Register `plugin` in this process for the length of the block. A name that is taken is an error."""
        with self._lock:
            entries = self._found()
            if name in entries:
                raise PluginError(
                    f"{self.word} {name!r} is already provided by {entries[name].origin}. Choose another."
                )
            entries[name] = _Entry(name, "this process", lambda: plugin, loaded=plugin)
        self._changed()
        try:
            yield plugin
        finally:
            with self._lock:
                del self._found()[name]
            self._changed()

    def _changed(self) -> None:
        for callback in self.on_change:
            callback()

    def _after_fork(self) -> None:
        """A lock that another thread held at the moment of the fork would never be released in the child."""
        self._lock = threading.RLock()

    def _entry(self, name: str) -> _Entry[T]:
        entries = self._found()
        if name not in entries:
            raise PluginError(f"There is no {self.word.lower()} {name!r}. {nearest(name, entries)}")
        return entries[name]

    def _found(self) -> dict[str, _Entry[T]]:
        if self._entries is None:
            with self._lock:
                if self._entries is None:
                    self._entries = self._discover()
        return self._entries

    def _discover(self) -> dict[str, _Entry[T]]:
        claims: dict[str, dict[str, importlib.metadata.EntryPoint]] = {}
        for point in importlib.metadata.entry_points(group=self.group):
            # The same distribution can be on sys.path twice (an editable install beside its build): one claim.
            claims.setdefault(point.name, {})[_origin(point)] = point
        entries: dict[str, _Entry[T]] = {}
        for name in sorted(claims):
            origins = sorted(claims[name])
            entry: _Entry[T] = _Entry(name, " and ".join(origins), claims[name][origins[0]].load)
            if not NAME.fullmatch(name) or name == AUTO:
                entry.error = (
                    f"{self.word} {name!r} of {entry.origin} has a name that no rule can mean. A name is letters, "
                    f"digits, _ and -, does not begin with a digit or -, and is not {AUTO!r}. Uninstall it."
                )
            elif len(origins) > 1:
                entry.error = (
                    f"{self.word} {name!r} is claimed by {len(origins)} distributions: {entry.origin}. "
                    "Uninstall all but one of them."
                )
            entries[name] = entry
        return entries

    def _load(self, entry: _Entry[T]) -> None:
        try:
            plugin = entry.load()
            name = getattr(plugin, "name", None)
        except KeyboardInterrupt:
            raise
        except BaseException as cause:  # some raise SystemExit, GeneratorExit or a test runner's Skipped at import
            entry.cause = cause
            entry.error = (
                f"{self.word} {entry.name!r} of {entry.origin} failed to load: {type(cause).__name__}: {cause}. "
                "Reinstall or uninstall that distribution."
            )
            return
        if not isinstance(plugin, self.kind) or name != entry.name:
            entry.error = (
                f"{self.word} {entry.name!r} of {entry.origin} points to a {type(plugin).__qualname__} named {name!r}; "
                f"it must point to a {self.kind.__module__}.{self.kind.__qualname__} whose name is {entry.name!r}."
            )
            return
        entry.loaded = plugin


def _origin(point: importlib.metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


backends: Group[Backend] = Group(BACKENDS_GROUP, Backend, "Backend")
ops: Group[OpSpec] = Group(OPS_GROUP, OpSpec, "Op")

os.register_at_fork(after_in_child=backends._after_fork)
os.register_at_fork(after_in_child=ops._after_fork)
