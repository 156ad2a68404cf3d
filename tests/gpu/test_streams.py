"""Streams, graphs and threads: kernels go where the program's own would go."""

from __future__ import annotations

import threading

import pytest
import torch

import triptych
from triptych.testing import ran

pytestmark = pytest.mark.gpu

BACKENDS = ["cuda", "triton", "torch", "composite"]


def leaves(rows: int = 512, columns: int = 1024) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, columns, device="cuda", requires_grad=True)
    weight = torch.randn(columns, device="cuda", requires_grad=True)
    return x, weight, torch.randn(rows, columns, device="cuda")


def step(backend: str, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Forward and backward of both ops on `backend`, which is asserted."""
    phases = (
        ("rms_norm", "forward"),
        ("rms_norm", "backward"),
        ("add_rms_norm", "forward"),
        ("add_rms_norm", "backward"),
    )
    with triptych.use(backend), ran({(op, phase, backend): 1 for op, phase in phases}):
        y, h = triptych.add_rms_norm(triptych.rms_norm(x, weight), x, weight)
        # Detached, so that no graph outlives its step: the next may run on another stream.
        return (y.detach(), h.detach(), *torch.autograd.grad((y, h), (x, weight), (dy, dy)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_run_on_the_current_stream(backend: str) -> None:
    x, weight, dy = leaves()
    expected = step(backend, x, weight, dy)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    values = x.detach().clone()
    with torch.no_grad():
        x.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: a kernel on another stream would see the zeros
        with torch.no_grad():
            x.copy_(values)
        found = step(backend, x, weight, dy)
    side.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_backward_are_captured_in_a_graph(backend: str) -> None:
    x, weight, dy = leaves()
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            step(backend, x, weight, dy)
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(backend, x, weight, dy)
    with torch.no_grad():
        x.normal_()
        dy.normal_()
    graph.replay()
    expected = step(backend, x, weight, dy)
    torch.cuda.synchronize()
    for one, other in zip(outputs, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thread_without_a_context_can_launch(backend: str) -> None:
    x, weight, dy = leaves()
    found: list[tuple[torch.Tensor, ...]] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            found.append(step(backend, x, weight, dy))
        except BaseException as cause:
            failed.append(cause)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed, failed
    expected = step(backend, x, weight, dy)
    for one, other in zip(found[0], expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.two_gpus
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_run_on_the_tensors_device_not_the_current_one(backend: str) -> None:
    x, weight, dy = leaves()
    expected = step(backend, x, weight, dy)
    there = tuple(each.detach().to("cuda:1").requires_grad_(each.requires_grad) for each in (x, weight, dy))
    assert torch.cuda.current_device() == 0
    found = step(backend, *there)
    assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    for one, other in zip(found, expected, strict=True):
        assert one.device.index == 1
        assert torch.equal(one.to("cuda:0"), other)
