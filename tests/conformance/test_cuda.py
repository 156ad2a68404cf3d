"""The conformance suite over `cuda`, where triptych-cuda is installed: C++ kernels on the CPU, CUDA kernels on GPUs."""

from __future__ import annotations

import pytest

from triptych.testing import BackendSuite, Subject

pytest.importorskip("triptych_cuda", reason="triptych-cuda is not installed")


class TestCuda(BackendSuite):
    subject = Subject("cuda", device_types=("cpu", "cuda"))
