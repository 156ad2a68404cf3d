"""docs/features.md from what the feature tests ran: nothing stands in it that did not run.

FEATURE_RESULTS=results.jsonl pytest tests/features
python tests/features/matrix.py keep cpu results.jsonl     docs/features/cpu.json
python tests/features/matrix.py write                      docs/features.md, from every file of docs/features
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from triptych import registry

DOCS = Path(__file__).parents[2] / "docs"
LETTERS = {"composite": "o", "torch": "p", "triton": "t", "cuda": "c"}
TITLES = {"cpu": "On a CPU, ranks over gloo", "gpu": "On a GPU"}

HEAD = """\
# Features: which op went through what, on which backend

Made by tests/features/matrix.py from the results of tests/features; a letter stands only where a test of that feature ran
that op on that backend and passed: `o` composite, `p` torch, `t` triton, `c` cuda (C++ kernels on a CPU); `!` behind it
where a test failed. On a CPU, Triton's kernels run in its interpreter. A training step of an op runs its backward too.
"""


def keep(results: Path, command: str) -> dict[str, Any]:
    """What a file of results says, by feature, op and backend."""
    cells: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    records = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    for record in {record["test"]: record for record in records}.values():  # of a test that ran again, the last run
        if record["outcome"] not in ("passed", "failed"):
            continue
        for op, backend in record["ran"]:
            if backend in LETTERS and op in registry.ops.names():
                cells[record["feature"], op, backend][record["outcome"] == "failed"] += 1
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "triton")},
        "command": command,
        "cells": [[*key, *found] for key, found in sorted(cells.items())],
    }


def table(kept: dict[str, Any]) -> str:
    """The results of one machine: a row a feature, a column an op."""
    cells = {(feature, op, backend): failed for feature, op, backend, _, failed in kept["cells"]}
    ops = sorted({op for _, op, _ in cells})
    lines = [f"| feature | {' | '.join(ops)} |", f"|---|{'---|' * len(ops)}"]
    for feature in sorted({feature for feature, _, _ in cells}):
        row = []
        for op in ops:
            found = [
                letter + ("!" if cells[feature, op, backend] else "") if (feature, op, backend) in cells else "·"
                for backend, letter in LETTERS.items()
            ]
            row.append(f"`{' '.join(found)}`" if set(found) != {"·"} else "")
        lines.append(f"| {feature} | {' | '.join(row)} |")
    return "\n".join(lines)


def document(folder: Path) -> str:
    """The whole document."""
    parts = [HEAD]
    for name, title in TITLES.items():
        file = folder / f"{name}.json"
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            versions = ", ".join(f"{package} {version}" for package, version in kept["versions"].items())
            parts.append(f"## {title}\n\n{kept['date']}, {versions}: `{kept['command']}`\n\n{table(kept)}\n")
    return "\n".join(parts)


def main(task: str, *arguments: str) -> None:
    if task == "keep":
        name, results, *command = arguments
        target = DOCS / "features" / f"{name}.json"
        target.parent.mkdir(exist_ok=True)
        found = keep(Path(results), " ".join(command) or "pytest tests/features")
        cells = ",\n  ".join(json.dumps(cell) for cell in found.pop("cells"))
        target.write_text(json.dumps(found, indent=1)[:-2] + f',\n "cells": [\n  {cells}\n ]\n}}\n', encoding="utf-8")
    else:
        (DOCS / "features.md").write_text(document(DOCS / "features"), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
