"""What the commands share about output, and what happens when it cannot be written."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
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


def complain(text: str) -> None:
    """Print `text` to standard error. That it cannot be written must not hide what it is about."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def run_program(name: str, program: Callable[[], int]) -> int:
    """Run a program to the last byte of its output.

    Args:
        name: its name, for the error text.
        program: it; returns the exit status, or raises SystemExit.

    Returns:
        What it returned; 1 when whoever read its output has gone (head, less), 2 when it cannot be written (full disk).
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a layer may be called what the terminal cannot show
    try:
        try:
            return program()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _give_up_output()
        return 1
    except OSError as cause:
        if cause.filename is not None:  # somebody opened a file: that is not our output
            raise
        _give_up_output()
        complain(f"{name}: the output cannot be written: {cause.strerror}. Make room, or send it elsewhere.")
        return 2


def _give_up_output() -> None:
    """What is still in a buffer goes nowhere, so that the end of the process does not fail on it again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
