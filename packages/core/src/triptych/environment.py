"""The environment variables and the configuration file: read once, checked whole.

A variable that begins with TRIPTYCH_ and is not listed here is an error, because a misspelled switch that silently does
nothing is the worst kind of switch.
"""

from __future__ import annotations

import logging
import os
import re
import reprlib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from triptych import compile_mode, files
from triptych.errors import EnvironmentVariableError, PolicyError, nearest
from triptych.policy import Policy, parse

PREFIX = "TRIPTYCH_"

VARIABLES: dict[str, str] = {
    "TRIPTYCH_BACKEND": "policy rules, separated by ';'",
    "TRIPTYCH_COMPILE": "opaque or inline: whether torch.compile traces through the ops that run on torch or auto",
    "TRIPTYCH_TRACE": "a file that receives one JSON line for each phase of each call",
    "TRIPTYCH_SYNC": "1: wait for the device after each phase, so that a device error is raised where it happened",
    "TRIPTYCH_CHECK": "nonfinite, or mismatch:RTOL:POLICY; several separated by '|'",
    "TRIPTYCH_FINDINGS": "a file that receives one JSON line for each finding of a check",
    "TRIPTYCH_ENDS": "a file that receives one JSON line when a process begins, raises or ends",
    "TRIPTYCH_CAPTURE": "DIRECTORY|SELECTOR: store the inputs of the calls that the selector selects, before they run",
    "TRIPTYCH_CACHE": "the directory in which native parts are built and kept",
}

_OUR_TABLE = re.compile(
    rb"""(?m) tool ["'\s]* \. \s* ["']? triptych \b    # [tool.triptych], or tool.triptych = ...
    | ^ \s* \[+ \s* ["']? tool ["']? \s* \] [^[]* ^ \s* ["']? triptych   # triptych = ... under [tool]
    | tool \s* = \s* \{ .* triptych    # tool = {triptych = ...}
    """,
    re.VERBOSE,
)
"""What names our table in a file that is not valid TOML; a dependency on triptych does not."""

_log = logging.getLogger("triptych.environment")


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise EnvironmentVariableError when a TRIPTYCH_ variable is unknown or a switch has no valid value."""
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
    compile_mode.from_environment(environ)


def policy(environ: Mapping[str, str], *, backends: Iterable[str], ops: Iterable[str]) -> Policy:
    """The policy of a process with this environment: the default, the configuration file and TRIPTYCH_BACKEND.

    Args:
        environ: its environment.
        backends, ops: the names that rules may use.

    Raises:
        PolicyError, EnvironmentVariableError: what was found there is not valid.
    """
    check_variables(environ)
    backends, ops = tuple(backends), tuple(ops)
    found = Policy()
    for text, where in (configured() or ("", ""), (environ.get("TRIPTYCH_BACKEND", ""), "TRIPTYCH_BACKEND")):
        found = found.extended(parse(text, where, backends=backends, ops=ops))
    return found


def configured() -> tuple[str, str] | None:
    """The policy text of the nearest configuration file and, for error texts, its path; None when there is no file.

    Raises:
        PolicyError: as `find_configuration` and `configured_policy`.
    """
    folder = working_directory()
    path = find_configuration(folder) if folder is not None else None
    return None if path is None else (configured_policy(path), str(path))


def find_configuration(start: Path) -> Path | None:
    """The nearest triptych.toml, or pyproject.toml with a [tool.triptych] table, at `start` or above it.

    An entry called triptych.toml is ours whatever it is: reading one that is no file is an error, not nothing. A
    pyproject.toml is somebody else's until it names our table; one that cannot be read is passed over with a warning.
    A folder that this process may not enter is passed over.

    Raises:
        PolicyError: a pyproject.toml on the way has a tool.triptych that is no table, or names it and is not valid.
    """
    for folder in (start, *start.parents):
        own = folder / "triptych.toml"
        if os.path.lexists(own):
            return own
        project = folder / "pyproject.toml"
        if project.is_file() and _project_table(project) is not None:
            return project
    return None


def configured_policy(path: Path) -> str:
    """The policy text of a configuration file: its `backend`, a string or a list of rules.

    Raises:
        PolicyError: the file does not parse, has an unknown key, or `backend` is neither.
    """
    table = _own_table(path) if path.name == "triptych.toml" else _project_table(path) or {}
    for key in table:
        if key != "backend":
            raise PolicyError(f"{path}: unknown key {key!r} in the Triptych table. {nearest(key, ['backend'])}")
    backend = table.get("backend", "")
    rules = [backend] if isinstance(backend, str) else backend
    if not isinstance(rules, list) or not all(isinstance(rule, str) for rule in rules):
        shown = reprlib.repr(backend)
        raise PolicyError(f'{path}: backend is {shown}. Write backend = "rules" or backend = ["rule", "rule"].')
    return ";".join(rules)


def _own_table(path: Path) -> dict[str, Any]:
    """The content of a triptych.toml."""
    try:
        return _parsed(files.read_regular(path))
    except OSError as cause:
        raise PolicyError(
            f"{path} cannot be read: {cause.strerror}. Make it a file that can be read, or remove it."
        ) from cause
    except (ValueError, RecursionError) as cause:
        raise PolicyError(f"{path} is not valid TOML: {cause}. Correct it, or remove it.") from cause


def _project_table(path: Path) -> dict[str, Any] | None:
    """Our table in a pyproject.toml, None when it has none."""
    try:
        content = files.read_regular(path)
    except OSError as cause:
        _log.warning("%s cannot be read: %s. A [tool.triptych] table in it is not applied.", path, cause.strerror)
        return None
    try:
        tools = _parsed(content).get("tool")
    except (ValueError, RecursionError) as cause:
        if not _OUR_TABLE.search(content.replace(b"\0", b"")):  # text in UTF-16 has a zero beside each letter
            return None  # somebody else's file; whoever owns it will be told by its own tools
        raise PolicyError(
            f"{path} is not valid TOML, and it names the Triptych table: {cause}. Correct it, or remove the table."
        ) from cause
    tables = tools if isinstance(tools, list) else [tools]
    found = [each["triptych"] for each in tables if isinstance(each, dict) and "triptych" in each]
    if not found:
        return None
    if isinstance(tools, list) or not isinstance(found[0], dict):
        name, value = ("tool", tools) if isinstance(tools, list) else ("tool.triptych", found[0])
        raise PolicyError(
            f"{path}: {name} is {reprlib.repr(value)}. It must be a table. "
            f'Write [tool.triptych] and under it backend = "rules" or backend = ["rule", "rule"].'
        )
    return found[0]


def _parsed(content: bytes) -> dict[str, Any]:
    return tomllib.loads(content.decode("utf-8-sig"))  # some editors begin a file with a byte order mark


def working_directory() -> Path | None:
    """The current directory, or None when it no longer exists."""
    try:
        return Path(os.getcwd())
    except OSError:
        return None


def absolute(path: str | Path, where: str) -> Path:
    """`path` as one that stays right when the program changes its directory.

    Args:
        path: as it was given.
        where: the environment variable that gave it, for the error text.

    Raises:
        EnvironmentVariableError: it is relative, and the working directory no longer exists.
    """
    try:
        return Path(os.path.abspath(path))
    except OSError as cause:
        raise EnvironmentVariableError(
            f"{where} names {str(path)!r}, which is relative to the working directory, and that no longer exists. "
            f"Write an absolute path, or start in a directory that exists."
        ) from cause
