"""The two parts at run time: `cpu` and `cuda`, each one extension module, loaded or built when first needed.

A part works without the other. Once loaded it stays; once its build has failed, the failure is remembered and given as
the reason against further calls, so that nothing compiles twice in vain.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from triptych.errors import BuildError
from triptych_cuda.native.binaries import Place, find, make
from triptych_cuda.native.builder import CompileError

if TYPE_CHECKING:
    from triptych.call import Call

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LEAST_CC = (8, 0)
# What is not data: integers and bits, whose dtypes the ops themselves check.
NOT_DATA = ("seed", "count", "clipped")


class Part:
    """One extension module. `module` is what a kernel call needs; the rest tells why it cannot be had."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._module: ModuleType | None = None
        self._place: Place | None = None
        self._failure: str | None = None

    def place(self) -> Place:
        """What is known about the part; looked up once, since asking compilers for their versions takes time."""
        if self._place is None:
            try:
                self._place = find(self.name)
            except OSError as cause:
                # A source was replaced while it was read, or cannot be. Not remembered: the next call looks again.
                reason = f"The sources of the {self.name} part cannot be read: {cause}. Try again, or install it anew."
                return Place(self.name, None, "", None, None, (reason,))
        return self._place

    def reasons_unavailable(self) -> list[str]:
        """Why the module can be neither loaded nor built; empty when it can."""
        if self._module is not None:
            return []
        if self._failure is not None:
            return [self._failure]
        place = self.place()
        return [] if place.binary is not None else list(place.reasons)

    def is_built(self) -> bool:
        """Whether the module can be had without compiling anything."""
        return self._module is not None or self.place().binary is not None

    def module(self) -> ModuleType:
        """The extension module, built first if need be.

        Raises:
            BuildError: it cannot be built, or it cannot be loaded; the text says why and what to do.
        """
        if self._module is None:
            with self._lock:
                if self._module is None:
                    self._module = self._loaded()
        return self._module

    def _loaded(self) -> ModuleType:
        reasons = self.reasons_unavailable()
        if reasons:
            raise BuildError(f"The {self.name} part of triptych-cuda is not available. {' '.join(reasons)}")
        place = self.place()
        try:
            binary = place.binary or make(place)
            return _import(self.name, binary)
        except (CompileError, OSError) as cause:
            self._failure = str(cause)
        except ImportError as cause:
            self._failure = (
                f"The {self.name} part of triptych-cuda was built but cannot be loaded: {cause}. Delete "
                f"{binary.parent} so that it is built again, or use another backend."
            )
        raise BuildError(self._failure)

    def after_fork(self) -> None:
        """The lock of a build that another thread was making at the fork would never be released in the child."""
        self._lock = threading.Lock()


CPU = Part("cpu")
CUDA = Part("cuda")
os.register_at_fork(after_in_child=CPU.after_fork)
os.register_at_fork(after_in_child=CUDA.after_fork)
BY_DEVICE = {"cpu": CPU, "cuda": CUDA}


def module_for(tensor: torch.Tensor) -> ModuleType:
    """The extension module for the tensor's device. `prepare` has loaded it; a direct call of an op may load it now."""
    part = CUDA if tensor.is_cuda else CPU
    return part._module or part.module()


def reasons_against(call: Call) -> list[str]:
    """Why a call cannot run on the part for its device; empty when it can."""
    part = BY_DEVICE.get(call.device.type)
    if part is None:
        return [
            f"the tensors are on {call.device}; triptych-cuda has kernels for cpu and cuda devices. Use 'torch' for "
            f"this device."
        ]
    reasons = []
    dtypes = {meta.dtype for name, meta in call.tensors if meta is not None and name not in NOT_DATA}
    for dtype in sorted(dtypes - set(DTYPES), key=str):
        reasons.append(
            f"a tensor has dtype {dtype}; float32, bfloat16, float16 and float64 are supported. Convert it, or use "
            f"'torch' for this op."
        )
    if part is CUDA:
        reasons += _reasons_against_device(call.device)
    return reasons + part.reasons_unavailable()


def reasons_against_auto(call: Call) -> list[str]:
    """Why `auto` passes over a call that could run: it never starts a build that takes half a minute."""
    part = BY_DEVICE.get(call.device.type)
    if part is None or part.is_built() or part.reasons_unavailable():
        return []
    return [
        f"the {part.name} part is not built yet, and only a choice by name builds it. Build it with `python -m "
        f"triptych_cuda build {part.name}`, or name the backend: it is then built at first use."
    ]


@contextlib.contextmanager
def cpu_variant(name: str) -> Iterator[None]:
    """Run the CPU kernels as compiled for `name` ("baseline", "avx2", "avx512") inside the block, in all threads.

    Raises:
        ValueError: this processor does not run it; the text lists those that it does.
    """
    module = CPU.module()
    before = module.variant()
    module.select_variant(name)
    try:
        yield
    finally:
        module.select_variant(before)


def _reasons_against_device(device: torch.device) -> list[str]:
    if torch.version.cuda is None:
        return []  # said by the part
    if not torch.cuda.is_available():
        return [
            f"the tensors are on {device} but torch sees no CUDA device. Check the driver and CUDA_VISIBLE_DEVICES."
        ]
    cc = torch.cuda.get_device_capability(device)
    if cc < LEAST_CC:
        return [
            f"{device} has compute capability {cc[0]}.{cc[1]}; the kernels need 8.0 or later. Use 'torch' for this "
            f"device."
        ]
    return []


def _import(part: str, path: Path) -> ModuleType:
    name = f"triptych_cuda._{part}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
