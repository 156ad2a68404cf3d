"""Variables and configuration files: what is read, in which order it counts, and what is an error."""

from __future__ import annotations

import os
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
        "Did you mean 'TRIPTYCH_BACKEND' or 'TRIPTYCH_TRACE'? Correct it or unset it."
    ) or str(raised.value).startswith(
        "Environment variable TRIPTYCH_BACKND begins with TRIPTYCH_ but Triptych has no such variable. "
        "Did you mean 'TRIPTYCH_BACKEND'"
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


def test_a_file_that_cannot_be_read_is_an_error_only_if_it_is_ours(
    fresh_scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Path, encoding: str | None = None) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", denied)
    (fresh_scope / "pyproject.toml").touch()
    assert environment.configured() is None
    (fresh_scope / "triptych.toml").touch()
    with pytest.raises(PolicyError) as raised:
        environment.configured()
    path = fresh_scope / "triptych.toml"
    assert str(raised.value) == f"{path} cannot be read: Permission denied. Make it readable, or remove it."


def test_a_file_that_is_not_toml_is_an_error(fresh_scope: Path) -> None:
    (fresh_scope / "triptych.toml").write_text("backend = ")
    with pytest.raises(PolicyError, match=r"triptych\.toml is not valid TOML: "):
        triptych.rms_norm(X)


def test_somebody_elses_broken_pyproject_is_not_our_error(fresh_scope: Path) -> None:
    (fresh_scope / "pyproject.toml").write_text("[project")
    assert chosen()[1] == "default"


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
