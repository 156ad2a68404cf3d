"""What nvcc and ptxas say about the device code: registers, spills, stack and shared memory of every kernel.

Needs nvcc and nothing else: neither a GPU nor torch, since device code includes no framework header.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych_cuda.native.recipe import DEVICE_FLAGS, device_sources
from triptych_cuda.native.toolchain import Missing, nvcc


class DeviceCompileError(RuntimeError):
    """nvcc rejected a source; the text holds the command and what nvcc said."""


@dataclass(frozen=True)
class Kernel:
    """One kernel as compiled for one architecture.

    Attributes:
        source: name of the .cu file.
        name: demangled where the toolkit has cu++filt, else mangled.
        architecture: sm_90, ...
        registers: a thread.
        stack, spill_stores, spill_loads: bytes a thread.
        shared: bytes of static shared memory a block.
    """

    source: str
    name: str
    architecture: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


def compile_device_code(
    architectures: Sequence[str] = ("sm_80", "sm_90"), sources: Sequence[Path] | None = None
) -> list[Kernel]:
    """Compile every .cu file to a cubin for each architecture and return what ptxas reports.

    Args:
        architectures: as nvcc's -arch takes them.
        sources: the files; None means all of the package's.

    Raises:
        DeviceCompileError: nvcc is missing or rejects a source.
    """
    tool = nvcc()
    if isinstance(tool, Missing):
        raise DeviceCompileError(tool.reason)
    kernels: list[Kernel] = []
    with tempfile.TemporaryDirectory() as scratch:
        for source in device_sources() if sources is None else sources:
            for architecture in architectures:
                output = Path(scratch) / f"{source.stem}.{architecture}.cubin"
                command = [tool.path, *DEVICE_FLAGS, f"-arch={architecture}", "-cubin", "-Xptxas=-v", str(source)]
                done = _run([*command, "-o", str(output)])
                if done.returncode != 0:
                    raise DeviceCompileError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
                kernels += parse_report(source.name, architecture, done.stdout + done.stderr)
    return _demangled(kernels, Path(tool.path))


_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


def parse_report(source: str, architecture: str, text: str) -> list[Kernel]:
    """The kernels in the output of `-Xptxas -v`; functions that are not kernels are passed over."""
    kernels: list[Kernel] = []
    name = ""
    frame = (0, 0, 0)
    for line in text.splitlines():
        if entry := _ENTRY.search(line):
            name, frame = entry[1], (0, 0, 0)
        elif found := _FRAME.search(line):
            frame = (int(found[1]), int(found[2]), int(found[3]))
        elif (used := _USED.search(line)) and name:
            kernels.append(Kernel(source, name, architecture, int(used[1]), *frame, int(used[2] or 0)))
            name = ""
    return kernels


def _run(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    # What compilers print is UTF-8 for the most part, whatever the locale says.
    return subprocess.run(command, input=text, capture_output=True, encoding="utf-8", errors="replace", check=False)


def _demangled(kernels: list[Kernel], compiler: Path) -> list[Kernel]:
    filt = shutil.which("cu++filt", path=str(compiler.resolve().parent)) or shutil.which("c++filt")
    if filt is None or not kernels:
        return kernels
    names = "\n".join(kernel.name for kernel in kernels)
    done = _run([filt], names)
    plain = done.stdout.splitlines()
    if done.returncode != 0 or len(plain) != len(kernels):
        return kernels
    return [
        Kernel(k.source, name, k.architecture, k.registers, k.stack, k.spill_stores, k.spill_loads, k.shared)
        for k, name in zip(kernels, plain, strict=True)
    ]
