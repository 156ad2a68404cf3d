"""The backend that needs nothing but PyTorch: each op's own composite, one operation after the other.

It comes with core, so that core alone runs. It is last in `auto` everywhere, and a policy can name it like any other.
"""

from __future__ import annotations

from triptych import registry
from triptych.backend import Backend
from triptych.opspec import PhaseFunction


class CompositeBackend(Backend):
    """Runs the composites that the ops' specs carry."""

    def __init__(self) -> None:
        super().__init__("composite", "triptych")

    def ops(self) -> tuple[str, ...]:
        return registry.ops.names()

    def priority(self, device_type: str) -> int | None:
        return 0

    def implementation(self, op: str, phase: str) -> PhaseFunction | None:
        spec = registry.ops.get(op)
        return spec.phase(phase).composite if phase in spec.phases else None


backend = CompositeBackend()
