"""The interceptor that captures calls before they are launched."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from triptych import environment, scope
from triptych.capture.store import Capture, save
from triptych.ends import among_several
from triptych.errors import EnvironmentVariableError
from triptych.intercept import Invocation, Proceed
from triptych.layout import materialised
from triptych.opspec import Tensors
from triptych.policy import Rule, parse_selectors
from triptych.sync import is_recorded
from triptych.trace import versions

LIMIT = 4 * 2**30
"""Bytes that all captures of a process may have together. A call beyond it is not captured, and that is logged."""

_log = logging.getLogger("triptych.capture")


@dataclass(frozen=True)
class Request:
    """What TRIPTYCH_CAPTURE asks for: calls that one of `selectors` selects, in folders under `directory`."""

    directory: Path
    selectors: tuple[Rule, ...]

    def wants(self, invocation: Invocation, rank: int) -> bool:
        site = (invocation.op, invocation.phase, invocation.layer)
        return any(each.matches(*site, invocation.index, rank) for each in self.selectors)


def parse_request(text: str, ops: Iterable[str]) -> Request:
    """The request in `text`: DIRECTORY|SELECTOR[;SELECTOR], with the selectors of policy rules; "*" selects every call.

    Raises:
        EnvironmentVariableError: the text is not of that form, or the directory is relative to one that is gone.
        PolicyError: a selector does not parse, or names an op or phase that does not exist.
    """
    directory, _, selectors = text.rpartition("|")
    if not directory.strip() or not selectors.strip(" ;"):
        raise EnvironmentVariableError(
            f"TRIPTYCH_CAPTURE is {text!r}. Write DIRECTORY|SELECTOR, for example captures|rms_norm.backward#7, "
            f"or captures|* for every call."
        )
    folder = environment.absolute(directory.strip(), "TRIPTYCH_CAPTURE")
    return Request(folder, parse_selectors(selectors, "TRIPTYCH_CAPTURE", ops=ops))


def make_directory(directory: Path) -> None:
    """Make the directory that TRIPTYCH_CAPTURE names, unless it is there, and see whether it can be written to.

    Raises:
        EnvironmentVariableError: it cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".{os.getpid()}.probe"
        probe.mkdir(exist_ok=True)
        probe.rmdir()
    except OSError as cause:
        raise EnvironmentVariableError(
            f"TRIPTYCH_CAPTURE names the directory {str(directory)!r}: {cause.strerror}. "
            f"Name one that exists or can be made, and can be written to."
        ) from cause


class Capturer:
    """Writes the inputs of the calls that a request selects into <directory>/<op>.<phase>.<call>.

    In a job of several ranks .rank<n> follows. A name that is taken, by another process or an earlier run, gets the
    process's number appended: nothing is replaced. A capture appears whole or not at all.

    Args:
        request: which calls, and where to.
        policy: the policy of the process, for the record.
        limit: bytes of all captures of this process together.

    Raises:
        EnvironmentVariableError: the directory cannot be made or written to.
    """

    def __init__(self, request: Request, policy: str, limit: int = LIMIT) -> None:
        self._request = request
        self._policy = policy
        self._left = limit
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._after_fork)
        make_directory(request.directory)

    def __call__(self, invocation: Invocation, proceed: Proceed) -> Tensors:
        if self._request.wants(invocation, scope.rank()):
            self._capture(invocation)
        return proceed()

    def _after_fork(self) -> None:
        self._lock = threading.Lock()

    def _capture(self, invocation: Invocation) -> None:
        if is_recorded(invocation.decision.call.device):
            _log.warning("%s was not captured: its stream is being recorded into a CUDA graph.", invocation)
            return
        phase = invocation.spec.phase(invocation.phase)
        names = (*phase.tensor_names, *phase.scalar_names)
        capture = Capture(
            op=invocation.op,
            phase=invocation.phase,
            layer=invocation.layer,
            call=invocation.index,
            backend=invocation.decision.chosen,
            policy=self._policy,
            arguments=tuple(zip(names, map(materialised, invocation.args), strict=True)),
            versions=versions(),
        )
        size = capture.nbytes
        with self._lock:
            left, fits = self._left, size <= self._left
            self._left -= size if fits else 0
        if not fits:
            text = "%s was not captured: its inputs have %d bytes, and %d are left to the captures of this process."
            _log.warning(text, invocation, size, left)
            return
        try:
            self._write(capture)
        except (OSError, SafetensorError) as cause:
            _log.warning("%s was not captured: %s.", invocation, cause)

    def _write(self, capture: Capture) -> None:
        name = f"{capture.op}.{capture.phase}.{capture.call}"
        if among_several():
            name += f".rank{scope.rank()}"
        pid = os.getpid()
        part = self._request.directory / f".{name}.{pid}.part"
        part.mkdir()
        try:
            save(capture, part)
            for target in (name, f"{name}.{pid}"):
                if not (self._request.directory / target).exists():
                    part.rename(self._request.directory / target)
                    return
            raise FileExistsError(f"{name} and {name}.{pid} exist already in {self._request.directory}")
        finally:
            shutil.rmtree(part, ignore_errors=True)
