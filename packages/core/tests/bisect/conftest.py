"""Fixtures for the tests of bisect."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # workshop.py, simulated.py

from workshop import Workshop


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    """A folder with a small job and a faulty backend."""
    return Workshop(tmp_path)
