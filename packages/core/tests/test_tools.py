"""What the environment switches on: all of it, in order, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import triptych
from triptych import environment, intercept, scope, tools
from triptych.errors import EnvironmentVariableError
from triptych.policy import Policy

ALL = {
    "TRIPTYCH_TRACE": "trace.jsonl",
    "TRIPTYCH_SYNC": "1",
    "TRIPTYCH_CHECK": "nonfinite|mismatch:0.1:composite",
    "TRIPTYCH_FINDINGS": "findings.jsonl",
    "TRIPTYCH_CAPTURE": "captures|*",
}


def has_hooks() -> bool:
    return bool(torch.nn.modules.module._global_forward_pre_hooks)


@pytest.fixture
def everything(fresh_scope: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in ALL.items():
        monkeypatch.setenv(name, value)
    return fresh_scope


def test_nothing_is_installed_when_nothing_is_asked(fresh_scope: Path) -> None:
    triptych.rms_norm(torch.ones(2, 8))
    assert intercept.active == ()
    assert not has_hooks()
    assert list(fresh_scope.iterdir()) == []


def test_what_must_be_on_disk_lies_around_the_checks_and_these_around_sync(everything: Path) -> None:
    scope.process_scope()
    names = [type(each).__name__ for each in intercept.active]
    assert names == ["Synchroniser", "NonFinite", "Mismatch", "Capturer", "Tracer"]
    assert has_hooks()
    tools.uninstall()
    assert intercept.active == ()
    assert not has_hooks()


def test_reading_the_environment_again_replaces_what_was_installed(everything: Path) -> None:
    tools.install_from_environment(Policy())
    tools.install_from_environment(Policy())
    assert len(intercept.active) == 5


@pytest.mark.parametrize("name", ["TRIPTYCH_TRACE", "TRIPTYCH_FINDINGS"])
def test_one_that_cannot_be_switched_on_leaves_none_on(
    everything: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "missing/file")
    with pytest.raises(EnvironmentVariableError, match=f"^{name} is '"):
        triptych.rms_norm(torch.ones(2, 8))
    assert intercept.active == ()


def test_files_stay_where_they_were_when_the_program_changes_its_directory(
    everything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope.process_scope()
    (everything / "elsewhere").mkdir()
    monkeypatch.chdir(everything / "elsewhere")
    triptych.rms_norm(torch.ones(2, 8))
    assert (everything / "trace.jsonl").read_text().count('"kind":"call"') == 1
    assert len(list((everything / "captures").iterdir())) == 1
    assert list((everything / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({}, False),
        ({"TRIPTYCH_BACKEND": "torch"}, False),
        ({"TRIPTYCH_SYNC": "0"}, False),
        ({"TRIPTYCH_BACKEND": "torch;rms_norm@blocks.*=composite"}, True),
        ({"TRIPTYCH_TRACE": "t"}, True),
        ({"TRIPTYCH_CHECK": "nonfinite"}, True),
    ],
)
def test_layers_are_named_from_the_import_on_when_something_needs_it(
    fresh_scope: Path, variables: dict[str, str], asked: bool
) -> None:
    tools.name_layers_if_asked(variables)
    assert has_hooks() is asked


def test_a_configuration_file_that_selects_by_layer_asks_for_names(fresh_scope: Path) -> None:
    (fresh_scope / "triptych.toml").write_text('backend = "rms_norm@blocks.*=torch"')
    tools.name_layers_if_asked({})
    assert has_hooks()


def test_every_variable_of_a_tool_is_a_known_one() -> None:
    assert set(ALL) < set(environment.VARIABLES)
