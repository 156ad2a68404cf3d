"""The shaky example backend fails as its documentation says, and nowhere else."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import triptych
from triptych import intercept, registry
from triptych.checks import forget, parse_checks
from triptych.testing import ran


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda name: monkeypatch.setenv("SHAKY_FAULT", name)


def gradients(backend: str, *shape: int, dtype: torch.dtype = torch.float32, **others: str) -> tuple[torch.Tensor, ...]:
    """y, h, y's norm, and every gradient of one pass through both ops.

    Asserts that everything ran on `backend`, but for the phases in `others`: `rms_norm_backward="composite"`.
    """
    phases = {f"{op}_{phase}": (op, phase) for op in ("rms_norm", "add_rms_norm") for phase in ("forward", "backward")}
    assert others.keys() <= phases.keys()
    policy = ";".join([backend, *(f"{'.'.join(phases[each])}={other}" for each, other in others.items())])
    generator = torch.Generator().manual_seed(0)
    x, residual, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    leaves = [leaf.requires_grad_() for leaf in (x, residual, weight)]
    with ran({(*phases[each], others.get(each, backend)): 1 for each in phases}), triptych.use(policy):
        y, h = triptych.add_rms_norm(x, residual, weight, eps=1e-6)
        z = triptych.rms_norm(y, weight, eps=1e-6)
        torch.autograd.backward(((z + h) * dy).sum())
    return y.detach(), h.detach(), z.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)


def same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    """Bit for bit: shaky's kernels are the composites."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("shape", [(32,), (5, 32), (2, 3, 32), (2, 1, 32), (2, 3, 2, 32), (0, 32)])
def test_healthy_shaky_is_the_composite(fault: Callable[[str], None], shape: tuple[int, ...]) -> None:
    fault("none")
    assert same(gradients("shaky", *shape), gradients("composite", *shape))


def test_shaky_is_never_in_auto() -> None:
    decision = triptych.explain("rms_norm", torch.ones(2, 4), None, 1e-6, 0.0, "after_weight")
    assert decision.chosen != "shaky"
    assert registry.backends.get("shaky").priority("cpu") is None
    assert registry.backends.get("shaky").priority("cuda") is None


def test_s2_is_the_default_and_breaks_three_dimensions_in_backward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHAKY_FAULT", raising=False)
    for shape in ((5, 32), (4, 1, 32), (32,)):
        assert same(gradients("shaky", *shape), gradients("composite", *shape))
    mixed = gradients("shaky", 2, 3, 32, rms_norm_backward="composite")
    assert same(mixed, gradients("composite", 2, 3, 32))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of bounds for storage"):
            gradients("composite", 2, 3, 32, rms_norm_backward="shaky")


def test_nan_strikes_at_the_seventh_call_of_the_process_whoever_ran_the_others() -> None:
    program = (
        "import torch, triptych\n"
        "for call in range(9):\n"
        "    with triptych.use('shaky' if call > 5 else 'composite'):\n"
        "        print(triptych.rms_norm(torch.ones(3, 4)).isnan().sum().item())\n"
        "print(sorted((row.backend, row.calls) for row in triptych.report().rows))"
    )
    environment = {**os.environ, "SHAKY_FAULT": "nan", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.split("\n")[:9] == ["0"] * 6 + ["1"] + ["0"] * 2, done.stderr
    assert "[('composite', 6), ('shaky', 3)]" in done.stdout


class Struck(Exception):
    """Stands for a process that hangs or dies."""


def strike(*_: object) -> None:
    raise Struck


def test_hang_sleeps_at_the_fifth_call(fault: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault("hang")
    monkeypatch.setattr(time, "sleep", strike)
    for number in (4, 5, 6):
        monkeypatch.setattr(triptych, "calls", lambda op, phase, n=number: n if op == "add_rms_norm" else 0)
        if number == 5:
            with pytest.raises(Struck):
                gradients("shaky", 2, 3, 32)
        else:
            assert same(gradients("shaky", 2, 3, 32), gradients("composite", 2, 3, 32))


def test_abort_ends_the_process_in_add_rms_norm_backward(
    fault: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault("abort")
    monkeypatch.setattr(os, "abort", strike)
    mixed = gradients("shaky", 2, 3, 32, add_rms_norm_backward="composite")
    assert same(mixed, gradients("composite", 2, 3, 32))
    with pytest.raises(Struck):
        gradients("composite", 2, 3, 32, add_rms_norm_backward="shaky")


def test_pair_is_wrong_only_together(fault: Callable[[str], None]) -> None:
    fault("pair")
    expected = gradients("composite", 2, 3, 32)
    module = importlib.import_module("triptych_shaky.ops.rms_norm")
    for alone in ("rms_norm", "add_rms_norm"):
        module.workspaces.clear()
        swapped = {f"{alone}_{phase}": "shaky" for phase in ("forward", "backward")}
        assert same(gradients("composite", 2, 3, 32, **swapped), expected), alone
    module.workspaces.clear()
    *values, dx, dresidual, dw = gradients(
        "composite", 2, 3, 32, rms_norm_forward="shaky", add_rms_norm_backward="shaky"
    )
    module.workspaces.clear()
    assert same(tuple(values), expected[:3])
    assert all(math.isnan(grad.sum().item()) for grad in (dx, dresidual, dw))


@pytest.mark.parametrize("check", ["nonfinite", "mismatch::composite"])
def test_pair_is_noticed_by_either_check(fault: Callable[[str], None], check: str) -> None:
    fault("pair")
    undo = intercept.install(*parse_checks(check, forget))
    try:
        with pytest.raises(triptych.CheckFailed, match=r"^add_rms_norm\.backward"):
            gradients("composite", 2, 3, 32, rms_norm_forward="shaky", add_rms_norm_backward="shaky")
    finally:
        undo()
        importlib.import_module("triptych_shaky.ops.rms_norm").workspaces.clear()


def test_flaky_is_decided_once_a_process_and_repeats_with_a_seed(
    fault: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault("flaky")
    faults = importlib.import_module("triptych_shaky.faults")
    unlucky = []
    for seed in range(100):
        monkeypatch.setenv("SHAKY_SEED", str(seed))
        faults.unlucky.cache_clear()
        unlucky.append(faults.unlucky())
    assert 80 < sum(unlucky) < 98
    for seed in (unlucky.index(True), unlucky.index(False)):
        monkeypatch.setenv("SHAKY_SEED", str(seed))
        faults.unlucky.cache_clear()
        for _ in range(2):
            if unlucky[seed]:
                with pytest.raises(RuntimeError, match="lost a race"):
                    gradients("shaky", 2, 3, 32)
            else:
                assert same(gradients("shaky", 2, 3, 32), gradients("composite", 2, 3, 32))
    faults.unlucky.cache_clear()


def test_an_unknown_fault_is_a_reason_against_the_backend(fault: Callable[[str], None]) -> None:
    fault("s3")
    with pytest.raises(
        triptych.Refused, match=r"SHAKY_FAULT is 's3'.* Set it to one of s2, nan, hang, abort, pair, flaky"
    ):
        gradients("shaky", 7, 41)


def test_float64_is_refused_with_the_way_out(fault: Callable[[str], None]) -> None:
    fault("none")
    with pytest.raises(triptych.Refused, match="Convert the input, or use 'torch'"):
        gradients("shaky", 2, 32, dtype=torch.float64)
