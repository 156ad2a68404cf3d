"""Fixtures for the tests of core."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from triptych import scope, tools

sys.path.insert(0, str(Path(__file__).parent))  # spies.py and the like


@pytest.fixture
def fresh_scope(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty working directory, no TRIPTYCH_ variables, and a process scope that is read anew. Returns the directory."""
    for name in [name for name in os.environ if name.startswith("TRIPTYCH_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scope, "_process", None)
    monkeypatch.setattr(scope, "_environment_text", None)
    return tmp_path


@pytest.fixture(autouse=True)
def tools_end_with_the_test() -> Iterator[None]:
    """Take out what a test's environment variables switched on."""
    yield
    tools.uninstall()


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make an installed distribution out of nothing: metadata with entry points, and modules, on sys.path."""

    def make(name: str, entry_points: str, version: str = "1.0", **modules: str) -> Path:
        root = tmp_path / f"site-{name}-{version}"
        info = root / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)
        for module, text in modules.items():
            (root / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(root)
        return root

    return make


@pytest.fixture
def capturing(fresh_scope: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Switch capture on for a selector; returns the directory."""

    def switch_on(selector: str, policy: str = "torch") -> Path:
        monkeypatch.setenv("TRIPTYCH_CAPTURE", f"captures|{selector}")
        monkeypatch.setenv("TRIPTYCH_BACKEND", policy)
        monkeypatch.setattr(scope, "_process", None)
        return fresh_scope / "captures"

    return switch_on
