"""What is checked before a command runs: its program, its policy, its variables, the files it will write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from triptych import environment, registry, tools
from triptych.errors import UsageError, nearest
from triptych.policy import parse


def check_command(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """The path of the command's program.

    Raises:
        UsageError: there is no command, or no such program.
    """
    if not command:
        raise UsageError("No command was given. Write it after --, for example: triptych run -- python train.py")
    name, path = command[0], environ.get("PATH", os.defpath)
    found = shutil.which(name, path=path)
    if found is not None:
        return found
    if Path(name).is_file():
        hint = f"python {name}" if name.endswith(".py") else f"chmod +x {name}"
        raise UsageError(
            f"The command {name!r} is a file that is not executable. Write the command that runs it: {hint}"
        )
    if os.sep in name:
        raise UsageError(f"There is no file {name!r} to run. Correct the path of the command.")
    raise UsageError(f"There is no command {name!r} in PATH. {_nearest_program(name, path)} Correct the command.")


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise unless a process with this environment would accept its TRIPTYCH_ variables and its configuration file.

    Raises:
        PolicyError, EnvironmentVariableError: as the process would.
    """
    tools.read_settings(environ)
    names = {"backends": registry.backends.names(), "ops": registry.ops.names()}
    folder = environment.working_directory()
    path = environment.find_configuration(folder) if folder is not None else None
    if path is not None:
        parse(environment.configured_policy(path), str(path), **names)
    parse(environ.get("TRIPTYCH_BACKEND", ""), "TRIPTYCH_BACKEND", **names)


def check_policy(rules: str, option: str) -> None:
    """Raise PolicyError unless `rules`, given with the option, are valid and name what is installed."""
    parse(rules, option, backends=registry.backends.names(), ops=registry.ops.names())


def check_writable(path: Path, option: str) -> None:
    """Raise UsageError unless `path`, given with `option`, can be written. It is created if it is not there."""
    try:
        with path.open("ab"):
            pass
    except OSError as cause:
        raise UsageError(
            f"{option} {path}: {cause.strerror}. Name a file that can be written, in a folder that exists."
        ) from cause


def _nearest_program(name: str, path: str) -> str:
    programs: set[str] = set()
    for folder in path.split(os.pathsep):
        try:
            programs.update(entry.name for entry in os.scandir(folder or "."))
        except OSError:
            continue
    text = nearest(name, programs)
    return text if text.startswith("Did you mean") else f"PATH is {path}."
