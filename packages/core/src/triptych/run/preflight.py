"""What is checked before a command runs: its program, its policy, its variables, the files it will write."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from triptych import environment, files, registry, tools
from triptych.errors import UsageError, nearest
from triptych.policy import Policy, parse


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


def check_environment(environ: Mapping[str, str]) -> Policy:
    """Raise unless a process with this environment would accept its TRIPTYCH_ variables and its configuration file.

    Returns:
        The policy that it would have. Nothing is switched on and nothing is written.

    Raises:
        PolicyError, EnvironmentVariableError: as the process would.
    """
    tools.read_settings(environ)
    return environment.policy(environ, backends=registry.backends.names(), ops=registry.ops.names())


def check_places(environ: Mapping[str, str], json_file: Path | None) -> None:
    """Raise unless a process with this environment can write what it is asked to, and nothing else is to go there.

    Args:
        environ: its environment, which `check_environment` accepts.
        json_file: what --json names.

    Raises:
        UsageError: a file or directory cannot be written, or the result would replace one that the process writes.
    """
    settings = tools.read_settings(environ)
    tools.check_places(settings)
    if json_file is None:
        return
    check_writable(json_file, "--json")
    for what, path in (("trace", settings.trace), ("findings", settings.findings)):
        if path is not None and os.path.samefile(json_file, path):
            raise UsageError(f"--json {json_file} is the file of the {what} as well. Name a file for each.")


def check_policy(rules: str, option: str) -> None:
    """Raise PolicyError unless `rules`, given with the option, are valid and name what is installed."""
    parse(rules, option, backends=registry.backends.names(), ops=registry.ops.names())


def check_writable(path: Path, option: str) -> None:
    """Raise UsageError unless `path`, given with `option`, can be written. A file that is not there is created.

    A device or a pipe will do, and is not opened: closing a pipe again would be the end of what its reader reads.
    """
    try:
        if not path.exists() or path.is_file() or path.is_dir():
            with path.open("ab"):
                pass
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except OSError as cause:
        raise _not_writable(path, option, cause) from cause


def check_appendable(path: Path, option: str) -> None:
    """Raise UsageError unless `path`, given with `option`, is a regular file that can be written, or can become one."""
    try:
        os.close(files.open_to_append(path))
    except OSError as cause:
        raise _not_writable(path, option, cause) from cause


def _not_writable(path: Path, option: str, cause: OSError) -> UsageError:
    return UsageError(f"{option} {path}: {cause.strerror}. Name a file that can be written, in a folder that exists.")


def _nearest_program(name: str, path: str) -> str:
    programs: set[str] = set()
    for folder in path.split(os.pathsep):
        try:
            programs.update(entry.name for entry in os.scandir(folder or "."))
        except OSError:
            continue
    text = nearest(name, programs)
    return text if text.startswith("Did you mean") else f"PATH is {path}."
