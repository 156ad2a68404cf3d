"""Variables and configuration files: what is read, in which order it counts, and what is an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import triptych
from triptych import environment, scope
from triptych.errors import EnvironmentVariableError, PolicyError
from triptych.run import preflight

X = torch.ones(2, 8)


def chosen() -> tuple[str, str]:
    decision = triptych.explain("rms_norm", X, None, 1e-6, 0.0, "after_weight")
    return decision.chosen, decision.rule.source


def test_an_unknown_variable_is_an_error_before_anything_runs(
    fresh_scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_BACKND", "torch")
    with pytest.raises(EnvironmentVariableError) as raised:
        triptych.rms_norm(X)
    assert str(raised.value) == (
        "Environment variable TRIPTYCH_BACKND begins with TRIPTYCH_ but Triptych has no such variable. "
        "Did you mean 'TRIPTYCH_BACKEND' or 'TRIPTYCH_ENDS' or 'TRIPTYCH_TRACE'? Correct it or unset it."
    )


def test_sync_takes_0_or_1() -> None:
    environment.check_variables({"TRIPTYCH_SYNC": "1"})
    with pytest.raises(EnvironmentVariableError, match=r"^TRIPTYCH_SYNC is 'yes'\. It takes 1 .* or 0 .*\.$"):
        environment.check_variables({"TRIPTYCH_SYNC": "yes"})


def test_precedence_is_use_then_environment_then_file_then_default(
    fresh_scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again() -> tuple[str, str]:
        monkeypatch.setattr(scope, "_process", None)
        return chosen()

    assert again()[1] == "default"
    (fresh_scope / "triptych.toml").write_text('backend = "composite"\n')
    assert again() == ("composite", f"{fresh_scope / 'triptych.toml'} rule 1")
    monkeypatch.setenv("TRIPTYCH_BACKEND", "torch")
    assert again() == ("torch", "TRIPTYCH_BACKEND rule 1")
    with triptych.use("composite"):
        assert chosen() == ("composite", "triptych.use rule 1")
        with triptych.use("add_rms_norm=torch;rms_norm=torch"):
            assert chosen() == ("torch", "triptych.use rule 2")
        assert chosen() == ("composite", "triptych.use rule 1")
    assert chosen() == ("torch", "TRIPTYCH_BACKEND rule 1")


def test_a_rule_of_the_environment_lies_over_the_file_only_where_it_matches(
    fresh_scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fresh_scope / "triptych.toml").write_text('backend = ["composite", "add_rms_norm=torch"]\n')
    monkeypatch.setenv("TRIPTYCH_BACKEND", "add_rms_norm=composite")
    assert chosen()[0] == "composite"
    assert triptych.explain("add_rms_norm", X, X, None, 1e-6, 0.0, "after_weight").chosen == "composite"


def test_the_nearest_file_counts(fresh_scope: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = fresh_scope / "project" / "deep"
    inner.mkdir(parents=True)
    (fresh_scope / "triptych.toml").write_text('backend = "torch"\n')
    (fresh_scope / "project" / "pyproject.toml").write_text("[tool.other]\nkey = 1\n")
    assert environment.find_configuration(inner) == fresh_scope / "triptych.toml"
    (fresh_scope / "project" / "pyproject.toml").write_text('[tool.triptych]\nbackend = "composite"\n')
    assert environment.find_configuration(inner) == fresh_scope / "project" / "pyproject.toml"
    monkeypatch.chdir(inner)
    assert chosen()[0] == "composite"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('backnd = "torch"', "{path}: unknown key 'backnd' in the Triptych table. Did you mean 'backend'?"),
        ("backend = 3", '{path}: backend is 3. Write backend = "rules" or backend = ["rule", "rule"].'),
        ('backend = "trch"', "{path} rule 1, \"trch\": there is no backend 'trch'. Did you mean 'torch'?"),
    ],
)
def test_a_wrong_file_is_an_error(fresh_scope: Path, text: str, error: str) -> None:
    path = fresh_scope / "triptych.toml"
    path.write_text(text)
    with pytest.raises(PolicyError) as raised:
        triptych.rms_norm(X)
    assert str(raised.value) == error.format(path=path)


@pytest.mark.parametrize("value", ['"torch"', '["torch"]', "3"])
def test_a_table_that_is_none_is_an_error(fresh_scope: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    path = fresh_scope / "pyproject.toml"
    path.write_text(f"[tool]\ntriptych = {value}\n")
    error = (
        f"{path}: tool.triptych is {value.replace(chr(34), chr(39))}. It must be a table. "
        'Write [tool.triptych] and under it backend = "rules" or backend = ["rule", "rule"].'
    )
    for read in (environment.configured, lambda: preflight.check_environment({}), lambda: triptych.rms_norm(X)):
        with pytest.raises(PolicyError) as raised:
            read()
        assert str(raised.value) == error


def test_what_is_configured(fresh_scope: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.configured() is None
    path = fresh_scope / "pyproject.toml"
    path.write_text("tool = 3")
    assert environment.configured() is None
    path.write_text('[tool.triptych]\nbackend = ["auto", "rms_norm=torch"]\n')
    assert environment.configured() == ("auto;rms_norm=torch", str(path))
    path.write_text("[tool.triptych]\n")
    assert environment.configured() == ("", str(path))
    monkeypatch.setattr(environment, "working_directory", lambda: None)
    assert environment.configured() is None


def test_a_file_that_cannot_be_read_is_an_error_or_a_warning(
    fresh_scope: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("triptych.files.read_regular", denied)
    project = fresh_scope / "pyproject.toml"
    project.touch()
    assert environment.configured() is None
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{project} cannot be read: Permission denied. A [tool.triptych] table in it is not applied."
    )
    path = fresh_scope / "triptych.toml"
    path.touch()
    with pytest.raises(PolicyError) as raised:
        environment.configured()
    assert str(raised.value) == (
        f"{path} cannot be read: Permission denied. Make it a file that can be read, or remove it."
    )


MADE: dict[str, tuple[Callable[[Path], object], str]] = {
    "directory": (lambda path: path.mkdir(), "Is a directory"),
    "pipe": (os.mkfifo, "Is a pipe, not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/null"), "Is a device, not a regular file"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "No such file or directory"),
    "link loop": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("kind", MADE)
def test_an_entry_called_triptych_toml_is_ours_whatever_it_is(fresh_scope: Path, kind: str) -> None:
    make, found = MADE[kind]
    path = fresh_scope / "triptych.toml"
    make(path)
    inner = fresh_scope / "inner"
    inner.mkdir()
    assert environment.find_configuration(inner) == path
    with pytest.raises(PolicyError) as raised:
        triptych.rms_norm(X)
    assert str(raised.value) == f"{path} cannot be read: {found}. Make it a file that can be read, or remove it."


@pytest.mark.parametrize("kind", MADE)
def test_an_entry_called_pyproject_toml_that_is_no_file_holds_no_table(fresh_scope: Path, kind: str) -> None:
    MADE[kind][0](fresh_scope / "pyproject.toml")
    assert chosen()[1] == "default"


def test_a_link_to_a_file_and_a_byte_order_mark_are_fine(fresh_scope: Path) -> None:
    (fresh_scope / "real.toml").write_bytes(b'\xef\xbb\xbfbackend = "composite"\n')
    (fresh_scope / "triptych.toml").symlink_to("real.toml")
    assert chosen()[0] == "composite"
    (fresh_scope / "triptych.toml").unlink()
    (fresh_scope / "pyproject.toml").write_bytes(b'\xef\xbb\xbf[tool.triptych]\nbackend = "torch"\n')
    assert environment.configured() == ("torch", str(fresh_scope / "pyproject.toml"))


DEEP = b"[" * 5000
INVALID = {
    "no value": (b"backend = ", "Invalid value"),
    "nested too deep": (b"backend = " + DEEP, "maximum recursion depth exceeded"),
    "another encoding": ('backend = "torch"'.encode("utf-16"), "'utf-8' codec can't decode"),
    "a number of many digits": (b"backend = " + b"9" * 5000, "Exceeds the limit"),
}


@pytest.mark.parametrize("name", INVALID)
def test_a_file_that_is_not_valid_is_an_error_if_it_names_our_table(fresh_scope: Path, name: str) -> None:
    content, cause = INVALID[name]
    own, project = fresh_scope / "triptych.toml", fresh_scope / "pyproject.toml"
    own.write_bytes(content)
    with pytest.raises(PolicyError) as raised:
        triptych.rms_norm(X)
    assert str(raised.value).startswith(f"{own} is not valid TOML: {cause}")
    own.unlink()
    project.write_bytes(content)
    assert environment.configured() is None  # somebody else's
    encoding = "utf-16-le" if name == "another encoding" else "utf-8"
    for header in ("[tool.triptych]\n", "[ tool . 'triptych' ]\n", "tool.triptych.backend = 'torch'\n",
                   "[tool]\nother = 1\ntriptych = {}\n", "tool = {other = 1, triptych = {}}\n"):  # fmt: skip
        project.write_bytes(header.encode(encoding) + content)
        with pytest.raises(PolicyError) as raised:
            environment.configured()
        assert str(raised.value).startswith(f"{project} is not valid TOML, and it names the Triptych table: {cause}")


@pytest.mark.parametrize(
    "text",
    [
        "[project",
        'dependencies = ["triptych"]\n[project',
        "[tool.uv.sources]\ntriptych = {}\n[project",
        "# triptych\n[",
    ],
)
def test_a_broken_pyproject_that_has_no_table_of_ours_is_somebody_elses(fresh_scope: Path, text: str) -> None:
    (fresh_scope / "pyproject.toml").write_text(text)
    assert chosen()[1] == "default"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[[tool.triptych]]\nbackend = 'torch'\n", "tool.triptych is [{'backend': 'torch'}]"),
        ("[[tool]]\n[tool.triptych]\nbackend = 'torch'\n", "tool is [{'triptych': {'backend': 'torch'}}]"),
    ],
)
def test_an_array_of_tables_is_no_table(fresh_scope: Path, text: str, found: str) -> None:
    (fresh_scope / "pyproject.toml").write_text(text)
    with pytest.raises(PolicyError) as raised:
        triptych.rms_norm(X)
    assert f"pyproject.toml: {found}. It must be a table. Write [tool.triptych]" in str(raised.value)


@pytest.mark.parametrize("text", ["tool = 5", "[[tool]]\nother = 1\n", "tool = ['triptych']"])
def test_a_tool_that_is_no_table_and_does_not_name_ours_is_somebody_elses(fresh_scope: Path, text: str) -> None:
    (fresh_scope / "pyproject.toml").write_text(text)
    assert chosen()[1] == "default"


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("TRIPTYCH_TRACE", "t.jsonl", "t.jsonl"),
        ("TRIPTYCH_FINDINGS", "f.jsonl", "f.jsonl"),
        ("TRIPTYCH_CAPTURE", "c|*", "c"),
    ],
)
def test_a_relative_path_in_a_directory_that_is_gone_is_an_error(
    fresh_scope: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, named: str
) -> None:
    gone = fresh_scope / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv(variable, value)
    with pytest.raises(EnvironmentVariableError) as raised:
        triptych.rms_norm(X)
    assert str(raised.value) == (
        f"{variable} names '{named}', which is relative to the working directory, and that no longer exists. "
        f"Write an absolute path, or start in a directory that exists."
    )
    monkeypatch.setenv(variable, value.replace(named, str(fresh_scope / named)))
    triptych.rms_norm(X)
    monkeypatch.chdir(fresh_scope)


def test_a_change_that_comes_too_late_is_reported(fresh_scope: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_BACKEND", "torch")
    triptych.rms_norm(X)
    assert triptych.report().notes == ()
    os.environ["TRIPTYCH_BACKEND"] = "composite"
    assert chosen()[0] == "torch"
    assert triptych.report().notes == (
        "TRIPTYCH_BACKEND is now 'composite' but was 'torch' when the first op ran; the change was not applied. "
        "Set it before the program starts, or use triptych.use.",
    )
