"""Parity with aihwkit-lightning's PyTorch mode. Skipped where it is not installed: `nox -s parity` brings it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # peer.py, grid.py, margins.py, comparing.py, running.py


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No policy, and the reference in its PyTorch mode: its variable switches to the Triton mode whatever it says."""
    for name in [name for name in os.environ if name.startswith(("TRIPTYCH_", "AIHWKIT_", "_AIHWKIT_"))]:
        monkeypatch.delenv(name)
