"""Loading the plug-in, and its sentences."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from triptych.call import Call, TensorMeta
from triptych_triton.backend import backend


def test_listing_does_not_import_triton() -> None:
    """In a process of its own, since other tests import it here."""
    body = """
import sys
from triptych_triton.backend import backend
assert {"rms_norm", "add_rms_norm"} <= set(backend.ops())
backend.reasons_unavailable()
assert "triton" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", body], env=dict(os.environ), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_without_a_gpu_it_says_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (reason,) = backend.reasons_unavailable()
    assert "No CUDA device was found" in reason
    assert "TRITON_INTERPRET=1" in reason
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.reasons_unavailable() == []


def test_without_triton_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (reason,) = backend.reasons_unavailable()
    assert "install triton>=3.6,<3.10" in reason


def test_tensors_elsewhere_are_refused() -> None:
    pytest.importorskip("triton")
    x = TensorMeta((2, 8), (8, 1), torch.float32, torch.device("meta"))
    call = Call("rms_norm", "forward", (("x", x), ("weight", None)), ())
    (reason,) = backend.reasons_against(call)
    assert "on meta" in reason
    assert "TRITON_INTERPRET=1" in reason


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    import triptych_triton.requirements as requirements

    monkeypatch.setattr(requirements, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    h = TensorMeta((2, 8), (8, 1), torch.float16, torch.device("cuda", 0))
    call = Call("add_rms_norm", "backward", (("dy", h), ("dh", None), ("h", h), ("weight", None), ("rstd", h)), ())
    (reason,) = backend.reasons_against(call)
    assert "compute capability 7.5" in reason
