"""Captures: every bit, stride and shared storage comes back, and a captured call runs and is judged alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import ARGS, captured, step

import triptych
from triptych import capture, registry
from triptych.backend import Backend
from triptych.call import Call
from triptych.capture.capturing import Capturer
from triptych.cli.app import main
from triptych.errors import EnvironmentVariableError, PolicyError, Refused, UsageError
from triptych.opspec import PhaseFunction, Tensors


class Wrong(Backend):
    """The composite with what `fault` does to it; refuses backward."""

    def __init__(self, fault: Callable[[tuple[Any, ...], Tensors], Tensors]) -> None:
        super().__init__("wrong")
        self._fault = fault

    def ops(self) -> tuple[str, ...]:
        return ("rms_norm",)

    def reasons_against(self, call: Call) -> list[str]:
        return ["it has no backward. Use 'torch'."] if call.phase == "backward" else []

    def implementation(self, op: str, phase: str) -> PhaseFunction | None:
        composite = registry.ops.get(op).phase(phase).composite
        return lambda *args: self._fault(args, composite(*args))


def bits(tensor: torch.Tensor) -> bytes:
    """The whole storage, so that what lies around a view counts too."""
    return bytes(tensor.untyped_storage().tolist())


def nan_bits() -> torch.Tensor:
    """NaNs with different bit patterns, and a negative zero."""
    return torch.tensor([0x7FC00000, 0x7FC00123, -1, -(2**31)], dtype=torch.int32).view(torch.float32).reshape(2, 2)


BASE = torch.arange(200, dtype=torch.float32)
EXOTIC = {
    "contiguous": BASE[:24].view(4, 6),
    "transposed": BASE.view(20, 10).t(),
    "expanded": BASE[:6].expand(3, 4, 6),
    "offset": BASE[3:27].view(4, 6),
    "overlapping": BASE.as_strided((5, 6), (2, 3), 7),
    "every_other": BASE.view(10, 20)[::3, 1::2],
    "bfloat16": BASE.bfloat16().view(20, 10)[:, 3:9],
    "float64": BASE.double().view(20, 10)[::2],
    "nan": nan_bits(),
    "no_rows": torch.empty(0, 6),
    "no_rows_of_something": BASE.view(20, 10)[20:],
}


@pytest.mark.parametrize("name", EXOTIC)
def test_a_round_trip_keeps_every_bit_stride_and_offset(tmp_path: Path, name: str) -> None:
    x = EXOTIC[name]
    captured(x, None, tmp_path / "c")
    back = capture.load(tmp_path / "c")
    tensor = dict(back.arguments)["x"]
    assert tensor.shape == x.shape
    assert tensor.stride() == x.stride()
    assert tensor.storage_offset() == x.storage_offset()
    assert (tensor.dtype, tensor.device) == (x.dtype, x.device)
    assert bits(tensor) == bits(x)
    assert back.args[1:] == (None, *ARGS)
    assert (back.op, back.phase, back.layer, back.call, back.backend) == ("rms_norm", "forward", "blocks.0", 3, "torch")


def test_tensors_that_share_a_storage_share_it_again(tmp_path: Path) -> None:
    base = torch.arange(40, dtype=torch.float32)
    x, weight = base[:32].view(4, 8), base[4:12]
    captured(x, weight, tmp_path / "c")
    values = dict(capture.load(tmp_path / "c").arguments)
    values["weight"].fill_(-1)
    assert values["x"].reshape(-1)[4:12].tolist() == [-1.0] * 8
    assert (tmp_path / "c" / "storages.safetensors").stat().st_size < 2 * 160 + 100
    apart = tmp_path / "apart"
    captured(x.clone(), weight.clone(), apart)
    values = dict(capture.load(apart).arguments)
    values["weight"].fill_(-1)
    assert values["x"].tolist() == x.tolist()


def names(folder: Path) -> list[str]:
    return sorted(each.name.rpartition(".")[0] for each in folder.iterdir())


def test_what_a_selector_selects_is_captured_with_the_gradient_as_it_came(capturing: Callable[..., Path]) -> None:
    folder = capturing("rms_norm.backward@blocks.*")
    step("other")
    x = step()
    (path,) = folder.iterdir()
    assert path.name.startswith("rms_norm.backward.")
    assert sorted(each.name for each in path.iterdir()) == ["capture.json", "replay.py", "storages.safetensors"]
    found = capture.load(path)
    values = dict(found.arguments)
    assert values["dy"].stride() == (0, 0)  # sum() hands out one element, expanded
    assert values["x"].tolist() == x.tolist()
    assert (values["need_dx"], values["need_dw"]) == (True, True)
    assert (found.layer, found.backend, found.policy) == ("blocks.3.norm", "torch", "torch")
    assert found.versions["torch"] == torch.__version__
    assert json.loads((path / "capture.json").read_text())["schema"] == 1


def test_several_selectors_and_every_call(capturing: Callable[..., Path]) -> None:
    folder = capturing("rms_norm.forward;add_rms_norm")
    step()
    assert names(folder) == ["rms_norm.forward"]
    folder = capturing("*")
    step()
    assert names(folder) == ["rms_norm.backward", "rms_norm.forward", "rms_norm.forward"]


def test_it_is_written_before_the_launch(capturing: Callable[..., Path]) -> None:
    def fail(args: tuple[Any, ...], outputs: Tensors) -> Tensors:
        raise RuntimeError("dead")

    with registry.backends.added("wrong", Wrong(fail)):
        folder = capturing("rms_norm", "wrong")
        with pytest.raises(RuntimeError, match="dead"):
            triptych.rms_norm(torch.ones(2, 8))
        (path,) = folder.iterdir()
        result = capture.replay(capture.load(path))
    assert result.error == "RuntimeError: dead"
    assert not result.agrees


def test_a_call_beyond_the_limit_is_refused_with_a_note(
    fresh_scope: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triptych import intercept

    request = capture.parse_request("captures|rms_norm", registry.ops.names())
    undo = intercept.install(Capturer(request, "auto", limit=100))
    try:
        triptych.rms_norm(torch.ones(2, 8))
        triptych.rms_norm(torch.ones(2, 8))
    finally:
        undo()
    assert len(list((fresh_scope / "captures").iterdir())) == 1
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "was not captured: its inputs have 64 bytes, and 36 are left to the captures of this process."
    )


def test_nothing_is_replaced(capturing: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    folder = capturing("rms_norm.forward")
    step()
    (path,) = folder.iterdir()
    made = capture.load(path)
    capturer = Capturer(capture.parse_request("captures|rms_norm", registry.ops.names()), "auto")
    capturer._write(made)
    assert sorted(each.name for each in folder.iterdir()) == [path.name, f"{path.name}.{os.getpid()}"]
    with pytest.raises(FileExistsError):
        capturer._write(made)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    ("text", "kind", "error"),
    [
        (
            "captures",
            EnvironmentVariableError,
            "TRIPTYCH_CAPTURE is 'captures'. Write DIRECTORY|SELECTOR, for example captures|rms_norm.backward#7, "
            "or captures|* for every call.",
        ),
        (
            "captures|rms_nrm",
            PolicyError,
            "TRIPTYCH_CAPTURE selector 1, \"rms_nrm\": no op matches 'rms_nrm'. Did you mean 'rms_norm' or 'add_rms_norm'?",
        ),
        (
            "captures|rms_norm;rms_norm#x",
            PolicyError,
            'TRIPTYCH_CAPTURE selector 2, "rms_norm#x": "#x" is not a set of numbers. Write #7, #3,5, #2:9 (2 to 8), '
            "#120: (120 and later) or #:5 (0 to 4).",
        ),
        (
            "/proc/none|rms_norm",
            EnvironmentVariableError,
            "TRIPTYCH_CAPTURE names the directory '/proc/none': No such file or directory. "
            "Name one that exists or can be made, and can be written to.",
        ),
    ],
)
def test_a_wrong_request_is_an_error_before_anything_runs(
    fresh_scope: Path, monkeypatch: pytest.MonkeyPatch, text: str, kind: type[Exception], error: str
) -> None:
    monkeypatch.setenv("TRIPTYCH_CAPTURE", text)
    start = triptych.calls("rms_norm", "forward")
    with pytest.raises(kind) as raised:
        triptych.rms_norm(torch.ones(2, 8))
    assert str(raised.value) == error
    assert triptych.calls("rms_norm", "forward") == start


def test_replay_compares_with_the_reference_and_with_a_backend(tmp_path: Path) -> None:
    made = captured(torch.arange(24, dtype=torch.float32).view(3, 8), torch.ones(8), tmp_path / "c")
    for against in ("reference", "composite"):
        result = capture.replay(made, against=against)
        assert result.agrees, str(result)
        assert (result.backend, result.against) == ("torch", against)
        assert result.outputs[0].nonfinite == 0
        assert str(result).endswith(f"against '{against}': every element agrees")
    assert capture.replay(made, "composite").backend == "composite"


def test_replay_shows_the_first_element_that_differs(tmp_path: Path) -> None:
    def off(args: tuple[Any, ...], outputs: Tensors) -> Tensors:
        outputs[0][1, 2:4] = 9.0
        return outputs

    made = captured(torch.arange(24, dtype=torch.float32).view(3, 8), torch.ones(8), tmp_path / "c")
    with registry.backends.added("wrong", Wrong(off)):
        result = capture.replay(made, "wrong")
    assert not result.agrees
    (difference,) = result.differences
    assert (difference.output, difference.count, difference.index, difference.got) == ("y", 2, (1, 2), 9.0)
    assert "against 'reference': y is off in 2 of 24 elements, first at [1, 2]: 9.0 instead of " in str(result)
    assert result.to_json()["agrees"] is False


def test_replay_reports_a_changed_input(tmp_path: Path) -> None:
    def spoil(args: tuple[Any, ...], outputs: Tensors) -> Tensors:
        args[0][0, 0] = -0.0
        return outputs

    made = captured(torch.zeros(3, 8), torch.ones(8), tmp_path / "c")
    with registry.backends.added("wrong", Wrong(spoil)):
        result = capture.replay(made, "wrong")
    assert (result.changed, result.differences, result.agrees) == (("x",), (), False)
    assert made.args[0].view(torch.int32).count_nonzero() == 0


def test_replay_with_nan_inputs_wants_the_same_nans_in_the_same_places(tmp_path: Path) -> None:
    def spread(args: tuple[Any, ...], outputs: Tensors) -> Tensors:
        outputs[0].fill_(float("nan"))
        return outputs

    x = torch.arange(24, dtype=torch.float32).view(3, 8)
    x[1, 2] = float("nan")
    made = captured(x, torch.ones(8), tmp_path / "c")
    good = capture.replay(capture.load(tmp_path / "c"))
    assert good.agrees, str(good)
    assert not good.inputs_finite
    assert good.outputs[0].nonfinite == 8
    with registry.backends.added("wrong", Wrong(spread)):
        bad = capture.replay(made, "wrong")
    assert not bad.agrees
    assert (bad.differences[0].count, bad.differences[0].index) == (16, (0, 0))
    json.dumps(bad.to_json(), allow_nan=False)


def test_replay_of_what_cannot_run_is_an_error(capturing: Callable[..., Path]) -> None:
    folder = capturing("rms_norm.backward")
    step()
    (path,) = folder.iterdir()
    made = capture.load(path)
    with registry.backends.added("wrong", Wrong(lambda args, outputs: outputs)):
        with pytest.raises(
            Refused, match=r'on \'wrong\' \(the backend to replay on, "wrong"\)\n  - it has no backward'
        ):
            capture.replay(made, "wrong")


KNOWN = ", ".join(registry.backends.names())
INSTEAD = ", ".join(sorted((*registry.backends.names(), "reference")))


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (("trch",), "The backend to replay on is 'trch'; there is no such backend. Did you mean 'torch'?"),
        (("",), f"The backend to replay on is ''; there is no such backend. Known: {KNOWN}."),
        (("auto",), f"The backend to replay on is 'auto'; there is no such backend. Known: {KNOWN}."),
        (("*=torch",), "The backend to replay on is '*=torch'; there is no such backend. Did you mean 'torch'?"),
        (("reference",), f"The backend to replay on is 'reference'; there is no such backend. Known: {KNOWN}."),
        (
            ("torch", "torch,composite"),
            "The backend to compare with is 'torch,composite'; there is no such backend. Did you mean 'composite'?",
        ),
        (
            ("torch", "composite;torch"),
            "The backend to compare with is 'composite;torch'; there is no such backend. Did you mean 'composite'?",
        ),
        (("torch", ""), f"The backend to compare with is ''; there is no such backend. Known: {INSTEAD}."),
        (
            ("torch", "refrence"),
            "The backend to compare with is 'refrence'; there is no such backend. Did you mean 'reference'?",
        ),
    ],
)
def test_replay_takes_one_backend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, ...], error: str
) -> None:
    made = captured(torch.ones(2, 8), None, tmp_path / "c")
    error += " Name one backend; a policy will not do."
    with pytest.raises(UsageError) as raised:
        capture.replay(made, *names)
    assert str(raised.value) == error
    options = [f"--{option}={name}" for option, name in zip(("backend", "against"), names, strict=False)]
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(tmp_path / "c"), *options])
    assert (ended.value.code, capsys.readouterr()) == (2, ("", f"triptych: {error}\n"))


def test_a_capture_of_a_backend_that_is_not_here_says_so(tmp_path: Path) -> None:
    made = captured(torch.ones(2, 8), None, tmp_path / "c", backend="gone")
    with pytest.raises(UsageError) as raised:
        capture.replay(made)
    assert str(raised.value) == (
        f"The backend that the call was captured on is 'gone'; there is no such backend. Known: {KNOWN}. "
        "Name one backend; a policy will not do."
    )
    assert capture.replay(made, "torch").agrees


def test_replay_of_an_overflow(tmp_path: Path) -> None:
    x, weight = torch.full((2, 8), 2.0, dtype=torch.float16), torch.full((8,), 6e4, dtype=torch.float16)
    x[:, 0] = 7.0

    def lost(args: tuple[Any, ...], outputs: Tensors) -> Tensors:
        outputs[0][1, 0] = 65504.0
        return outputs

    made = captured(x, weight, tmp_path / "c")
    for against in ("reference", "composite"):
        result = capture.replay(made, against=against)
        assert (result.agrees, result.outputs[0].nonfinite) == (True, 2), str(result)
        with registry.backends.added("wrong", Wrong(lost)):
            result = capture.replay(made, "wrong", against)
        assert (result.differences[0].index, result.differences[0].count) == ((1, 0), 1)


@pytest.mark.parametrize("outputs", [(), torch.ones(1), (torch.ones(4, 8),), None])
def test_a_backend_that_returns_something_else_does_not_agree(tmp_path: Path, outputs: Any) -> None:
    made = captured(torch.ones(4, 8), None, tmp_path / "c")
    with registry.backends.added("wrong", Wrong(lambda args, right: outputs)):
        result = capture.replay(made, "wrong")
    assert not result.agrees
    assert result.error is not None
    assert result.error.startswith("PluginError: rms_norm.forward on backend 'wrong' returned ")


def odd_tensors() -> dict[str, torch.Tensor]:
    x = torch.arange(1.0, 33).view(4, 8)
    return {"negative": torch._neg_view(x), "zero": torch._efficientzerotensor((4, 8))}


@pytest.mark.parametrize("name", ["negative", "zero"])
def test_a_tensor_whose_memory_is_not_its_elements_is_captured_as_its_elements(
    capturing: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("TRIPTYCH_CHECK", "mismatch::composite")  # which copies the arguments as well
    x = odd_tensors()[name]
    folder = capturing("rms_norm.forward")
    triptych.rms_norm(x)
    (path,) = folder.iterdir()
    made = capture.load(path)
    assert torch.equal(made.args[0], x)
    assert capture.replay(made).agrees


WRONG_PLUGIN = """
from triptych import registry
from triptych.backend import Backend

