"""Building the parts ahead of time, into a folder of the package: what setup.py does when a wheel is made."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from triptych_cuda.native import toolchain
from triptych_cuda.native.binaries import find, make
from triptych_cuda.native.builder import MANIFEST
from triptych_cuda.native.recipe import EXTENSION, PARTS
from triptych_cuda.native.toolchain import Missing


def buildable() -> dict[str, tuple[str, ...]]:
    """For each part, why it cannot be built here; an empty tuple where it can."""
    nowhere = Path("/nonexistent")
    return {part: find(part, ahead=nowhere, root=nowhere).reasons for part in PARTS}


def build_into(folder: Path) -> tuple[str, ...]:
    """Build every part that can be built here into `folder`, with a manifest; return the parts built.

    Raises:
        CompileError: a part that should build does not. A wheel that silently lacks it would be worse.
    """
    torch = toolchain.torch_build()
    if isinstance(torch, Missing):
        return ()
    parts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for part in PARTS:
            place = find(part, ahead=root / "none", root=root / "cache")
            if place.recipe is None:
                continue
            binary = make(place, root / "cache")
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy2(binary, folder / binary.name)
            parts[part] = {
                "file": binary.name,
                "fingerprint": place.recipe.fingerprint,
                "torch": torch.version,
                "cuda": torch.cuda,
                "python": f"{sys.implementation.cache_tag} ({EXTENSION})",
            }
    if parts:
        text = json.dumps({"schema": 1, "parts": parts}, indent=1) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")
    return tuple(parts)
