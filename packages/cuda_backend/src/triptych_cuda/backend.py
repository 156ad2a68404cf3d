"""What Triptych finds under the entry point `cuda`: hand-written C++ for the CPU and CUDA for NVIDIA GPUs."""

from __future__ import annotations

from triptych.backend import PackageBackend
from triptych.call import Call


class CudaBackend(PackageBackend):
    """Its parts are built at first use when it is named; `auto` takes only what is built."""

    def reasons_unavailable(self) -> list[str]:
        from triptych_cuda import parts

        reasons = [part.reasons_unavailable() for part in (parts.CPU, parts.CUDA)]
        return [reason for each in reasons for reason in each] if all(reasons) else []

    def prepare(self, call: Call) -> None:
        from triptych_cuda import parts

        parts.BY_DEVICE[call.device.type].module()

    def reasons_against_auto(self, call: Call) -> list[str]:
        from triptych_cuda import parts

        return parts.reasons_against_auto(call)


backend = CudaBackend(
    name="cuda",
    package="triptych_cuda",
    distribution="triptych-cuda",
    priority={"cuda": 30, "cpu": 20},
)
