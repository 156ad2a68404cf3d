"""Wrong use is told before anything runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from triptych import registry
from triptych.backend import Backend
from triptych.bisect.start import Asked, bisect, sides
from triptych.errors import TriptychError

ASKED = Asked(("python", "job.py"), "composite", "torch", (), None, 1, None, 1, Path("state"))
BACKENDS = ", ".join(registry.backends.names())


def error(asked: Asked) -> str:
    with pytest.raises(TriptychError) as caught:
        bisect(asked, Console(quiet=True), resume=False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"repeat": 0}, "--repeat is 0. It must be 1 or more."),
        ({"jobs": -1}, "--jobs is -1. It must be 1 or more."),
        ({"confidence": 95.0}, "--confidence is 95.0. It must lie between 0 and 1, such as 0.95."),
        ({"confidence": 1.0}, "--confidence is 1.0. It must lie between 0 and 1, such as 0.95."),
        ({"confidence": float("nan")}, "--confidence is nan. It must lie between 0 and 1, such as 0.95."),
        ({"confidence": 0.95, "repeat": 3},
         "--repeat 3 says how often a trial runs, --confidence 0.95 derives it from how often the bad policy fails. Leave "
         "out one of them."),
        ({"timeout": 0.0}, "--timeout is 0.0. It must be a number of seconds greater than 0."),
        ({"timeout": float("nan")}, "--timeout is nan. It must be a number of seconds greater than 0."),
        ({"command": ()},
         "No command was given. Write it after --, for example: triptych bisect -- python train.py"),
        ({"bad": "composite"},
         '--good "composite" and --bad "composite" choose the same backend for every op: there is nothing to swap. '
         f"Name the backend that fails with --bad. Backends: {BACKENDS}."),
        ({"bad": " ; "}, "--bad is empty. Write policy rules, such as --bad torch."),
        ({"bad": "torhc"}, "--bad rule 1, \"torhc\": there is no backend 'torhc'. Did you mean 'torch'?"),
        ({"good": "rms_nrom=torch"},
         "--good rule 1, \"rms_nrom=torch\": no op matches 'rms_nrom'. Did you mean 'rms_norm' or 'add_rms_norm'?"),
        ({"fail_on": ("timeout",)},
         "--fail-on timeout needs a time after which a run counts as hung. Add --timeout SECONDS."),
    ],
)  # fmt: skip
def test_wrong_use(fresh_scope: Path, change: dict[str, object], text: str) -> None:
    assert error(replace(ASKED, **change)) == text  # type: ignore[arg-type]
    assert list(fresh_scope.iterdir()) == []


def test_a_command_that_does_not_exist(fresh_scope: Path) -> None:
    assert error(replace(ASKED, command=("no-such-command-at-all",))).startswith(
        "There is no command 'no-such-command-at-all' in PATH."
    )
    assert list(fresh_scope.iterdir()) == []


def test_what_is_compared_by_default(fresh_scope: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [side.text for side in sides(None, None)] == ["torch", "auto"]
    (fresh_scope / "triptych.toml").write_text('backend = ["auto", "rms_norm=composite"]\n')
    assert [side.text for side in sides(None, None)] == ["torch", "auto;rms_norm=composite"]
    monkeypatch.setenv("TRIPTYCH_BACKEND", "composite")
    assert [side.text for side in sides(None, None)] == ["torch", "composite"]


def test_the_configuration_file_lies_beneath_both_policies(fresh_scope: Path) -> None:
    (fresh_scope / "triptych.toml").write_text('backend = "composite"\n')
    good, bad = sides("rms_norm=torch", "rms_norm=torch;rms_norm.backward=composite")
    assert good.choice("add_rms_norm", "forward", "", 0, 0) == "composite"
    assert good.choice("rms_norm", "backward", "", 0, 0) == "torch"
    assert bad.choice("rms_norm", "backward", "", 0, 0) == "composite"


def test_a_backend_of_this_process_counts(fresh_scope: Path) -> None:
    with registry.backends.added("mine", Backend("mine")):
        assert sides("torch", "mine")[1].text == "mine"