class Wrong(Backend):
    def ops(self):
        return ("rms_norm",)
    def implementation(self, op, phase):
        composite = registry.ops.get(op).phase(phase).composite
        return lambda *args: tuple(output + 1 for output in composite(*args))

backend = Wrong("wrong")
"""


def test_the_script_runs_alone(tmp_path: Path, distribution: Callable[..., Path]) -> None:
    entry_points = "[triptych.backends]\nwrong = wrong_plugin:backend\n"
    plugins = distribution("wrong-plugin", entry_points, wrong_plugin=WRONG_PLUGIN)
    captured(torch.arange(24, dtype=torch.float32).view(3, 8), torch.ones(8), tmp_path / "c", layer='odd"""\\name')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tmp_path / "c" / "replay.py"), *arguments]
        env = {**os.environ, "PYTHONPATH": str(plugins), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, timeout=120)

    good = run()
    assert good.returncode == 0, good.stderr
    assert "captured on 'torch', run on 'torch'" in good.stdout
    assert "y: float32[3, 8]" in good.stdout
    wrong = run("--backend", "wrong", "--against", "composite")
    assert wrong.returncode == 1, wrong.stderr
    assert "run on 'wrong'" in wrong.stdout
    assert "against 'composite': y is off in 24 of 24 elements, first at [0, 0]: " in wrong.stdout
    unknown = run("--backend", "trch")
    assert (unknown.returncode, "Did you mean 'torch'?" in unknown.stderr) == (2, True)


def test_nothing_is_captured_while_a_graph_is_recorded(
    capturing: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = capturing("rms_norm")
    monkeypatch.setattr("triptych.capture.capturing.is_recorded", lambda device: device.type == "cpu")
    triptych.rms_norm(torch.ones(2, 8))
    assert list(folder.iterdir()) == []
    (record,) = caplog.records
    assert record.getMessage().endswith("was not captured: its stream is being recorded into a CUDA graph.")
