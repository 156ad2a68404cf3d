"""The `shaky` backend: the object that the entry point names."""

from __future__ import annotations

from triptych.backend import PackageBackend
from triptych_shaky import faults


class ShakyBackend(PackageBackend):
    """Its ops are the modules of `triptych_shaky.ops`. It has no priority: it runs only where a policy names it."""

    def reasons_unavailable(self) -> list[str]:
        return faults.mistakes()


backend = ShakyBackend("shaky", "triptych_shaky", "triptych-shaky")
