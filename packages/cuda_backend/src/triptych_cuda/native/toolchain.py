"""What this machine has to build with. Each look-up returns what was found, or `Missing` with the reason and remedy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tool:
    """A program and what it says about its version."""

    path: str
    version: str


@dataclass(frozen=True)
class Missing:
    """Something that is needed and was not found: a whole sentence, with the remedy."""

    reason: str


@dataclass(frozen=True)
class Torch:
    """The torch that is imported in this process, as far as a binary depends on it.

    Attributes:
        version: with its local part, as in 2.13.0+cpu.
        cuda: the CUDA release it was built with, as in 13.0; None for a build without CUDA.
        root: the folder that holds its include/ and lib/.
        cxx11_abi: the value of _GLIBCXX_USE_CXX11_ABI it was compiled with.
    """

    version: str
    cuda: str | None
    root: Path
    cxx11_abi: bool


def compiler() -> Tool | Missing:
    """The C++ compiler: $CXX, else c++, g++ or clang++ from PATH."""
    named = os.environ.get("CXX", "").strip()
    for name in [named] if named else ["c++", "g++", "clang++"]:
        path = shutil.which(name)
        if path is not None:
            version = _first_line([path, "--version"])
            if version is not None:
                return Tool(path, version)
    looked = f"CXX names {named!r}, which does not run" if named else "none of c++, g++ and clang++ is on PATH"
    return Missing(
        f"There is no C++ compiler: {looked}. Install g++ 10 or clang 12, or later, or set CXX to the path of one."
    )


def ninja() -> Tool | Missing:
    """ninja, from the Python package of that name or from PATH."""
    path: str | None = None
    try:
        import ninja as package

        path = shutil.which("ninja", path=package.BIN_DIR)
    except ImportError:
        pass
    path = path or shutil.which("ninja")
    version = None if path is None else _first_line([path, "--version"])
    if path is None or version is None:
        return Missing("ninja is neither an installed Python package nor on PATH. Install it: pip install ninja.")
    return Tool(path, version)


def nvcc() -> Tool | Missing:
    """nvcc: from $CUDA_HOME or $CUDA_PATH, from PATH, or from /usr/local/cuda."""
    candidates: list[str | None] = [
        os.path.join(os.environ[name], "bin", "nvcc") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)
    ]
    candidates += [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    for path in candidates:
        if path is not None and os.access(path, os.X_OK):
            release = _first_match([path, "--version"], r"release [\d.]+, V[\d.]+")
            if release is not None:
                return Tool(path, release)
    return Missing(
        "There is no nvcc: not under CUDA_HOME, not on PATH, not in /usr/local/cuda/bin. Install the CUDA toolkit of "
        "the release that torch was built with, or set CUDA_HOME."
    )


def python_headers() -> Path | Missing:
    """The folder of Python.h."""
    folder = Path(sysconfig.get_path("include"))
    if (folder / "Python.h").is_file():
        return folder
    return Missing(
        f"There is no Python.h in {folder}. Install the development files of this Python (python3-dev on Debian)."
    )


def torch_build() -> Torch | Missing:
    """The importable torch."""
    try:
        import torch
    except ImportError as cause:
        return Missing(f"torch cannot be imported ({cause}). Install torch 2.11 or later.")
    root = Path(torch.__file__).parent
    return Torch(str(torch.__version__), torch.version.cuda, root, bool(torch.compiled_with_cxx11_abi()))


def cuda_reasons(torch: Torch | Missing, found: Tool | Missing) -> list[str]:
    """Why the CUDA part cannot be compiled with this torch and this nvcc, the compiler and ninja aside."""
    if isinstance(torch, Missing):
        return []
    if torch.cuda is None:
        return [
            f"torch {torch.version} is built without CUDA, and the CUDA part is compiled against torch. Install a "
            f"CUDA build of torch."
        ]
    if isinstance(found, Missing):
        return [found.reason]
    release = re.search(r"release (\d+)", found.version)
    if release is None or release[1] != torch.cuda.split(".")[0]:
        return [
            f"nvcc at {found.path} is {found.version} and torch {torch.version} is built with CUDA {torch.cuda}; their "
            f"major releases must agree. Set CUDA_HOME to a CUDA {torch.cuda.split('.')[0]} toolkit."
        ]
    return []


def missing(found: Iterable[object]) -> list[str]:
    """The reasons among what look-ups returned."""
    return [item.reason for item in found if isinstance(item, Missing)]


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _first_line(command: list[str]) -> str | None:
    output = _output(command)
    return output.strip().splitlines()[0] if output and output.strip() else None


def _first_match(command: list[str], pattern: str) -> str | None:
    match = re.search(pattern, _output(command) or "")
    return match[0] if match else None
