"""`triptych run` and the program around it: what is refused before anything runs, and how a command's end is passed on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from triptych import trace
from triptych.cli.app import main

PYTHON = sys.executable
TRIPTYCH = (PYTHON, "-m", "triptych")
ONE_STEP = (
    "import torch, triptych; layer = triptych.layers.RMSNorm(8); "
    "layer(torch.ones(2, 8)).sum().backward(); layer(torch.ones(2, 8))"
)


def call(*arguments: str) -> int:
    """The exit status of the program, run in this process."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def marker(fresh_scope: Path) -> Path:
    """A file that `touch` makes when a command ran after all."""
    return fresh_scope / "ran"


@pytest.mark.parametrize(
    ("options", "command", "error"),
    [
        (
            [],
            ["no-such-prgram-xyzzy"],
            "There is no command 'no-such-prgram-xyzzy' in PATH. PATH is {path}. Correct the command.",
        ),
        ([], ["bin/missing"], "There is no file 'bin/missing' to run. Correct the path of the command."),
        (
            [],
            ["train.py"],
            "The command 'train.py' is a file that is not executable. Write the command that runs it: python train.py",
        ),
        (
            ["--backend", "trch"],
            ["touch", "ran"],
            "--backend rule 1, \"trch\": there is no backend 'trch'. Did you mean 'torch'?",
        ),
        (
            ["--backend", "torch;rms_nrm=torch"],
            ["touch", "ran"],
            "--backend rule 2, \"rms_nrm=torch\": no op matches 'rms_nrm'. Did you mean 'rms_norm' or 'add_rms_norm'?",
        ),
        (
            ["--trace", "missing/trace"],
            ["touch", "ran"],
            "--trace missing/trace: No such file or directory. Name a file that can be written, in a folder that exists.",
        ),
        (
            ["--trace", "."],
            ["touch", "ran"],
            "--trace .: Is a directory. Name a file that can be written, in a folder that exists.",
        ),
        (
            ["--json", "missing/result"],
            ["touch", "ran"],
            "--json missing/result: No such file or directory. Name a file that can be written, in a folder that exists.",
        ),
        (
            ["--capture", "captures"],
            ["touch", "ran"],
            "TRIPTYCH_CAPTURE is 'captures'. Write DIRECTORY|SELECTOR, for example captures|rms_norm.backward#7, "
            "or captures|* for every call.",
        ),
        (
            ["--watch"],
            ["touch", "ran"],
            "--watch is not available yet. Leave it out; --trace, --sync and --capture are.",
        ),
        (
            ["--guard"],
            ["touch", "ran"],
            "--guard is not available yet. Leave it out; --trace, --sync and --capture are.",
        ),
        (
            ["--compare", "torch"],
            ["touch", "ran"],
            "--compare is not available yet. Leave it out; --trace, --sync and --capture are.",
        ),
    ],
)
def test_what_is_refused_before_anything_runs(
    marker: Path, capfd: pytest.CaptureFixture[str], options: list[str], command: list[str], error: str
) -> None:
    Path("train.py").write_text("")
    assert call("run", *options, "--", *command) == 2
    out, err = capfd.readouterr()
    assert err == "triptych: " + error.format(path=os.environ["PATH"]) + "\n"
    assert out == ""
    assert not marker.exists()


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        (
            "TRIPTYCH_SNC",
            "1",
            "Environment variable TRIPTYCH_SNC begins with TRIPTYCH_ but Triptych has no such variable. "
            "Did you mean 'TRIPTYCH_SYNC'",
        ),
        (
            "TRIPTYCH_BACKEND",
            "trch",
            "TRIPTYCH_BACKEND rule 1, \"trch\": there is no backend 'trch'. Did you mean 'torch'?",
        ),
        ("TRIPTYCH_CHECK", "nan", "TRIPTYCH_CHECK is 'nan': 'nan' is not a check."),
    ],
)
def test_the_environment_is_checked_before_anything_runs(
    marker: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    error: str,
) -> None:
    monkeypatch.setenv(variable, value)
    assert call("run", "--", "touch", "ran") == 2
    assert capfd.readouterr().err.startswith("triptych: " + error)
    assert not marker.exists()


