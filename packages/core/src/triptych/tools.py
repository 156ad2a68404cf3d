"""The tools that the environment switches on: which variables, read when, in which order they lie around a call.

They are installed when the process scope is first read, that is before the first call runs. Children of the process get
them too: a forked one has them already, a spawned one reads the same environment.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych import capture, ends, environment, intercept, registry
from triptych.checks import Mismatch, NonFinite, forget, parse_checks, recorder
from triptych.errors import EnvironmentVariableError, TriptychError
from triptych.jsonlines import Appender
from triptych.layers.naming import name_layers_when_called
from triptych.policy import Policy
from triptych.sync import Synchroniser
from triptych.trace import Tracer

NEED_NAMES = ("TRIPTYCH_TRACE", "TRIPTYCH_SYNC", "TRIPTYCH_CHECK", "TRIPTYCH_CAPTURE")
"""Tools that report or select by layer: with one of them on, layers get names."""

_undo: list[Callable[[], None]] = []
_stop_naming: Callable[[], None] | None = None


@dataclass(frozen=True)
class Settings:
    """What the environment asks for, checked. An attribute is None, False or empty where nothing is asked."""

    trace: Path | None
    sync: bool
    check: str
    findings: Path | None
    ends: Path | None
    capture: capture.Request | None


def read_settings(environ: Mapping[str, str]) -> Settings:
    """What `environ` asks for. Opens and creates nothing.

    Raises:
        EnvironmentVariableError, PolicyError: a variable is unknown or has no valid value, or two name one file.
    """
    environment.check_variables(environ)
    check = environ.get("TRIPTYCH_CHECK", "")
    parse_checks(check, forget)
    wanted = environ.get("TRIPTYCH_CAPTURE", "")
    files = {name: _path(environ, name) for name in ("TRIPTYCH_TRACE", "TRIPTYCH_FINDINGS", ends.VARIABLE)}
    for (one, path), (other, second) in itertools.combinations(files.items(), 2):
        if path is not None and second is not None and os.path.realpath(path) == os.path.realpath(second):
            raise EnvironmentVariableError(f"{one} and {other} both name {str(path)!r}. Name a file for each.")
    return Settings(
        trace=files["TRIPTYCH_TRACE"],
        sync=environ.get("TRIPTYCH_SYNC", "") == "1",
        check=check,
        findings=files["TRIPTYCH_FINDINGS"],
        ends=files[ends.VARIABLE],
        capture=capture.parse_request(wanted, registry.ops.names()) if wanted else None,
    )


def see_calls(settings: Settings) -> bool:
    """Whether something is asked for that must see every call."""
    return bool(settings.trace or settings.sync or settings.check or settings.capture)


def check_places(settings: Settings) -> None:
    """Raise unless everything that `settings` ask for can be written. Creates the files and the directory.

    They are left there: another process that shares one may have opened it by now.

    Raises:
        EnvironmentVariableError: one of them cannot be written.
    """
    if settings.trace is not None:
        Appender(settings.trace, "TRIPTYCH_TRACE").close()
    if settings.findings is not None:
        Appender(settings.findings, "TRIPTYCH_FINDINGS").close()
    if settings.ends is not None:
        Appender(settings.ends, ends.VARIABLE).close()
    if settings.capture is not None:
        capture.make_directory(settings.capture.directory)


def install_from_environment(policy: Policy) -> None:
    """Install what the environment asks for, in place of what an earlier reading of it installed.

    Args:
        policy: the policy of the process.

    Raises:
        EnvironmentVariableError, PolicyError: a variable has no valid value, or a file cannot be written. Nothing is
            installed then.
    """
    uninstall()
    settings = read_settings(os.environ)
    try:
        _install(settings, policy)
    except TriptychError:
        uninstall()
        raise
    if any(rule.layer is not None for rule in policy.rules) or _wants_names(os.environ):
        _name_layers()


def _install(settings: Settings, policy: Policy) -> None:
    """From the inside out: sync next to the kernel, then the checks, then what must be on disk before the launch."""
    if settings.ends is not None:
        ends.at_work(settings.ends)
    if settings.sync:
        _add(Synchroniser())
    checks: tuple[NonFinite | Mismatch, ...] = ()
    if settings.findings is not None:
        findings = Appender(settings.findings, "TRIPTYCH_FINDINGS")
        _undo.append(findings.close)
        checks = parse_checks(settings.check, recorder(findings))
    else:
        checks = parse_checks(settings.check, forget)
    for check in checks:
        _add(check)
    if settings.capture is not None:
        _add(capture.Capturer(settings.capture, str(policy)))
    if settings.trace is not None:
        tracer = Tracer(settings.trace, str(policy))
        _undo.append(tracer.close)
        _add(tracer)


def uninstall() -> None:
    """Take out what `install_from_environment` put in."""
    global _stop_naming
    while _undo:
        _undo.pop()()
    if _stop_naming is not None:
        _stop_naming()
        _stop_naming = None


def name_layers_if_asked(environ: Mapping[str, str]) -> None:
    """Start naming layers when `environ` asks for something that needs it.

    Called when triptych is imported: when the process scope is read, the first model is in the middle of its call, and
    its first layer would have no name.
    """
    if _wants_names(environ) or "@" in environ.get("TRIPTYCH_BACKEND", "") or "@" in _configured():
        _name_layers()


def _wants_names(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name, "") not in ("", "0") for name in NEED_NAMES)


def _configured() -> str:
    """The policy text of the configuration file; a file that is not valid is reported by the first call."""
    try:
        found = environment.configured()
    except (TriptychError, OSError):
        return ""
    return "" if found is None else found[0]


def _name_layers() -> None:
    global _stop_naming
    if _stop_naming is None:
        _stop_naming = name_layers_when_called()


def _add(interceptor: intercept.Interceptor) -> None:
    _undo.append(intercept.install(interceptor))


def _path(environ: Mapping[str, str], variable: str) -> Path | None:
    text = environ.get(variable)
    return environment.absolute(text, variable) if text else None
