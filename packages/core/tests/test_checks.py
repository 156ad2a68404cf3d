"""Checks: a wrong result is found where it is made, a right one never, and looking disturbs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import triptych
from triptych import checks, layers, registry, scope, trace
from triptych.backend import Backend
from triptych.call import Call
from triptych.compare import agreement, plain, relative
from triptych.errors import CheckFailed, EnvironmentVariableError, PolicyError, Refused
from triptych.opspec import PhaseFunction, Tensors

Fault = Callable[[tuple[Any, ...], Tensors], Tensors]
X = torch.linspace(-2, 2, 24).reshape(3, 8)


@dataclass
class Planted(Backend):
    """The composite, with `fault` applied to the arguments and outputs of one phase of rms_norm."""

    phase: str
    fault: Fault
    refuses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__init__("planted")

    def ops(self) -> tuple[str, ...]:
        return ("rms_norm",)

    def reasons_against(self, call: Call) -> list[str]:
        return ["it has no kernel for this. Use 'torch'."] if call.phase in self.refuses else []

    def implementation(self, op: str, phase: str) -> PhaseFunction | None:
        composite = registry.ops.get(op).phase(phase).composite
        if phase != self.phase:
            return composite
        return lambda *args: self.fault(args, composite(*args))


def at_one_element(value: float) -> Fault:
    def fault(args: tuple[Any, ...], outputs: Tensors) -> Tensors:
        outputs[0].view(-1)[5] = value
        return outputs

    return fault


@pytest.fixture
def check(fresh_scope: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Switch checks on; returns the file that findings go to."""

    def switch_on(text: str, policy: str = "composite") -> Path:
        monkeypatch.setenv("TRIPTYCH_CHECK", text)
        monkeypatch.setenv("TRIPTYCH_BACKEND", policy)
        monkeypatch.setenv("TRIPTYCH_FINDINGS", str(fresh_scope / "findings.jsonl"))
        monkeypatch.setattr(scope, "_process", None)
        return fresh_scope / "findings.jsonl"

    return switch_on


def step(x: torch.Tensor = X) -> tuple[torch.Tensor, ...]:
    """Forward and backward of two layers: the second one only passes on what the first made."""
    first, second = layers.RMSNorm(8), layers.RMSNorm(8)
    first.layer_name, second.layer_name = "first", "second"
    leaf = x.clone().requires_grad_()
    with triptych.use("rms_norm@first=planted") if "planted" in registry.backends.names() else triptych.use(""):
        y = second(first(leaf))
    y.square().sum().backward()
    assert leaf.grad is not None and first.weight.grad is not None
    return y.detach(), leaf.grad, first.weight.grad


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_names_what_made_it(
    check: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, phase: str, value: float
) -> None:
    path = check("nonfinite")
    monkeypatch.setenv("TRIPTYCH_TRACE", str(path.with_name("trace.jsonl")))
    with registry.backends.added("planted", Planted(phase, at_one_element(value))):
        with pytest.raises(CheckFailed) as raised:
            step()
    assert raised.value.signature == f"nonfinite rms_norm.{phase}"
    (finding,) = checks.read_findings(path)
    assert (finding.kind, finding.op, finding.phase) == ("nonfinite", "rms_norm", phase)
    assert (finding.layer, finding.backend, finding.against) == ("first", "planted", None)
    assert finding.signature == raised.value.signature
    assert finding.message == str(raised.value)
    output = "y" if phase == "forward" else "dx"
    assert (
        f"'first' on 'planted' made non-finite values of finite inputs: {output} is not finite in 1 of 24 elements, "
        in (finding.message)
    )
    assert finding.difference["index"] == [0, 5]
    assert finding.difference["got"] == str(value)
    last = trace.read(path.with_name("trace.jsonl")).calls[-1]
    assert (last.op, last.phase, last.layer, last.call) == ("rms_norm", phase, "first", finding.call)
    json.dumps(finding.difference, allow_nan=False)


def test_nonfinite_does_not_blame_a_victim(check: Callable[[str], Path]) -> None:
    path = check("nonfinite")
    x = X.clone()
    x[1, 2] = float("nan")
    y, *_ = step(x)
    assert y[1].isnan().all()
    assert y[0].isfinite().all()
    assert checks.read_findings(path) == ()


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_mismatch_finds_a_wrong_result(check: Callable[[str], Path], phase: str) -> None:
    path = check("mismatch::torch")
    with registry.backends.added("planted", Planted(phase, at_one_element(0.75))):
        with pytest.raises(CheckFailed) as raised:
            step()
    assert raised.value.signature == f"mismatch rms_norm.{phase}"
    (finding,) = checks.read_findings(path)
    assert (finding.layer, finding.backend, finding.against) == ("first", "planted", "torch")
    assert finding.difference["count"] == 1
    assert finding.difference["got"] == 0.75
    assert abs(finding.difference["wanted"] - 0.75) > finding.difference["tolerance"] > 0
    assert finding.message.endswith(f"TRIPTYCH_BACKEND=rms_norm.{phase}=torch.")


