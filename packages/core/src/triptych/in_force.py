"""`in_force.inlining`: which ops torch.compile traces through, for the calling thread or task, at this moment.

The attribute is computed whenever it is read (PEP 562). torch.compile takes what it reads from a module for a value
that may change, and compares it before each run of what it compiled: a `use` block or a tool that changes what is
traced through leads to another graph, never to a stale one. A context variable by itself it cannot read, and a global
would be the same in all threads. One comparison a graph, however many ops are in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych import compile_mode, scope

if TYPE_CHECKING:
    inlining: str


def _inlining() -> str:
    """The text of `compile_mode.sites`; "" while nothing is to be traced through."""
    sites = scope.current().inlining()
    if not sites:
        return ""
    obstacle = compile_mode.obstacle()
    if obstacle:
        compile_mode.log_once(f"Compile mode inline is not applied, ops stay opaque: {obstacle}.")
        return ""
    return sites


def __getattr__(name: str) -> str:
    if name == "inlining":
        return _inlining()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
