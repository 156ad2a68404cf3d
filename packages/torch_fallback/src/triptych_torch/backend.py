"""The `torch` backend: runs wherever PyTorch runs."""

from __future__ import annotations

from triptych.backend import PackageBackend


class TorchBackend(PackageBackend):
    """In `auto` on every device type, after the backends that were written for one."""

    def priority(self, device_type: str) -> int | None:
        return 10


backend = TorchBackend("torch", "triptych_torch", "triptych-torch")