def test_mismatch_never_takes_nan_for_right(check: Callable[[str], Path]) -> None:
    check("mismatch:1e30:torch")
    with registry.backends.added("planted", Planted("forward", at_one_element(float("nan")))):
        with pytest.raises(CheckFailed, match=r"nan instead of"):
            step()


def overflowing(dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs whose first column alone leaves float16."""
    weight = torch.ones(8)
    weight[0] = 6e4
    return torch.tensor([[7.0, 1, 2, 3, -4, 5, 6, 7]], dtype=dtype).repeat(3, 1), weight.to(dtype)


@pytest.mark.parametrize("text", ["mismatch::torch", "mismatch:0.01:torch"])
def test_what_overflows_on_both_backends_agrees(check: Callable[[str], Path], text: str) -> None:
    path = check(text)
    assert triptych.rms_norm(*overflowing()).isinf().sum() == 3
    assert checks.read_findings(path) == ()


@pytest.mark.parametrize("text", ["mismatch::torch", "mismatch:0.01:torch"])
@pytest.mark.parametrize(
    ("place", "value"), [(5, 60.0), (0, 60000.0), (0, float("-inf")), (0, float("nan")), (5, float("inf"))]
)
def test_an_overflow_hides_nothing_that_is_wrong(
    check: Callable[[str], Path], text: str, place: int, value: float
) -> None:
    def fault(args: tuple[Any, ...], outputs: Tensors) -> Tensors:
        outputs[0][1, place] = value
        return outputs

    with registry.backends.added("planted", Planted("forward", fault)):
        path = check(text, "planted")
        with pytest.raises(CheckFailed, match=r"y is off in 1 of 24 elements"):
            triptych.rms_norm(*overflowing())
    (finding,) = checks.read_findings(path)
    assert (finding.difference["index"], finding.difference["got"]) == ([1, place], plain(value))


def test_an_infinity_never_lies_within_a_tolerance() -> None:
    infinite, one = torch.tensor([torch.inf]), torch.tensor([1.0])
    assert not agreement(infinite, one, infinite).any()
    assert not agreement(one, infinite, infinite).any()
    assert not agreement(infinite, -infinite, infinite).any()
    assert agreement(infinite, infinite, torch.zeros(1)).all()


def test_a_relative_tolerance_is_of_the_finite_values() -> None:
    wanted = (torch.tensor([torch.inf, -2.0, torch.nan]), torch.tensor([torch.inf]), torch.empty(0))
    assert [float(each) for each in relative(wanted, 0.5)] == [1.0, 0.0, 0.0]


def test_mismatch_sees_a_wrong_shape(check: Callable[[str], Path]) -> None:
    check("mismatch::torch")
    with registry.backends.added("planted", Planted("forward", lambda args, outputs: (outputs[0][:2], outputs[1]))):
        with pytest.raises(CheckFailed, match=r"y has shape \[2, 8\] instead of \[3, 8\]"):
            step()


def test_a_relative_tolerance_decides(check: Callable[[str], Path]) -> None:
    def scaled(args: tuple[Any, ...], outputs: Tensors) -> Tensors:
        return outputs[0] * 1.01, outputs[1]

    with registry.backends.added("planted", Planted("forward", scaled)):
        check("mismatch:0.05:torch", "planted")
        triptych.rms_norm(X)
        check("mismatch:0.001:torch", "planted")
        with pytest.raises(CheckFailed, match="differs from 'torch': y is off in 24 of 24 elements"):
            triptych.rms_norm(X)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_healthy_backends_never_mismatch(check: Callable[[str], Path], op: str, dtype: torch.dtype) -> None:
    path = check("nonfinite|mismatch::composite", "torch")
    function = getattr(triptych, op)
    count = 0
    for sample in registry.ops.get(op).samples():
        if sample.name in ("columns_16384", "columns_20001", "columns_65536"):
            continue  # the conformance suite has them; here they only cost time
        tensors = sample.make(torch.Generator().manual_seed(0), dtype, torch.device("cpu"))
        leaves = [each if each is None else each.detach().requires_grad_() for each in tensors]
        eps, offset, rounding = sample.scalars
        outputs = function(*leaves, eps=eps, offset=offset, rounding=rounding)
        total = sum(out.float().sum() for out in (outputs if isinstance(outputs, tuple) else (outputs,)))
        total.backward()
        count += 1
    assert count > 30
    assert checks.read_findings(path) == ()


def test_looking_changes_no_result_no_count_and_no_number(check: Callable[[str], Path]) -> None:
    check("")
    plain = step()
    check("nonfinite|mismatch::torch")
    before = {(row.phase, row.backend): row.calls for row in triptych.report().rows if row.op == "rms_norm"}
    watched = step()
    after = {(row.phase, row.backend): row.calls for row in triptych.report().rows if row.op == "rms_norm"}
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(plain, watched, strict=True))
    grown = {key: calls - before.get(key, 0) for key, calls in after.items() if calls != before.get(key, 0)}
    assert grown == {("forward", "composite"): 2, ("backward", "composite"): 2}


def test_a_backend_that_spoils_its_inputs_spoils_neither_the_other_nor_hides(check: Callable[[str], Path]) -> None:
    def spoil(args: tuple[Any, ...], outputs: Tensors) -> Tensors:
        args[0].zero_()
        return args[0].clone(), outputs[1]

    check("mismatch::torch")
    with registry.backends.added("planted", Planted("forward", spoil)), torch.no_grad(), triptych.use("planted"):
        with pytest.raises(CheckFailed, match=r"0\.0 instead of"):
            triptych.rms_norm(X.clone())


def test_the_other_backend_cannot_disturb_the_program(check: Callable[[str], Path]) -> None:
    def spoil(args: tuple[Any, ...], outputs: Tensors) -> Tensors:
        args[0].zero_()
        return outputs

    with registry.backends.added("planted", Planted("forward", spoil)):
        check("mismatch::planted")
        x = X.clone()
        triptych.rms_norm(x)
    assert torch.equal(x, X)


def test_mismatch_compares_where_its_policy_says(check: Callable[[str], Path]) -> None:
    with registry.backends.added("planted", Planted("forward", at_one_element(0.75))):
        check("mismatch::composite;rms_norm@second=torch", "composite;rms_norm@first=planted")
        layer = layers.RMSNorm(8)
        for name, caught in (("other", False), ("first", True)):
            layer.layer_name = name
            if caught:
                with pytest.raises(CheckFailed, match="differs from 'composite'"):
                    layer(X)
            else:
                layer(X)


def test_a_refusal_of_the_other_backend_is_not_passed_over(check: Callable[[str], Path]) -> None:
    with registry.backends.added("planted", Planted("forward", at_one_element(0.75), refuses=("forward",))):
        check("mismatch::planted")
        with pytest.raises(Refused, match=r'\(TRIPTYCH_CHECK rule 1, "planted"\)'):
            triptych.rms_norm(X)
        check("mismatch::planted,torch")
        triptych.rms_norm(X)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "nonfinit",
            "TRIPTYCH_CHECK is 'nonfinit': 'nonfinit' is not a check. Write nonfinite, or mismatch:RTOL:POLICY "
            "(mismatch:1e-3:torch, or mismatch::torch for the op's own tolerance); separate several with |.",
        ),
        (
            "nonfinite|mismatch:1e-3",
            "TRIPTYCH_CHECK is 'nonfinite|mismatch:1e-3': 'mismatch:1e-3' is not a check. Write nonfinite, or "
            "mismatch:RTOL:POLICY (mismatch:1e-3:torch, or mismatch::torch for the op's own tolerance); "
            "separate several with |.",
        ),
        (
            "mismatch:-1:torch",
            "TRIPTYCH_CHECK is 'mismatch:-1:torch': '-1' is not a relative tolerance. "
            "Write a number, 0 or greater, or nothing for the op's own.",
        ),
        (
            "mismatch:nan:torch",
            "TRIPTYCH_CHECK is 'mismatch:nan:torch': 'nan' is not a relative tolerance. "
            "Write a number, 0 or greater, or nothing for the op's own.",
        ),
    ],
)
def test_what_is_not_a_check_is_an_error_before_anything_runs(
    check: Callable[[str], Path], text: str, error: str
) -> None:
    check(text)
    start = triptych.calls("rms_norm", "forward")
    with pytest.raises(EnvironmentVariableError) as raised:
        triptych.rms_norm(X)
    assert str(raised.value) == error
    assert triptych.calls("rms_norm", "forward") == start


def test_an_unknown_backend_in_a_check_is_an_error(check: Callable[[str], Path]) -> None:
    check("mismatch::trch")
    with pytest.raises(
        PolicyError, match=r"^TRIPTYCH_CHECK rule 1, \"trch\": there is no backend 'trch'\. Did you mean 'torch'"
    ):
        triptych.rms_norm(X)


def test_findings_that_cannot_be_written_are_an_error(
    check: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = check("nonfinite").parent / "missing" / "findings.jsonl"
    monkeypatch.setenv("TRIPTYCH_FINDINGS", str(path))
    with pytest.raises(EnvironmentVariableError) as raised:
        triptych.rms_norm(X)
    assert str(raised.value) == (
        f"TRIPTYCH_FINDINGS is '{path}': No such file or directory. Name a file that can be written, in a folder that exists."
    )


def test_nothing_is_checked_while_a_graph_is_recorded(
    check: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with registry.backends.added("planted", Planted("forward", at_one_element(float("nan")))):
        for text in ("nonfinite", "mismatch::torch"):
            check(text, "planted")
            with monkeypatch.context() as patch:
                patch.setattr(checks, "is_recorded", lambda device: device.type == "cpu")
                assert triptych.rms_norm(X).isnan().any()
            with pytest.raises(CheckFailed):
                triptych.rms_norm(X)