@pytest.mark.parametrize("place", ["/dev/null", "/dev/full", "pipe"])
def test_a_trace_is_a_regular_file(marker: Path, capfd: pytest.CaptureFixture[str], place: str) -> None:
    os.mkfifo("pipe")
    found = f"Is a {'pipe' if place == 'pipe' else 'device'}, not a regular file"
    remedy = "Name a file that can be written, in a folder that exists."
    assert call("run", "--trace", place, "--", "touch", "ran") == 2
    assert capfd.readouterr() == ("", f"triptych: --trace {place}: {found}. {remedy}\n")
    for variable in ("TRIPTYCH_TRACE", "TRIPTYCH_FINDINGS"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(variable, os.path.abspath(place))
            assert call("run", "--json", "r.json", "--", "touch", "ran") == 2
        assert capfd.readouterr() == ("", f"triptych: {variable} is '{os.path.abspath(place)}': {found}. {remedy}\n")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("TRIPTYCH_TRACE", "/nonexist/x", "TRIPTYCH_TRACE is '/nonexist/x': No such file or directory."),
        ("TRIPTYCH_FINDINGS", "/tmp", "TRIPTYCH_FINDINGS is '/tmp': Is a directory."),
        ("TRIPTYCH_CAPTURE", "/proc/x|*", "TRIPTYCH_CAPTURE names the directory '/proc/x': No such file or directory."),
    ],
)
def test_what_the_environment_names_is_tried_before_anything_runs(
    marker: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    error: str,
) -> None:
    monkeypatch.setenv(variable, value)
    assert call("run", "--", "touch", "ran") == 2
    assert capfd.readouterr().err.startswith(f"triptych: {error} Name ")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("options", "variables", "error"),
    [
        (["--trace", "f", "--json", "./f"], {}, "--json f is the file of the trace as well."),
        (["--json", "link"], {"TRIPTYCH_TRACE": "f"}, "--json link is the file of the trace as well."),
        (["--json", "f"], {"TRIPTYCH_FINDINGS": "f"}, "--json f is the file of the findings as well."),
        (["--trace", "f"], {"TRIPTYCH_FINDINGS": "f"}, "TRIPTYCH_TRACE and TRIPTYCH_FINDINGS both name '{folder}/f'."),
    ],
)
def test_two_results_do_not_go_into_one_file(
    marker: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    variables: dict[str, str],
    error: str,
) -> None:
    Path("f").write_text("kept")
    Path("link").symlink_to("f")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert call("run", *options, "--", "touch", "ran") == 2
    expected = error.format(folder=marker.parent)
    assert capfd.readouterr().err == f"triptych: {expected} Name a file for each.\n"
    assert Path("f").read_text() == "kept"
    assert not marker.exists()


