"""docs/cases.md names only what exists, and every case that the code refers to stands in it."""

from __future__ import annotations

import re
from pathlib import Path

from triptych.testing import CHECKS
from triptych.testing.faulty import FAULTS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
TESTS = {
    name
    for folder in ("packages", "tests", "examples")
    for path in ROOT.joinpath(folder).rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
}


def test_every_check_fault_and_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", TEXT))
    assert len(named) > 30
    assert named - CHECKS.keys() - FAULTS.keys() - TESTS == set()
    paths = set(re.findall(r"\b((?:tests|packages|examples)/[\w/.]+?\.py)\b", TEXT))
    assert len(paths) > 5
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_every_planted_fault_of_a_case_is_named_there() -> None:
    rows = dict(re.findall(r"^\| ([SRMW]\d\w?) \| (.*)$", TEXT, re.MULTILINE))
    assert {fault.case for fault in FAULTS.values() if fault.case} <= rows.keys()
    for fault in FAULTS.values():
        if fault.case:
            assert f"`{fault.name}`" in rows[fault.case], fault.name
