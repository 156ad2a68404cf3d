"""Waiting for the device around each phase, so that a device error is raised at the call that made it.

`TRIPTYCH_SYNC=1` switches it on. Devices report errors (an illegal memory access, a failed assertion) when they are
next asked for something, often at an innocent operation. With this on, a device error becomes `CheckFailed` with the
op, phase, layer, call and backend in its text. On the CPU, where nothing is asynchronous, it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from triptych.errors import CheckFailed
from triptych.intercept import Invocation, Proceed
from triptych.opspec import Tensors


def wait(device: torch.device) -> None:
    """Wait until everything that was launched on `device` has ended; raises the device's error."""
    torch.accelerator.synchronize(device)


def is_recorded(device: torch.device) -> bool:
    """Whether work on `device` now goes into a CUDA graph: it has no result yet, and may not be waited for."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def can_wait(device: torch.device) -> bool:
    """Whether waiting for `device` means anything now: not on the CPU, not while a CUDA graph is being recorded."""
    return device.type not in ("cpu", "meta") and not is_recorded(device)


@dataclass(frozen=True)
class Synchroniser:
    """The interceptor that waits, before the launch and after it.

    It waits before the launch so that an error of something launched earlier, by whomever, is not blamed on this call.
    """

    can_wait: Callable[[torch.device], bool] = can_wait
    wait: Callable[[torch.device], None] = wait

    def __call__(self, invocation: Invocation, proceed: Proceed) -> Tensors:
        device = invocation.decision.call.device
        if not self.can_wait(device):
            return proceed()
        self._wait_before(invocation, device)
        try:
            outputs = proceed()
        except Exception:
            # An error that the launch itself raised may be the device's; if it is, the device still has it.
            self._wait_after(invocation, device)
            raise
        self._wait_after(invocation, device)
        return outputs

    def _wait_before(self, invocation: Invocation, device: torch.device) -> None:
        try:
            self.wait(device)
        except Exception as cause:
            raise CheckFailed(
                f"{device} reported an error before {invocation} was launched on {invocation.decision.chosen!r}: "
                f"{_first_line(cause)}. Something that was launched earlier and is not a Triptych op is at fault; the "
                f"last Triptych op before it had ended well.",
                f"device error before {invocation.op}.{invocation.phase}",
            ) from cause

    def _wait_after(self, invocation: Invocation, device: torch.device) -> None:
        try:
            self.wait(device)
        except Exception as cause:
            raise CheckFailed(
                f"{device} reported an error in {invocation} on {invocation.decision.chosen!r}: {_first_line(cause)}. "
                f"Choose another backend for it: TRIPTYCH_BACKEND={invocation.op}.{invocation.phase}=torch.",
                f"device error {invocation.op}.{invocation.phase}",
            ) from cause


def _first_line(cause: BaseException) -> str:
    return (str(cause).splitlines() or [type(cause).__name__])[0].rstrip(".")
