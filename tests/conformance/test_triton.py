"""The conformance suite over `triton`, where triptych-triton is installed: compiled on a GPU, else interpreted.

A process compiles or interprets, not both: triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import os

import pytest
import torch

from triptych.testing import BackendSuite, Subject

pytest.importorskip("triptych_triton", reason="triptych-triton is not installed")

if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):

    class TestTriton(BackendSuite):
        subject = Subject("triton", device_types=("cuda",))

else:
    os.environ["TRITON_INTERPRET"] = "1"

    class TestTritonInterpreted(BackendSuite):
        subject = Subject("triton", device_types=("cpu",), thin="the interpreter takes milliseconds a row")
