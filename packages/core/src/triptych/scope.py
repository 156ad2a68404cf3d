"""The policy in force: innermost `use`, over the environment, over the configuration file, over the default.

The environment and the file are read once, at the first call that needs them. A `use` block lives in a context
variable: it nests, restores, and is seen by its own thread or task only. Each combination of rules is one `Scope`
object that keeps the selections made under it, so that looking up the policy costs one context-variable read.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from triptych import compile_mode, environment, registry
from triptych.errors import EnvironmentVariableError, UsageError
from triptych.policy import Policy, parse

_LIMIT = 4096
"""Cached selections or derived scopes a scope keeps before it starts afresh: shapes that never repeat must not leak."""


P = ParamSpec("P")
R = TypeVar("R")


class Scope:
    """A policy with the selections that were made under it, and how torch.compile sees ops."""

    __slots__ = ("__weakref__", "_children", "_inlining", "_ranked", "mode", "plans", "policy")

    def __init__(self, policy: Policy, mode: compile_mode.Mode = compile_mode.DEFAULT) -> None:
        self.policy = policy
        self.mode = mode
        self.plans: dict[Any, Any] = {}
        self._children: dict[tuple[str, str, compile_mode.Mode], Scope] = {}
        self._inlining: dict[int, str] = {}
        self._ranked = any(rule.ranks is not None for rule in policy.rules)
        with _lock:
            _scopes.add(self)

    def remember(self, key: Any, plan: Any) -> None:
        """Keep what was selected for `key`."""
        if len(self.plans) >= _LIMIT:
            self.plans.clear()
        self.plans[key] = plan

    def extended(self, rules: str, source: str, mode: compile_mode.Mode | None = None) -> Scope:
        """The scope in which `rules` lie over this one's, with another compile mode if one is given."""
        mode = mode or self.mode
        child = self._children.get((rules, source, mode))
        if child is None:
            parsed = parse(rules, source, backends=registry.backends.names(), ops=registry.ops.names())
            child = Scope(self.policy.extended(parsed), mode)
            if len(self._children) >= _LIMIT:
                self._children.clear()
            self._children[rules, source, mode] = child
        return child

    def inlining(self) -> str:
        """Which ops torch.compile traces through, were no tool on: `compile_mode.sites`."""
        number = rank() if self._ranked else 0
        known = self._inlining.get(number)
        if known is None:
            known = self._inlining[number] = compile_mode.sites(self.policy, self.mode, number)
        return known

    def forget(self) -> None:
        """Drop what was selected and parsed: which backends and ops there are has changed."""
        self.plans.clear()
        self._children.clear()


_lock = threading.RLock()
_scopes: weakref.WeakSet[Scope] = weakref.WeakSet()
_used: ContextVar[Scope | None] = ContextVar("triptych.use", default=None)
_outer: ContextVar[tuple[Scope | None, ...]] = ContextVar("triptych.use.outer", default=())
"""What the enclosing `use` blocks of the calling thread or task put in force, outermost first."""
_process: Scope | None = None
_environment_text: str | None = None


used = _used.get
"""The scope of the innermost `use` block of the calling thread or task, or None outside of one."""


def current() -> Scope:
    """The scope in force for the calling thread or task."""
    return _used.get() or _process or process_scope()


def process_scope() -> Scope:
    """The scope of the process: default, configuration file and environment. Read at the first call.

    Raises:
        PolicyError, EnvironmentVariableError: what was found there is not valid.
    """
    global _process, _environment_text
    with _lock:
        if _process is None:
            text = os.environ.get("TRIPTYCH_BACKEND", "")
            policy = environment.policy(os.environ, backends=registry.backends.names(), ops=registry.ops.names())
            mode = compile_mode.from_environment(os.environ)
            from triptych import tools  # which import this module

            tools.install_from_environment(policy)
            _process, _environment_text = Scope(policy, mode), text
        return _process


