"""Sync: a device error is raised at the call that made it, and not blamed on a call that did not."""

from __future__ import annotations

import pytest
import torch

from triptych import explain, registry
from triptych.errors import CheckFailed
from triptych.intercept import Invocation
from triptych.sync import Synchroniser, can_wait, is_recorded

ARGS = (torch.ones(2, 8), None, 1e-6, 0.0, "after_weight")


def invocation() -> Invocation:
    return Invocation(registry.ops.get("rms_norm"), 7, explain("rms_norm", *ARGS, layer="blocks.0"), ARGS)


class Device:
    """A device that has an error pending from the given wait on."""

    def __init__(self, error_at: int) -> None:
        self.waits = 0
        self.error_at = error_at

    def wait(self, device: torch.device) -> None:
        self.waits += 1
        if self.waits >= self.error_at:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")


def synchroniser(device: Device) -> Synchroniser:
    return Synchroniser(lambda _: True, device.wait)


def test_an_error_after_the_launch_names_op_phase_layer_call_and_backend() -> None:
    made = invocation()
    with pytest.raises(CheckFailed) as raised:
        synchroniser(Device(2))(made, lambda: ())
    assert str(raised.value) == (
        f"cpu reported an error in rms_norm.forward call 7 in layer 'blocks.0' on '{made.decision.chosen}': CUDA error: "
        "an illegal memory access was encountered. Choose another backend for it: "
        "TRIPTYCH_BACKEND=rms_norm.forward=torch."
    )
    assert raised.value.signature == "device error rms_norm.forward"
    assert "illegal memory access" in str(raised.value.__cause__)


def test_an_error_of_something_earlier_is_not_blamed_on_the_call() -> None:
    launched = []
    with pytest.raises(CheckFailed, match=r"before rms_norm\.forward call 7") as raised:
        synchroniser(Device(1))(invocation(), lambda: launched.append(1) or ())
    assert raised.value.signature == "device error before rms_norm.forward"
    assert launched == []


def test_an_error_that_the_launch_raised_is_the_devices_only_if_the_device_has_one() -> None:
    def launch() -> tuple[torch.Tensor, ...]:
        raise ZeroDivisionError("host")

    healthy = Device(99)
    with pytest.raises(ZeroDivisionError, match="host"):
        synchroniser(healthy)(invocation(), launch)
    assert healthy.waits == 2
    with pytest.raises(CheckFailed, match=r"in rms_norm\.forward call 7"):
        synchroniser(Device(2))(invocation(), launch)


def test_outputs_pass_through() -> None:
    outputs = (torch.ones(1),)
    device = Device(99)
    assert synchroniser(device)(invocation(), lambda: outputs) is outputs
    assert device.waits == 2


def test_on_the_cpu_there_is_nothing_to_wait_for() -> None:
    assert not can_wait(torch.device("cpu"))
    outputs = (torch.ones(1),)
    device = Device(1)
    assert Synchroniser(wait=device.wait)(invocation(), lambda: outputs) is outputs
    assert device.waits == 0


def test_work_that_goes_into_a_graph_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for recording in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)  # noqa: B023
        assert is_recorded(torch.device("cuda")) is recording
        assert can_wait(torch.device("cuda")) is not recording
        assert not is_recorded(torch.device("cpu"))
