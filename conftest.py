"""Makes plain `pytest` work in a checkout whose packages are not installed (a GPU machine without a network).

What an installer would leave behind, metadata with entry points, is laid into a temporary folder and put on the path
with the source folders, for this process and its children. Packages that are installed are left as they are.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent
PROJECTS = sorted((*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("examples/*/pyproject.toml")))


def missing() -> dict[Path, dict[str, Any]]:
    """The projects of this checkout that are not installed, by folder."""
    projects = {path.parent: tomllib.loads(path.read_text())["project"] for path in PROJECTS}
    installed = {
        point.metadata["Name"].lower() for point in importlib.metadata.distributions() if point.metadata["Name"]
    }
    return {folder: project for folder, project in projects.items() if project["name"] not in installed}


def lay_metadata(site: Path, project: dict[str, Any]) -> None:
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines: list[str] = []
    for group, points in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def make_importable(projects: dict[Path, dict[str, Any]]) -> None:
    site = Path(tempfile.mkdtemp(prefix="triptych-site-"))
    atexit.register(shutil.rmtree, site, ignore_errors=True)
    paths = [str(site)]
    for folder, project in projects.items():
        lay_metadata(site, project)
        source = folder / "src"
        paths.append(str(source if source.is_dir() else folder))
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join((*paths, *filter(None, [os.environ.get("PYTHONPATH")])))


uninstalled = missing()
if uninstalled:
    make_importable(uninstalled)
    if any(project["name"] == "triptych" for project in uninstalled.values()):
        pytest_plugins = ["triptych.testing.plugin"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first, so that none is left to one worker at the end; skip what needs hardware that is not here."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    needed = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("two_gpus")]
    if not needed:
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in needed:
        if count == 0:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU that torch can use"))
        elif count == 1 and item.get_closest_marker("two_gpus"):
            item.add_marker(pytest.mark.skip(reason="needs two NVIDIA GPUs, one is here"))
