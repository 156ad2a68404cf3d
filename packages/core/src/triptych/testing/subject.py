"""What is under test: a backend, and what its author says about it, as data with safe defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from triptych import registry
from triptych.backend import Backend
from triptych.call import PHASES


@dataclass(frozen=True)
class Subject:
    """A backend under test. Only the name is needed; every other attribute has the strictest default.

    Attributes:
        backend: its name. The suite runs every call under a policy that names it, and asserts that it ran.
        device_types: the device types to test. Empty: those on which it has a place in `auto`; all, when it has none.
            One that this machine lacks is left out; a subject of which nothing is left is skipped with that reason.
        ops: the ops to test. Empty: every op of which it implements a phase.
        same_for_any_thread_count: whether results on the CPU are the same bits whatever the number of threads. The
            suite compares runs with 1, 2 and 3 threads; declare False, and it does not.
        thin: why the suite should run a thinner grid: one sample a layout and float32 beside one bfloat16 and one
            float16 case, where the full grid takes every sample in every dtype. For backends so slow that the full
            grid would not be run at all.
        exclusions: expected failures: from a glob over test ids, "check[case]" or "check", to the reason. Strict:
            an excluded case runs, and when it passes, the expired exclusion is an error.
    """

    backend: str
    device_types: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    same_for_any_thread_count: bool = True
    thin: str = ""
    exclusions: Mapping[str, str] = field(default_factory=dict)

    @property
    def plugin(self) -> Backend:
        """The backend itself. PluginError when it is unknown or broken."""
        return registry.backends.get(self.backend)

    def tested_ops(self) -> tuple[str, ...]:
        """The ops to test, of those that there are."""
        asked = self.ops or self.plugin.ops()
        return tuple(name for name in registry.ops.names() if name in asked)

    def tested_device_types(self) -> tuple[str, ...]:
        """The device types to test, of those that this machine has."""
        present = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        if self.device_types:
            return tuple(kind for kind in present if kind in self.device_types)
        if all(self.plugin.priority(kind) is None for kind in ("cpu", "cuda")):
            return present  # it is never in `auto`, which says nothing about where it runs
        return tuple(kind for kind in present if self.plugin.priority(kind) is not None)

    def implements(self, op: str) -> tuple[str, ...]:
        """The phases of `op` that the backend implements."""
        phases = registry.ops.get(op).phases
        return tuple(each for each in PHASES if each in phases and self.plugin.implementation(op, each) is not None)
