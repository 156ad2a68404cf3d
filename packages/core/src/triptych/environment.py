"""The environment variables and the configuration file: read once, checked whole.

A variable that begins with TRIPTYCH_ and is not listed here is an error, because a misspelled switch that silently does
nothing is the worst kind of switch.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.errors import EnvironmentVariableError, PolicyError, nearest

PREFIX = "TRIPTYCH_"

VARIABLES: dict[str, str] = {
    "TRIPTYCH_BACKEND": "policy rules, separated by ';'",
    "TRIPTYCH_TRACE": "a file that receives one JSON line for each phase of each call",
    "TRIPTYCH_SYNC": "1: wait for the device after each phase, so that a device error is raised where it happened",
    "TRIPTYCH_CHECK": "nonfinite, or mismatch:RTOL:POLICY; several separated by '|'",
    "TRIPTYCH_FINDINGS": "a file that receives one JSON line for each finding of a check",
    "TRIPTYCH_CAPTURE": "DIRECTORY|SELECTOR: store the inputs of the calls that the selector selects, before they run",
    "TRIPTYCH_CACHE": "the directory in which native parts are built and kept",
}


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise EnvironmentVariableError when a TRIPTYCH_ variable is unknown or TRIPTYCH_SYNC is neither 0 nor 1."""
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            raise EnvironmentVariableError(
                f"Environment variable {name} begins with {PREFIX} but Triptych has no such variable. "
                f"{nearest(name, VARIABLES)} Correct it or unset it."
            )
    if environ.get("TRIPTYCH_SYNC", "0") not in ("", "0", "1"):
        raise EnvironmentVariableError(
            f"TRIPTYCH_SYNC is {environ['TRIPTYCH_SYNC']!r}. It takes 1 (wait after each phase) or 0 (do not)."
        )


def find_configuration(start: Path) -> Path | None:
    """The nearest triptych.toml, or pyproject.toml with a [tool.triptych] table, at `start` or above it."""
    for folder in (start, *start.parents):
        own = folder / "triptych.toml"
        if own.is_file():
            return own
        project = folder / "pyproject.toml"
        if project.is_file() and _table(project) is not None:
            return project
    return None


def configured_policy(path: Path) -> str:
    """The policy text of a configuration file: its `backend`, a string or a list of rules.

    Raises:
        PolicyError: the file does not parse, has an unknown key, or `backend` is neither.
    """
    table = _table(path) or {}
    for key in table:
        if key != "backend":
            raise PolicyError(f"{path}: unknown key {key!r} in the Triptych table. {nearest(key, ['backend'])}")
    backend = table.get("backend", "")
    rules = [backend] if isinstance(backend, str) else backend
    if not isinstance(rules, list) or not all(isinstance(rule, str) for rule in rules):
        raise PolicyError(f'{path}: backend is {backend!r}. Write backend = "rules" or backend = ["rule", "rule"].')
    return ";".join(rules)


def _table(path: Path) -> dict[str, Any] | None:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as cause:
        if path.name == "pyproject.toml":
            return None  # somebody else's file; whoever owns it will be told by its own tools
        raise PolicyError(f"{path} is not valid TOML: {cause}.") from cause
    if path.name != "pyproject.toml":
        return document
    table = document.get("tool", {}).get("triptych")
    return table if isinstance(table, dict) else None


def working_directory() -> Path | None:
    """The current directory, or None when it no longer exists."""
    try:
        return Path(os.getcwd())
    except FileNotFoundError:
        return None