def test_a_variable_that_is_empty_names_no_trace(fresh_scope: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_TRACE", "")
    assert call("run", "--json", "r.json", "--", PYTHON, "-c", ONE_STEP) == 0
    assert len(json.loads(Path("r.json").read_text())["calls"]) == 2


@pytest.mark.parametrize("option", ["--trace", "--capture"])
def test_a_relative_path_in_a_directory_that_is_gone(
    marker: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    gone = marker.parent / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert call("run", option, "x|*", "--", "touch", str(marker)) == 2
    assert capfd.readouterr().err.startswith(f"triptych: {option} names 'x")
    monkeypatch.chdir(marker.parent)
    assert not marker.exists()


# --- output that cannot be written ------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["triptych info", "triptych explain rms_norm", "triptych --help"])
def test_output_to_a_full_device_is_a_short_error(fresh_scope: Path, module: str) -> None:
    with open("/dev/full", "w") as full:
        command = [PYTHON, "-m", *module.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    error = "the output cannot be written: No space left on device. Make room, or send it elsewhere."
    assert (done.returncode, done.stderr) == (2, f"triptych: {error}\n")


def test_errors_to_a_full_device_do_not_hide_the_end_of_the_command(fresh_scope: Path) -> None:
    command = [*TRIPTYCH, "run", "--trace", "t.jsonl", "--", "sh", "-c", "exit 7"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stderr=full, timeout=120).returncode == 7


def test_a_reader_that_goes_away_is_no_error(fresh_scope: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run([*TRIPTYCH, "info"], stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_configuration_file_is_checked_before_anything_runs(
    marker: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (marker.parent / "triptych.toml").write_text('backend = "trch"')
    assert call("run", "--", "touch", "ran") == 2
    assert "triptych.toml rule 1, \"trch\": there is no backend 'trch'" in capfd.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["run"], "Missing argument 'CMD'"),
        (["run", "--bogus", "--", "true"], "No such option: --bogus"),
        (["rn", "--", "true"], "No such command 'rn'"),
    ],
)
def test_wrong_use_ends_with_2(
    fresh_scope: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    assert call(*arguments) == 2
    assert error in capfd.readouterr().err


def test_the_version(capfd: pytest.CaptureFixture[str]) -> None:
    import triptych

    assert call("--version") == 0
    assert capfd.readouterr().out == f"triptych {triptych.__version__}\n"


@pytest.mark.parametrize(
    ("script", "status", "end"),
    [
        ("exit 0", 0, {"code": 0, "signal": None}),
        ("exit 77", 77, {"code": 77, "signal": None}),
        ("kill -SEGV $$", 139, {"code": None, "signal": 11}),
    ],
)
def test_the_end_of_the_command_is_the_end_of_run(
    fresh_scope: Path, capfd: pytest.CaptureFixture[str], script: str, status: int, end: dict[str, int | None]
) -> None:
    assert call("run", "--json", "r.json", "--trace", "t.jsonl", "--", "sh", "-c", script) == status
    expected = {"schema": 1, "exit": end, "calls": [], "processes": [], "failed_first": None}
    assert json.loads(Path("r.json").read_text()) == expected
    assert capfd.readouterr().err == "triptych: no Triptych op ran\n" + (
        "triptych: the command was ended by SIGSEGV\n" if end["signal"] else ""
    )


def test_input_output_and_arguments_are_the_commands_own(fresh_scope: Path) -> None:
    code = "import sys; print(sys.argv[1:], sys.stdin.read()); print('err', file=sys.stderr)"
    command = [*TRIPTYCH, "run", "--", PYTHON, "-c", code, "--trace", "--", "x"]
    done = subprocess.run(command, input="in", capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("['--trace', '--', 'x'] in\n", "err\n", 0)


def test_a_program_is_run_with_a_policy_and_traced(fresh_scope: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("t.jsonl").write_text("what an earlier run left\n")
    options = ["--backend", "torch;rms_norm.backward=composite", "--trace", "t.jsonl", "--json", "r.json", "--sync"]
    assert call("run", *options, "--", PYTHON, "-c", f"import os; os.chdir('/'); {ONE_STEP}") == 0
    assert capfd.readouterr().err == (
        "triptych: 1 call of rms_norm.backward on composite in 1 process\n"
        "triptych: 2 calls of rms_norm.forward on torch in 1 process\n"
    )
    found = json.loads(Path("r.json").read_text())
    (process,) = found.pop("processes")
    assert (process["rank"], process["raised"], process["end"]) in (
        (None, None, "ended with 0"),
        (None, None, "ended by itself"),  # we have asked for its status before it could be seen
    )
    assert found == {
        "schema": 1,
        "exit": {"code": 0, "signal": None},
        "calls": [
            {"op": "rms_norm", "phase": "backward", "backend": "composite", "calls": 1, "processes": 1, "ranks": []},
            {"op": "rms_norm", "phase": "forward", "backend": "torch", "calls": 2, "processes": 1, "ranks": []},
        ],
        "failed_first": None,
    }
    assert trace.read(Path("t.jsonl")).processes[0].policy == "torch;rms_norm.backward=composite"
    assert "TRIPTYCH_BACKEND" not in os.environ


def test_without_a_trace_the_result_has_the_calls_too_and_nothing_is_left(
    fresh_scope: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--backend", "composite", "--json", "r.json", "--capture", "captures|rms_norm.backward#0"]
    assert call("run", *options, "--", PYTHON, "-c", ONE_STEP) == 0
    assert [each["backend"] for each in json.loads(Path("r.json").read_text())["calls"]] == ["composite", "composite"]
    assert capfd.readouterr().err == ""
    assert sorted(each.name for each in fresh_scope.iterdir()) == ["captures", "r.json"]
    assert call("replay", "captures/rms_norm.backward.0", "--json", "replay.json") == 0
    assert json.loads(Path("replay.json").read_text())["backend"] == "composite"
    assert "every element agrees" in capfd.readouterr().out
    assert call("replay", "captures/rms_norm.backward.1") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_command(fresh_scope: Path, number: signal.Signals) -> None:
    code = (
        "import signal, sys, time\n"
        "def stop(number, frame):\n    print('got', number, flush=True); sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop)\n"
        "print('ready', flush=True); time.sleep(300)"
    )
    command = [*TRIPTYCH, "run", "--", PYTHON, "-c", code]
    # A session of its own has no terminal, so that SIGINT is ours to forward.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"got {int(number)}\n"
        assert process.wait(60) == 5


def test_a_command_that_a_forwarded_signal_ends(fresh_scope: Path) -> None:
    command = [*TRIPTYCH, "run", "--", PYTHON, "-c", "print('ready', flush=True); import time; time.sleep(300)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 30


ONE_INTERRUPT = """
import signal, time
count = 0
def stop(number, frame):
    global count
    count += 1
signal.signal(signal.SIGINT, stop)
print("ready", flush=True)
while not count:
    time.sleep(0.05)
time.sleep(1)
print("interrupts:", count, flush=True)
"""


def test_an_interrupt_from_the_keyboard_reaches_the_command_once(fresh_scope: Path) -> None:
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    command = [PYTHON, "-c", spawn, *TRIPTYCH, "run", "--", PYTHON, "-c", ONE_INTERRUPT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("\x03")
        process.stdin.flush()
        assert process.stdout.readline().endswith("interrupts: 1\n")
        assert process.wait(60) == 0


def test_a_trace_that_was_spoilt_does_not_hide_the_end_of_the_command(
    fresh_scope: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call("run", "--trace", "t.jsonl", "--", "sh", "-c", "echo spoilt >> $TRIPTYCH_TRACE; exit 3") == 3
    assert "triptych: what ran cannot be told: " in capfd.readouterr().err
