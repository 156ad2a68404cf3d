"""What the commands share about output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from triptych.errors import UsageError


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write `result` to `path`, as one object, indented.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as cause:
        raise UsageError(
            f"--json {path}: cannot be written ({cause.strerror}). Name a file in a writable folder."
        ) from cause
