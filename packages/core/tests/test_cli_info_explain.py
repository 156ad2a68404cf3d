"""`triptych info` and `triptych explain`: their texts, their JSON, their exit statuses."""

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
from spies import Spy, ran

import triptych
from triptych import intercept, registry, trace
from triptych.cli.app import main

ASKED = "x=bfloat16[8, 64] on cuda:1, weight=bfloat16[64] on cuda:1, eps=1e-06, offset=0.0, rounding='after_weight'"
OPTIONS = ("--shape", "8x64", "--dtype", "bfloat16", "--device", "cuda:1")
TENSORS = {
    "x": {"shape": [8, 64], "stride": [64, 1], "dtype": "bfloat16", "device": "cuda:1", "aligned": True},
    "weight": {"shape": [64], "stride": [1], "dtype": "bfloat16", "device": "cuda:1", "aligned": True},
}
CALL = {
    "op": "rms_norm",
    "phase": "forward",
    "tensors": TENSORS,
    "scalars": {"eps": 1e-6, "offset": 0.0, "rounding": "after_weight"},
}
REASON = "this spy refuses it. Use 'composite'."
Program = Callable[..., tuple[int, str, str]]


@pytest.fixture
def program(fresh_scope: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Program:
    """Run the program in this process; returns its exit status, output and error output."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: str) -> tuple[int, str, str]:
        with ran() as seen, pytest.raises(SystemExit) as ended:
            main(arguments)
        assert seen == {}
        assert isinstance(ended.value.code, int)
        written = capsys.readouterr()
        return ended.value.code, written.out, written.err

    return call


def recorded(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


# --- explain ----------------------------------------------------------------------------------------------------------


def test_a_decision(program: Program, fresh_scope: Path) -> None:
    path = fresh_scope / "decision.json"
    with registry.backends.added("spy", Spy(refuse=("forward",))):
        end = program(
            "explain", "rms_norm", *OPTIONS, "--layer", "blocks.3", "--backend", "torch;@blocks.*=spy,composite",
            "--json", str(path),
        )  # fmt: skip
    version = triptych.__version__
    assert end == (
        0,
        f"rms_norm.forward runs on composite (triptych {version})\n"
        "  decided by: @blocks.*=spy,composite (triptych.use rule 2)\n"
        f"  not spy: {REASON}\n"
        "  compile mode: opaque (default)\n"
        f"  asked: rms_norm.forward({ASKED})\n",
        "",
    )
    assert recorded(path) == {
        "schema": 1,
        "call": CALL,
        "layer": "blocks.3",
        "rule": "@blocks.*=spy,composite",
        "source": "triptych.use rule 2",
        "chosen": "composite",
        "rejected": [{"backend": "spy", "reasons": [REASON]}],
        "broken": [],
        "distribution": "triptych",
        "version": version,
        "compile": {"mode": "opaque", "source": "default", "opaque": "the compile mode is opaque"},
    }


def test_a_decision_of_backward(program: Program) -> None:
    with registry.backends.added("spy", Spy(refuse=("forward",))):
        status, text, _ = program("explain", "rms_norm", *OPTIONS, "--phase", "backward", "--backend", "spy")
    assert status == 0
    assert text.splitlines()[:2] == ["rms_norm.backward runs on spy", "  decided by: spy (triptych.use rule 1)"]
    assert "  asked: rms_norm.backward(dy=bfloat16[8, 64] with any strides on cuda:1, x=" in text


def test_a_refusal_is_the_same_record_with_nothing_chosen(program: Program, fresh_scope: Path) -> None:
    path = fresh_scope / "refusal.json"
    with registry.backends.added("spy", Spy(refuse=("forward",))):
        end = program(
            "explain", "rms_norm", *OPTIONS, "--layer", "blocks.3", "--backend", "@blocks.*=spy", "--json", str(path)
        )
    assert end == (
        1,
        "Refused: rms_norm.forward in layer 'blocks.3' on 'spy' (triptych.use rule 1, \"@blocks.*=spy\")\n"
        f"  - {REASON}\n"
        f"  asked: rms_norm.forward({ASKED})\n",
        "",
    )
    assert recorded(path) == {
        "schema": 1,
        "call": CALL,
        "layer": "blocks.3",
        "rule": "@blocks.*=spy",
        "source": "triptych.use rule 1",
        "chosen": None,
        "rejected": [{"backend": "spy", "reasons": [REASON]}],
        "broken": [],
        "distribution": None,
        "version": None,
    }


def test_the_policy_in_force_is_explained(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_BACKEND", "composite;rms_norm=torch")
    status, text, _ = program("explain", "rms_norm", "--dtype", "torch.float64")
    assert status == 0
    assert text.splitlines()[1] == "  decided by: rms_norm=torch (TRIPTYCH_BACKEND rule 2)"
    assert "x=float64[4096, 4096] on cpu" in text


DEVICE = "Write a torch device, for example cpu, cuda or cuda:1."
SHAPE = "Write sizes joined by x, for example 4096x4096 or 8x128x4096."


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("rms_nrm",), "There is no op 'rms_nrm'. Did you mean 'rms_norm' or 'add_rms_norm'?"),
        (("rms_norm", "--phase", "bakward"), "There is no phase 'bakward'. Did you mean 'backward'?"),
        (("rms_norm", "--dtype", "bfloat"), "--dtype is 'bfloat'. Did you mean 'bfloat16' or 'float64' or 'float32'?"),
        (("rms_norm", "--dtype", "int8"), "--dtype is 'int8'. Known: bfloat16, float16, float32, float64."),
        (("rms_norm", "--device", "gpu"), f"--device is 'gpu'. {DEVICE}"),
        (("rms_norm", "--device", "cuda:x"), f"--device is 'cuda:x'. {DEVICE}"),
        (("rms_norm", "--device", "cuda:999"), f"--device is 'cuda:999'. {DEVICE}"),
        (("rms_norm", "--shape", "4096,4096"), f"--shape is '4096,4096'. {SHAPE}"),
        (("rms_norm", "--shape", "8x-4"), f"--shape is '8x-4'. {SHAPE}"),
        (("rms_norm", "--shape", ""), f"--shape is ''. {SHAPE}"),
        (("rms_norm", "--backend", "trch"),
         "triptych.use rule 1, \"trch\": there is no backend 'trch'. Did you mean 'torch'?"),
        (("rms_norm", "--json", "missing/decision.json"),
         "--json missing/decision.json: cannot be written (No such file or directory). Name a file in a writable folder."),
    ],
)  # fmt: skip
def test_what_cannot_be_explained(program: Program, arguments: tuple[str, ...], error: str) -> None:
    assert program("explain", *arguments) == (2, "", f"triptych: {error}\n")


@pytest.mark.parametrize(
    "shape",
    ["99999999999999999999x4", "4611686018427387904x4", "1152921504606846976", "0x99999999999999999999", "9" * 5000],
)
def test_a_shape_that_no_tensor_has(program: Program, shape: str) -> None:
    shown = shape if len(shape) < 60 else shape[:57] + "..."
    error = f"--shape is '{shown}'. A tensor has fewer than 2**60 elements (a size of 0 counts as 1). Use smaller."
    assert program("explain", "rms_norm", "--shape", shape) == (2, "", f"triptych: {error}\n")


@pytest.mark.parametrize("shape", ["1152921504606846975", "0x1152921504606846975", "000000000000000000000000004x8"])
def test_a_shape_that_a_tensor_may_have(program: Program, shape: str) -> None:
    status, text, errors = program("explain", "rms_norm", "--shape", shape, "--dtype", "float64")
    assert (status, errors) == (0, "")
    assert text.startswith("rms_norm.forward runs on ")


@pytest.mark.parametrize("command", [("explain", "rms_norm"), ("info",)])
def test_commands_that_read_switch_no_tool_on(
    fresh_scope: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("TRIPTYCH_TRACE", "t.jsonl")
    monkeypatch.setenv("TRIPTYCH_FINDINGS", "f.jsonl")
    monkeypatch.setenv("TRIPTYCH_CAPTURE", "captures|*")
    monkeypatch.setenv("TRIPTYCH_BACKEND", "composite")
    with pytest.raises(SystemExit) as ended:
        main(command)
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    assert "TRIPTYCH_BACKEND rule 1" in out
    assert list(fresh_scope.iterdir()) == []
    assert intercept.active == ()
    monkeypatch.setenv("TRIPTYCH_CAPTURE", "captures")
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("triptych: TRIPTYCH_CAPTURE is 'captures'. Write ")


# --- info -------------------------------------------------------------------------------------------------------------


def test_info(program: Program, fresh_scope: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_BACKEND", "auto;rms_norm=torch")
    (fresh_scope / "triptych.toml").write_text('backend = "composite"\n')
    with registry.backends.added("spy", Spy()):
        status, text, errors = program("info", "--json", "info.json")
    assert (status, errors) == (0, "")
    found = recorded(fresh_scope / "info.json")
    assert list(found) == ["schema", "versions", "devices", "backends", "ops", "policy", "environment"]
    assert found["schema"] == 1
    assert found["versions"] == trace.versions()
    assert found["devices"][0].startswith(f"cpu: {torch.get_num_threads()} thread")
    assert [row["name"] for row in found["backends"]] == sorted((*registry.backends.names(), "spy"))
    rows = {row["name"]: row for row in found["backends"]}
    assert rows["spy"] == {
        "name": "spy",
        "origin": "this process",
        "ops": list(registry.ops.names()),
        "auto": {},
        "broken": None,
        "unavailable": [],
    }
    assert rows["torch"]["origin"] == registry.backends.origin("torch")
    assert set(rows["torch"]["auto"]) == {"cpu", "cuda"}
    ops = {row["name"]: row for row in found["ops"]}
    assert list(ops) == list(registry.ops.names())
    assert {"composite", "spy", "torch"} <= set(ops["rms_norm"]["phases"]["backward"])
    assert (ops["rms_norm"]["summary"], ops["rms_norm"]["broken"]) == (registry.ops.get("rms_norm").summary, None)
    assert found["policy"] == [
        {"rule": "auto", "source": "default"},
        {"rule": "composite", "source": f"{fresh_scope / 'triptych.toml'} rule 1"},
        {"rule": "auto", "source": "TRIPTYCH_BACKEND rule 1"},
        {"rule": "rms_norm=torch", "source": "TRIPTYCH_BACKEND rule 2"},
    ]
    assert found["environment"] == {"TRIPTYCH_BACKEND": "auto;rms_norm=torch"}

    lines = text.splitlines()
    assert f"torch {torch.__version__}" in lines[0]
    assert lines[1] == found["devices"][0]
    (row,) = (line for line in lines if "this process" in line)
    assert [cell.strip() for cell in row.strip("│┃ ").split("│")] == [
        "spy",
        "this process",
        "none: by name only",
        "ready",
    ]
    assert text.endswith(
        "Policy, the last rule that matches decides:\n"
        "  auto  (default)\n"
        f"  composite  ({fresh_scope / 'triptych.toml'} rule 1)\n"
        "  auto  (TRIPTYCH_BACKEND rule 1)\n"
        "  rms_norm=torch  (TRIPTYCH_BACKEND rule 2)\n"
    )


def test_info_says_what_is_not_there(program: Program, fresh_scope: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "triton":
            raise trace.importlib.metadata.PackageNotFoundError(name)
        return "9.8"

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(trace.importlib.metadata, "version", version)
    status, text, _ = program("info", "--json", "info.json")
    assert status == 0
    assert text.splitlines()[0].endswith(", cuda none (a CPU build of torch), triton not installed, triptych 9.8")
    versions = recorded(fresh_scope / "info.json")["versions"]
    assert list(versions) == ["python", "torch", "cuda", "triton", "triptych"]
    assert (versions["cuda"], versions["triton"]) == (None, None)


def test_a_broken_plug_in_is_shown_with_its_cause_and_stops_nothing(
    tmp_path: Path, distribution: Callable[..., Path]
) -> None:
    plugin = distribution(
        "bad", "[triptych.backends]\nbad = bad_module:backend\n", bad_module="import no_such_module\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")}
    done = subprocess.run(
        [sys.executable, "-m", "triptych", "info", "--json", "info.json"],
        cwd=tmp_path,
        env={**environ, "PYTHONPATH": str(plugin), "COLUMNS": "100", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    cause = (
        "Backend 'bad' of bad 1.0 failed to load: ModuleNotFoundError: No module named 'no_such_module'. "
        "Reinstall or uninstall that distribution."
    )
    assert (done.returncode, done.stderr) == (0, "")
    (row,) = (line for line in done.stdout.splitlines() if "bad 1.0" in line and "│" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == ["bad", "bad 1.0", "none: by name only", "broken"]
    assert f"bad: {cause}\n" in done.stdout
    found = recorded(tmp_path / "info.json")
    rows = {each["name"]: each for each in found["backends"]}
    assert rows["bad"] == {
        "name": "bad", "origin": "bad 1.0", "ops": [], "auto": {}, "broken": cause, "unavailable": [],
    }  # fmt: skip
    assert rows["torch"]["broken"] is None
    (op,) = (each for each in found["ops"] if each["name"] == "rms_norm")
    assert "bad" not in op["phases"]["forward"]
    assert "torch" in op["phases"]["forward"]


def raising(*args: object) -> Any:
    raise RuntimeError("[bold]no[/bold] [/red]")


@pytest.mark.parametrize(
    ("question", "method", "cause"),
    [
        (question, raising, "raised RuntimeError: [bold]no[/bold] [/red]")
        for question in ("ops", "priority", "reasons_unavailable")
    ]
    + [
        ("reasons_unavailable", lambda self: None, "answered None, which is not a list of sentences"),
        ("ops", lambda self: 5, "answered 5, which is not a tuple of op names"),
        ("priority", lambda self, kind: "high", "answered 'high', which is not a whole number or None"),
    ],
)
def test_a_plug_in_that_errs_when_asked_is_shown_with_its_cause(
    program: Program, fresh_scope: Path, question: str, method: Callable[..., Any], cause: str
) -> None:
    spy = type("Erring", (Spy,), {question: method})()
    with registry.backends.added("spy", spy):
        status, text, errors = program("info", "--json", "info.json")
    assert (status, errors) == (0, "")
    assert f"spy: Backend 'spy' is broken: its {question} {cause}. Report it" in text
    rows = {row["name"]: row for row in recorded(fresh_scope / "info.json")["backends"]}
    assert rows["spy"]["broken"].startswith(f"Backend 'spy' is broken: its {question} {cause}.")
    assert rows["torch"]["broken"] is None


@pytest.mark.parametrize("answer", [raising, lambda self, op, phase: 5])
def test_a_plug_in_without_a_usable_implementation_runs_nothing(
    program: Program, fresh_scope: Path, answer: Callable[..., Any]
) -> None:
    spy = type("Erring", (Spy,), {"implementation": answer})()
    with registry.backends.added("spy", spy):
        status, _, errors = program("info", "--json", "info.json")
    assert (status, errors) == (0, "")
    for op in recorded(fresh_scope / "info.json")["ops"]:
        for names in op["phases"].values():
            assert "torch" in names
            assert "spy" not in names


def test_a_plug_in_whose_version_cannot_be_read_is_broken(program: Program, fresh_scope: Path) -> None:
    spy = type("Erring", (Spy,), {"version": property(raising)})()
    with registry.backends.added("spy", spy):
        assert program("info", "--json", "info.json")[0] == 0
    rows = {row["name"]: row for row in recorded(fresh_scope / "info.json")["backends"]}
    assert "reading its distribution and version raised RuntimeError" in rows["spy"]["broken"]


def test_names_are_shown_as_they_are(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.backends, "origin", lambda name: "[red]odd[/red] [/] 1.0")
    status, text, errors = program("info")
    assert (status, errors) == (0, "")
    assert "[red]odd[/red] [/] 1.0" in text


def test_help_says_that_a_trace_is_replaced(program: Program) -> None:
    status, text, _ = program("run", "--help")
    assert status == 0
    assert "FILE is replaced" in " ".join(text.replace("│", " ").split())