class use(contextlib.ContextDecorator):  # noqa: N801 - used like a function
    """Put policy `rules` over the policy in force, for the length of a block or of a decorated function.

    Args:
        rules: the grammar of TRIPTYCH_BACKEND; see `triptych.policy`. May be left out if `compile` is given.
        compile: how torch.compile sees the ops that are called inside: "opaque" or "inline"; see
            `triptych.compile_mode`. None leaves that as it is.

    Blocks nest; leaving one restores what was in force before, whatever happened inside. A block holds for the thread
    (or asyncio task) that entered it. Backward of a call made inside runs as the block said, also after it has ended.

    Raises:
        PolicyError: the rules do not parse, or name an op, backend or phase that does not exist. Raised at once, not
            when the block is entered.
        UsageError: neither rules nor a mode, or not a mode that there is. At once, too.

    Example:
        >>> with triptych.use("triton;rms_norm.backward=torch"):
        ...     loss = model(batch)
    """

    def __init__(self, rules: str | None = None, *, compile: str | None = None) -> None:
        if not isinstance(rules, str) and (rules is not None or compile is None):
            raise UsageError(f'triptych.use takes rules as a string, for example "torch"; {rules!r} is none.')
        self.rules = rules or ""
        self._mode = None if compile is None else compile_mode.from_use(compile)
        current().extended(self.rules, "triptych.use", self._mode)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:  # type: ignore[override]
        """Decorate a function: each of its calls runs in a block of its own.

        Raises:
            UsageError: it is a class, a generator or a coroutine function, whose body runs after the call has returned.
        """
        kinds = ("isclass", "isgeneratorfunction", "iscoroutinefunction", "isasyncgenfunction")
        if any(getattr(inspect, kind)(function) for kind in kinds):
            raise UsageError(
                f"triptych.use cannot decorate {function.__qualname__}: what it does happens after the call has "
                f"returned, when the block has ended. Write `with triptych.use({self._arguments()}):` inside it."
            )
        return super().__call__(function)

    def _arguments(self) -> str:
        """As a program writes them."""
        mode = "" if self._mode is None else f"compile={self._mode.name!r}"
        return ", ".join(part for part in (repr(self.rules) if self.rules or not mode else "", mode) if part)

    def __enter__(self) -> None:
        scope = current().extended(self.rules, "triptych.use", self._mode)
        _outer.set((*_outer.get(), _used.get()))
        _used.set(scope)

    def __exit__(self, *exc: object) -> None:
        *outer, before = _outer.get()
        _outer.set(tuple(outer))
        _used.set(before)


@contextlib.contextmanager
def within(scope: Scope) -> Iterator[None]:
    """Put a scope in force as it is, for the length of a block: where the work of one thread goes on in another."""
    token = _used.set(scope)
    try:
        yield
    finally:
        _used.reset(token)


@contextlib.contextmanager
def process_policy(rules: str, *, compile: str | None = None) -> Iterator[None]:
    """Put policy `rules`, and a compile mode, over those of the whole process, for the length of a block.

    For tools and tests that must reach threads they did not start, autograd's among them, where no `use` is visible.
    Not to be entered by two threads at once.
    """
    global _process
    before = process_scope()
    mode = None if compile is None else compile_mode.from_use(compile)
    _process = before.extended(rules, "triptych.scope.process_policy", mode)
    try:
        yield
    finally:
        _process = before


def environment_text() -> str | None:
    """TRIPTYCH_BACKEND as it was when the process scope was read; None when it was not read yet."""
    return _environment_text


def rank() -> int:
    """This process's rank: of the default process group, else of the launcher's RANK, else 0.

    Raises:
        EnvironmentVariableError: RANK is not the number of a process. Taking it for 0 would apply rank 0's rules.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    text = os.environ.get("RANK", "") or "0"
    if not re.fullmatch(r"[0-9]+", text):
        raise EnvironmentVariableError(
            f"RANK is {text!r}. It must be this process's number, 0 or greater, as torchrun sets it. "
            f"Correct it, or unset it in a program of one process."
        )
    return int(text)


def _forget_selections() -> None:
    with _lock:
        scopes = list(_scopes)
    for scope in scopes:
        scope.forget()


def _after_fork() -> None:
    """Locks of threads that no longer exist, and plans that hold the parent's counters, end with the fork."""
    global _lock
    _lock = threading.RLock()
    _forget_selections()


registry.backends.on_change.append(_forget_selections)
registry.ops.on_change.append(_forget_selections)
os.register_at_fork(after_in_child=_after_fork)
