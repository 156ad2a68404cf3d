"""Where a finished binary may lie: in the package, built ahead of time, or in the cache, built at first use."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych_cuda.native import toolchain
from triptych_cuda.native.builder import MANIFEST, build, cache_root, folder_of
from triptych_cuda.native.recipe import Recipe, file_name, fingerprint, recipe
from triptych_cuda.native.toolchain import Missing, Tool, Torch

AHEAD_OF_TIME = Path(__file__).parent.parent / "binaries"


@dataclass(frozen=True)
class Place:
    """What is known about one part on this machine.

    Attributes:
        binary: the extension module that may be loaded as it is; None when there is none.
        origin: "ahead of time" or "cache", for reports; "" without a binary.
        recipe: how to build it here; None when it cannot be built.
        ninja: what builds it; None when it cannot be built.
        reasons: why it cannot be built, as whole sentences; empty when it can.
        notes: what is worth telling though nothing is wrong, such as a binary that was passed over.
    """

    part: str
    binary: Path | None
    origin: str
    recipe: Recipe | None
    ninja: str | None
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()


def find(part: str, ahead: Path = AHEAD_OF_TIME, root: Path | None = None) -> Place:
    """Look for the binary of `part`, and for what it would take to build one.

    Args:
        part: "cpu" or "cuda".
        ahead: the folder of binaries built ahead of time.
        root: the cache; None means `cache_root()`.
    """
    root = cache_root() if root is None else root
    torch = toolchain.torch_build()
    if isinstance(torch, Missing):
        return Place(part, None, "", None, None, (torch.reason,))
    expected = fingerprint(part, torch)
    packed, notes = _ahead_of_time(part, torch, expected, ahead)
    if packed is not None:
        return Place(part, packed, "ahead of time", None, None, ())
    made, ninja, reasons = _recipe_here(part, torch)
    if made is not None:
        kept = folder_of(made, root) / made.target
        found = kept if kept.is_file() else None
    else:
        # No compiler to compare with: any build that agrees in everything else will do.
        found = next((path for path in sorted(root.glob(f"{part}-{expected}-*/{file_name(part)}"))), None)
    return Place(part, found, "cache" if found else "", made, ninja, reasons, notes)


def make(place: Place, root: Path | None = None) -> Path:
    """Build the part of `place`, which must have a recipe. Raises CompileError."""
    assert place.recipe is not None
    assert place.ninja is not None
    return build(place.recipe, place.ninja, cache_root() if root is None else root)


def _recipe_here(part: str, torch: Torch) -> tuple[Recipe | None, str | None, tuple[str, ...]]:
    compiler, ninja = toolchain.compiler(), toolchain.ninja()
    reasons = toolchain.missing([compiler, ninja, toolchain.python_headers()])
    nvcc: Tool | Missing | None = None
    if part == "cuda":
        nvcc = toolchain.nvcc()
        reasons += toolchain.cuda_reasons(torch, nvcc)
    if reasons or isinstance(compiler, Missing) or isinstance(ninja, Missing) or isinstance(nvcc, Missing):
        return None, None, tuple(reasons)
    return recipe(part, torch, compiler, nvcc), ninja.path, ()


def _ahead_of_time(part: str, torch: Torch, expected: str, folder: Path) -> tuple[Path | None, tuple[str, ...]]:
    """The binary in the package if it fits, else why it was passed over (nothing where there is none)."""
    entry = manifest(folder).get("parts", {}).get(part)
    if entry is None:
        return None, ()
    path = folder / str(entry.get("file"))
    if entry.get("fingerprint") == expected and path.is_file():
        return path, ()
    built_for = f"torch {entry.get('torch')} and {entry.get('python')}"
    return None, (
        f"The {part} binary in the package was built for {built_for}, or from other sources; with torch "
        f"{torch.version} it is passed over, and the part is built at first use.",
    )


def manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of binaries; empty when there is none or it cannot be read."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("schema") == 1 else {}
