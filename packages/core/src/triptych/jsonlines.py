"""Files of JSON lines that several processes append to, and that outlive the death of any of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triptych import files
from triptych.errors import EnvironmentVariableError, UsageError


class Appender:
    """A file to which this process and others append whole lines.

    Each line is one write to a descriptor opened for appending: lines of several processes do not mix, and what was
    written is there however the process ends. (On a network file system appending is not atomic: give each process a
    file of its own there.)

    Args:
        path: the file, a regular one; it is created if need be, and never emptied.
        variable: the environment variable that named it, for error texts.

    Raises:
        EnvironmentVariableError: the file cannot be opened (on construction) or written (on `line`).
    """

    def __init__(self, path: Path, variable: str) -> None:
        self._where = f"{variable} is {str(path)!r}"
        try:
            self._file = files.open_to_append(path)
        except OSError as cause:
            raise EnvironmentVariableError(
                f"{self._where}: {cause.strerror}. Name a file that can be written, in a folder that exists."
            ) from cause

    def line(self, record: dict[str, Any]) -> None:
        """Append `record` as one line."""
        data = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        try:
            written = os.write(self._file, data)
        except OSError as cause:
            raise EnvironmentVariableError(
                f"{self._where}: {cause.strerror}. Make room, or name another file."
            ) from cause
        if written != len(data):
            raise EnvironmentVariableError(f"{self._where}: the disk is full. Make room, or name another file.")

    def close(self) -> None:
        os.close(self._file)


def read_lines(path: Path, start: int = 0) -> Iterator[tuple[int, Any]]:
    """Number (from 1) and content of each whole line from byte `start` on; a last line that was cut short is left out.

    Raises:
        UsageError: the file cannot be read, or a line is not JSON.
    """
    try:
        lines = files.read_regular(path, start).split(b"\n")
    except OSError as cause:
        raise UsageError(f"{path} cannot be read: {cause.strerror}. Name a file that was written by a run.") from cause
    for number, text in enumerate(lines[:-1], start=1):
        try:
            yield number, json.loads(text)
        except ValueError as cause:
            raise UsageError(f"{path} line {number} is not JSON: {cause}. Was the file edited?") from cause
