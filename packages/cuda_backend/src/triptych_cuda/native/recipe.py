"""What is compiled for each part, with which flags, and the hashes that name the result.

A recipe's *fingerprint* covers what the binary must agree with: sources, flags, torch, Python, processor. A binary
built ahead of time matches or not by that alone. Its *key* adds the compilers' versions and names a folder in the
cache.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych_cuda.native.toolchain import Tool, Torch

PARTS = ("cpu", "cuda")
CSRC = Path(__file__).parent.parent / "csrc"
EXTENSION = sysconfig.get_config_var("EXT_SUFFIX") or ".so"

# Which sources go into a part; whatever else lies in these folders is a header and is hashed with them.
CPU_BINDINGS = ("binding", "binding_analog_tiles", "binding_analog_linear")
CUDA_BINDINGS = ("binding_cuda", "binding_cuda_analog")
BORDER = ("analog.h", "border.h", "border_analog.h")
FOLDERS = {
    "cpu": ("cpu", *(f"{name}.cpp" for name in CPU_BINDINGS), "binding_cpu.h", "binding_analog.h", *BORDER),
    "cuda": ("cuda", *(f"{name}.cpp" for name in CUDA_BINDINGS), "cuda_products.h", *BORDER),
}

X86_VARIANTS: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
}
KERNEL_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off"),
    # g++ 12 takes the deliberately undefined registers inside its own AVX-512 header for a mistake of ours.
    *("-Wall", "-Wextra", "-Wno-unknown-warning-option", "-Wno-maybe-uninitialized", "-Wno-psabi"),
)
# OpenMP is a flag of the compiler only, never of the linker: the symbols then come from the library that torch itself
# loaded, so that there is one pool of threads, and a wheel needs no OpenMP library of its own. Likewise the CUDA
# runtime: the one that torch loaded.
BINDING_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall")
OPENMP = "-fopenmp"
DEVICE_FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden")
# Binaries for A100 (and, by binary compatibility, 8.6 and 8.9) and Hopper; PTX for what comes after.
ARCHITECTURES = (
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_90,code=compute_90",
)
LINK_FLAGS = ("-shared", "-Wl,--no-as-needed")
LIBRARIES = {
    "cpu": ("-ltorch_python", "-ltorch_cpu", "-lc10"),
    "cuda": ("-ltorch_python", "-ltorch_cpu", "-lc10_cuda", "-lc10"),
}


@dataclass(frozen=True)
class Step:
    """One compilation: the object file it makes, and the command without its output and input."""

    source: Path
    object: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """How to build one part. `link` is the command without its output and objects."""

    part: str
    fingerprint: str
    key: str
    steps: tuple[Step, ...]
    link: tuple[str, ...]
    libraries: tuple[str, ...]

    @property
    def target(self) -> str:
        return file_name(self.part)

    def ninja(self) -> str:
        """The text of the ninja file; objects and the target lie beside it."""
        lines = ["rule run", "  command = $command", "  description = $label", ""]
        for step in self.steps:
            command = (*step.command, "-c", str(step.source), "-o", step.object)
            lines += _edge(step.object, [str(step.source)], command, f"compiling {step.object}")
        objects = [step.object for step in self.steps]
        link = (*self.link, *objects, "-o", self.target, *self.libraries)
        lines += _edge(self.target, objects, link, f"linking {self.target}")
        return "\n".join([*lines, f"default {_escaped(self.target)}", ""])


def file_name(part: str) -> str:
    """The file name of a part's extension module."""
    return f"_{part}{EXTENSION}"


def fingerprint(part: str, torch: Torch) -> str:
    """The hash of everything a binary must agree with to be loaded: see the module's docstring."""
    flags: list[object] = [KERNEL_FLAGS, BINDING_FLAGS, LINK_FLAGS, LIBRARIES[part]]
    flags += [OPENMP, _variants()] if part == "cpu" else [DEVICE_FLAGS, ARCHITECTURES]
    return _hash(
        _sources_hash(part),
        flags,
        [torch.version, torch.cuda, torch.cxx11_abi],
        [sys.implementation.cache_tag, EXTENSION, sys.platform, platform.machine()],
    )


