"""The matrix in docs/features.md says what its data say, and its rows are those of the tests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from matrix import DOCS, document, keep, table

HERE = Path(__file__).parent


def test_the_document_is_what_its_data_give() -> None:
    assert (DOCS / "features.md").read_text(encoding="utf-8") == document(DOCS / "features")


@pytest.mark.parametrize("name", [file.stem for file in sorted((DOCS / "features").glob("*.json"))])
def test_every_row_is_a_feature_that_tests_name_and_nothing_failed(name: str) -> None:
    cells = json.loads((DOCS / "features" / f"{name}.json").read_text(encoding="utf-8"))["cells"]
    sources = "".join(file.read_text(encoding="utf-8") for file in HERE.glob("test_*.py"))
    named = set(re.findall(r'mark\.feature\("([^"]+)"\)', sources))
    assert {cell[0] for cell in cells} <= named
    assert [cell for cell in cells if cell[4] or not cell[3]] == []


def test_a_cell_stands_only_for_what_ran_and_says_when_it_failed(tmp_path: Path) -> None:
    lines = [
        {"feature": "export", "test": "a", "outcome": "passed", "ran": [["rms_norm", "triton"], ["rms_norm", "mine"]]},
        {"feature": "export", "test": "b", "outcome": "failed", "ran": [["rms_norm", "cuda"]]},
        {"feature": "export", "test": "c", "outcome": "skipped", "ran": [["rms_norm", "torch"]]},
    ]
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = keep(results, "pytest")
    assert kept["cells"] == [["export", "rms_norm", "cuda", 0, 1], ["export", "rms_norm", "triton", 1, 0]]
    assert table(kept).splitlines()[2] == "| export | `· · t c!` |"
