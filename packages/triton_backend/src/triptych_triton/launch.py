"""Launching on the right device, and what a device offers."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from triton.runtime import driver

from triptych_triton.rounding import INTERPRETED


@dataclass(frozen=True, slots=True)
class Limits:
    """What one device offers to a launch.

    Attributes:
        multiprocessors: the number of SMs, which persistent grids are sized by.
        shared_bytes: the most shared memory one program may have.
    """

    multiprocessors: int
    shared_bytes: int


# The interpreter runs programs one after the other, so more of them only cost time; two still cross partial results.
_INTERPRETER_LIMITS = Limits(multiprocessors=2, shared_bytes=0)


def limits(device: torch.device) -> Limits:
    """The limits of `device`, asked once a device."""
    if INTERPRETED:
        return _INTERPRETER_LIMITS
    # A CPU tensor reaches this only under a stand-in driver, which has a current device of its own (compile_check).
    return _limits(device.index if device.type == "cuda" else driver.active.get_current_device())


@cache
def _limits(index: int) -> Limits:
    properties = driver.active.utils.get_device_properties(index)
    return Limits(properties["multiprocessor_count"], properties["max_shared_mem"])


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Launch on `device` and on its current stream, whatever device is current.

    Triton launches on the current device. Autograd's threads and a pipeline's have device 0 current, or no context
    at all, until someone sets it: entering torch.cuda.device makes the context, and Triton makes device 0's itself.
    The question costs .2 us and the context manager 2, so it is entered only where it changes something.
    """
    if INTERPRETED:
        _interpret(kernel, grid, *arguments, **constants)
    elif device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*arguments, **constants)
    else:
        kernel[grid](*arguments, **constants)


def _interpret(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch without NumPy's warnings of infinities and of what is made of them: a device gives none either."""
    import numpy  # what Triton interprets with; compiled kernels do without

    with numpy.errstate(over="ignore", invalid="ignore"):
        kernel[grid](*arguments, **constants)
