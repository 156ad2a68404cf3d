"""Discovery: lazy, deterministic, and one bad plug-in never stops the others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import triptych
from triptych import registry
from triptych.backend import Backend
from triptych.errors import PluginError
from triptych.registry import Group

MakeDistribution = Callable[..., Path]
GOOD = "from triptych.backend import Backend\nbackend = Backend('{0}', '{0}')\n"


def group() -> Group[Backend]:
    return Group(registry.BACKENDS_GROUP, Backend, "Backend")


def test_listing_imports_nothing(distribution: MakeDistribution) -> None:
    distribution("fresh", "[triptych.backends]\nfresh = never_imported:backend\n", never_imported="raise SystemExit(3)")
    assert "fresh" in group().names()
    assert "never_imported" not in sys.modules


def test_importing_triptych_imports_no_backend() -> None:
    code = (
        "import sys, triptych, triptych.registry as r; r.backends.names(); "
        "print([m for m in sys.modules if m.split('.')[0] in ('triton', 'triptych_torch', 'triptych_triton', "
        "'triptych_cuda', 'pybind11')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_plug_in_is_loaded_once(distribution: MakeDistribution) -> None:
    distribution("once", "[triptych.backends]\nonce = once_module:backend\n", once_module=GOOD.format("once"))
    found = group()
    assert found.get("once") is found.get("once")
    assert found.origin("once") == "once 1.0"


def test_two_distributions_that_claim_one_name_are_an_error(distribution: MakeDistribution) -> None:
    for name in ("first", "second"):
        distribution(
            name, f"[triptych.backends]\nsame = {name}_module:backend\n", **{f"{name}_module": GOOD.format("same")}
        )
    found = group()
    with pytest.raises(PluginError) as raised:
        found.get("same")
    assert str(raised.value) == (
        "Backend 'same' is claimed by 2 distributions: first 1.0 and second 1.0. Uninstall all but one of them."
    )
    assert found.get("torch").name == "torch"


def test_a_plug_in_that_fails_to_import_is_broken_with_its_cause(distribution: MakeDistribution) -> None:
    distribution("bad", "[triptych.backends]\nbad = bad_module:backend\n", bad_module="import no_such_module\n")
    found = group()
    error = found.broken()["bad"]
    assert str(error) == (
        "Backend 'bad' of bad 1.0 failed to load: ModuleNotFoundError: No module named 'no_such_module'. "
        "Reinstall or uninstall that distribution."
    )
    assert isinstance(error.__cause__, ModuleNotFoundError)
    assert found.get("torch").name == "torch"
    assert "bad" in found.names()


def test_a_cause_is_raised_anew_each_time(distribution: MakeDistribution) -> None:
    distribution("bad", "[triptych.backends]\nbad = bad_module:backend\n", bad_module="raise SystemExit(3)\n")
    found = group()
    depths = []
    for _ in range(3):
        with pytest.raises(PluginError, match="failed to load: SystemExit: 3") as raised:
            found.get("bad")
        depths.append(len(raised.traceback))
    assert len(set(depths)) == 1


@pytest.mark.parametrize("text", ["backend = 3\n", GOOD.format("other")])
def test_an_entry_point_must_name_a_backend_of_its_name(distribution: MakeDistribution, text: str) -> None:
    distribution("odd", "[triptych.backends]\nodd = odd_module:backend\n", odd_module=text)
    with pytest.raises(PluginError, match=r"must point to a triptych\.backend\.Backend whose name is 'odd'"):
        group().get("odd")
    sys.modules.pop("odd_module", None)


@pytest.mark.parametrize("name", ["auto", "1x", "-x", "a,b", "a;b", "é"])
def test_a_name_that_no_rule_can_mean_is_broken(distribution: MakeDistribution, name: str) -> None:
    distribution("named", f"[triptych.backends]\n{name} = named_module:backend\n", named_module=GOOD.format(name))
    with pytest.raises(PluginError, match="has a name that no rule can mean"):
        group().get(name)


def test_a_backend_whose_version_cannot_be_read_is_rejected() -> None:
    class Torn(Backend):
        def __init__(self) -> None:
            self.name = "torn"  # forgets the rest

        def ops(self) -> tuple[str, ...]:
            return ("rms_norm",)

        def priority(self, device_type: str) -> int:
            return 99

        def implementation(self, op: str, phase: str) -> object:  # type: ignore[override]
            return registry.ops.get(op).phase(phase).composite

    with registry.backends.added("torn", Torn()), triptych.use("auto"):
        decision = triptych.explain("rms_norm", torch.ones(2, 4), None, 1e-6, 0.0, "after_weight")
    assert decision.chosen != "torn"
    assert decision.broken == ("torn",)


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(PluginError, match=r"There is no backend 'trch'\. Did you mean 'torch'\?"):
        registry.backends.get("trch")


def test_a_broken_plug_in_does_not_disturb_calls(distribution: MakeDistribution, tmp_path: Path) -> None:
    root = distribution("bad", "[triptych.backends]\nbad = bad_module:backend\n", bad_module="1 / 0\n")
    code = (
        "import torch, triptych; print(triptych.rms_norm(torch.ones(2, 4)).sum().item())\n"
        "try:\n    with triptych.use('bad'): triptych.rms_norm(torch.ones(2, 4))\n"
        "except triptych.Refused as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(root), "PATH": ""},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    first, *refusal = done.stdout.splitlines()
    assert float(first) == pytest.approx(8.0, rel=1e-5)
    assert "rms_norm.forward runs on" in done.stderr  # what auto passes over because it is broken is a warning
    assert "not on 'bad' (default, \"auto\"): Backend 'bad' of bad 1.0 failed to load" in done.stderr
    assert refusal[:2] == [
        "rms_norm.forward on 'bad' (triptych.use rule 1, \"bad\")",
        "  - Backend 'bad' of bad 1.0 failed to load: ZeroDivisionError: division by zero. "
        "Reinstall or uninstall that distribution.",
    ]


def test_a_backend_added_in_process_is_there_for_the_block_only() -> None:
    with registry.backends.added("mine", Backend("mine")), pytest.raises(triptych.Refused, match="does not implement"):
        with triptych.use("mine"):
            triptych.rms_norm(torch.ones(2, 4))
    assert "mine" not in registry.backends.names()
    with pytest.raises(PluginError, match="already provided by triptych-torch"):
        registry.backends.added("torch", Backend("torch")).__enter__()