def recipe(part: str, torch: Torch, compiler: Tool, nvcc: Tool | None) -> Recipe:
    """How to build `part` ("cpu" or "cuda") with these tools. nvcc is needed for "cuda" and ignored for "cpu"."""
    includes = [f"-isystem{torch.root / 'include'}", f"-I{sysconfig.get_path('include')}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.cxx11_abi)}"
    binding = [*BINDING_FLAGS, abi, *includes]
    versions = [compiler.version]
    if part == "cpu":
        steps = _cpu_steps(compiler.path, [compiler.path, OPENMP, *binding])
    else:
        assert nvcc is not None
        versions.append(nvcc.version)
        steps = _cuda_steps(nvcc.path, compiler.path, abi, includes)
    print_of_it = fingerprint(part, torch)
    return Recipe(
        part=part,
        fingerprint=print_of_it,
        key=f"{print_of_it}-{_hash(versions)[:8]}",
        steps=tuple(steps),
        link=(compiler.path, *LINK_FLAGS),
        libraries=(f"-L{torch.root / 'lib'}", *LIBRARIES[part]),
    )


def device_sources() -> list[Path]:
    """The .cu files, in a fixed order."""
    return sorted((CSRC / "cuda").glob("*.cu"))


def _variants() -> dict[str, tuple[str, ...]]:
    return X86_VARIANTS if platform.machine() in ("x86_64", "AMD64") else {"baseline": ()}


def _cpu_steps(compiler: str, binding: Sequence[str]) -> list[Step]:
    x86 = ("-DTRIPTYCH_X86",) if len(_variants()) > 1 else ()
    dispatch = CSRC / "cpu" / "dispatch.cpp"
    kernels = [
        Step(source, f"{source.stem}.{name}.o", (compiler, *KERNEL_FLAGS, f"-DTRIPTYCH_ISA={name}", *isa))
        for source in sorted((CSRC / "cpu").glob("*.cpp"))
        if source != dispatch
        for name, isa in _variants().items()
    ]
    return [
        *(Step(CSRC / f"{name}.cpp", f"{name}.o", tuple(binding)) for name in CPU_BINDINGS),
        *kernels,
        Step(dispatch, "dispatch.o", (compiler, *KERNEL_FLAGS, *x86)),
    ]


def _cuda_steps(nvcc: str, compiler: str, abi: str, includes: Sequence[str]) -> list[Step]:
    # nvcc compiles the binding too, as plain C++: it knows where its own toolkit's headers are, wherever that is.
    host = [flag for flag in BINDING_FLAGS if flag.startswith(("-f", "-W"))]
    other = [flag for flag in BINDING_FLAGS if flag not in host]
    system = [f"-isystem={path.removeprefix('-isystem').removeprefix('-I')}" for path in includes]
    binding = (nvcc, f"-ccbin={compiler}", *other, f"-Xcompiler={','.join(host)}", abi, *system)
    device = (nvcc, f"-ccbin={compiler}", *DEVICE_FLAGS, *ARCHITECTURES)
    return [
        *(Step(CSRC / f"{name}.cpp", f"{name}.o", binding) for name in CUDA_BINDINGS),
        *(Step(source, f"{source.stem}.cu.o", device) for source in device_sources()),
    ]


def _sources_hash(part: str) -> str:
    files: list[Path] = []
    for name in FOLDERS[part]:
        path = CSRC / name
        files += sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]
    code = [file for file in files if file.suffix in (".h", ".cpp", ".cu", ".cuh")]
    return _hash(*([file.relative_to(CSRC).as_posix(), _digest(file.read_bytes())] for file in code))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _hash(*values: object) -> str:
    return _digest(json.dumps(values, sort_keys=True).encode())[:16]


def _edge(output: str, inputs: Sequence[str], command: Sequence[str], label: str) -> list[str]:
    names = " ".join(map(_escaped, inputs))
    text = " ".join(shlex.quote(word) for word in command).replace("$", "$$")
    return [f"build {_escaped(output)}: run {names}", f"  command = {text}", f"  label = {label}", ""]


def _escaped(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
