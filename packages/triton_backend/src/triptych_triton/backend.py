"""The plug-in object. Light: triton is imported when an op is loaded."""

import importlib.util
import os

from triptych.backend import PackageBackend


class TritonBackend(PackageBackend):
    """Runs on NVIDIA GPUs, and anywhere in Triton's interpreter."""

    def reasons_unavailable(self) -> list[str]:
        if importlib.util.find_spec("triton") is None:
            return ["The package triton cannot be imported; install triton>=3.6,<3.10 (it has wheels for Linux)."]
        if _interpreter_asked_for():
            return []
        import torch

        if not torch.cuda.is_available():
            return [
                "No CUDA device was found and TRITON_INTERPRET is not set; run on a machine with an NVIDIA GPU and "
                "a CUDA build of torch, or start the process with TRITON_INTERPRET=1 to interpret on the CPU."
            ]
        return []


def _interpreter_asked_for() -> bool:
    """TRITON_INTERPRET as triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


backend = TritonBackend(name="triton", package="triptych_triton", distribution="triptych-triton", priority={"cuda": 20})
