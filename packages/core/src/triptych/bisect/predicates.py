"""What counts as the failure: `--fail-on`, signatures, and the verdict of one run.

A predicate looks at how a run ended (its exit status, signal, log, findings) and gives a signature when it finds what
it looks for. A signature is a short text that is the same whenever the same fault occurs: numbers and addresses are
left out of it. The signature of the proved bad run is the reference: a run that fails with another signature has
another bug, and says nothing about the one that is searched for.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from triptych.errors import UsageError, nearest


class Verdict(StrEnum):
    """What one trial, or one run of it, showed."""

    PASS = "pass"
    FAIL = "fail"
    """The failure that is searched for."""
    OTHER = "other failure"
    """A failure with another signature: not the same bug."""
    UNRESOLVED = "unresolved"
    """Exit status 125, the predicate could not decide, or the run ended in `Refused`: its policy cannot run the job."""
    TIMEOUT = "timeout"
    """The time was up, and `timeout` is not what is searched for."""


@dataclass(frozen=True)
class Ending:
    """How one run ended: all that predicates look at.

    Attributes:
        code: exit status; None when a signal ended it.
        signal: the number of that signal.
        timed_out: whether the time was up.
        log: the file that holds its output.
        findings: signatures of the findings of its checks, in order.
        script: exit status of the script of `command=SCRIPT`; negative for a signal; None when there is no script.
    """

    code: int | None
    signal: int | None
    timed_out: bool
    log: Path
    findings: tuple[str, ...] = ()
    script: int | None = None


@dataclass(frozen=True)
class Predicate:
    """One `--fail-on`.

    Attributes:
        text: as it was written.
        signature: the signature of a run that shows the failure, or None.
        check: what TRIPTYCH_CHECK must say for it, given the good policy; "" for nothing.
        script: the command to run after each run; empty for none.
        needs_timeout: whether it means nothing without `--timeout`.
    """

    text: str
    signature: Callable[[Ending], str | None]
    check: Callable[[str], str] = field(default=lambda good: "")
    script: tuple[str, ...] = ()
    needs_timeout: bool = False


# --- the verdict ----------------------------------------------------------------------------------


def judge(
    predicates: Sequence[Predicate], ending: Ending, reference: str | None = None, usual: str | None = None
) -> tuple[Verdict, str | None]:
    """The verdict of one run, and the signature that it rests on.

    Args:
        predicates: any of them makes it FAIL.
        ending: how it ended.
        reference: the signature of the failure that is searched for; None while that is not known: then any will do.
        usual: how the good run ended, as `describe` puts it. A run that meets no predicate and ends neither like it
            nor with status 0 is OTHER: it broke off before it could show anything.
    """
    if ending.code == SKIP and not ending.timed_out:
        return Verdict.UNRESOLVED, f"exit status {SKIP}"
    how = describe(ending)
    if is_refusal(how) and not ending.findings:
        return Verdict.UNRESOLVED, how
    if ending.script is not None and (ending.script == SKIP or not 0 <= ending.script < 128):
        return Verdict.UNRESOLVED, f"script: {_status(ending.script)}"
    met = [found for found in (predicate.signature(ending) for predicate in predicates) if found is not None]
    met.sort(key=lambda found: found not in ending.findings)  # the most precise first
    if met:
        if reference is None or reference in met:
            return Verdict.FAIL, reference or met[0]
        return Verdict.OTHER, met[0]
    if ending.timed_out:
        return Verdict.TIMEOUT, describe(ending)
    if usual is None or ending.code == 0 or describe(ending) == usual:
        return Verdict.PASS, None
    return Verdict.OTHER, describe(ending)


def is_refusal(ending: str) -> bool:
    """Whether a run that ended so was refused: its policy cannot run the job here, and nothing else was shown."""
    return ending.startswith("Refused: ")


SKIP = 125
"""The exit status that says: this run says nothing. As in git bisect run."""


# --- signatures -----------------------------------------------------------------------------------

_TAIL = 1 << 20
_LENGTH = 200
_LINES_OF_REFUSAL = 30
_LAST_LINES = 5
_RANK = r"(?:\[rank\d+\]:\s?)?"
_TRACEBACK = re.compile(rf"^{_RANK}Traceback \(most recent call last\):$", re.MULTILINE)
_RAISED = re.compile(rf"^{_RANK}([A-Za-z_][\w.]*)(?:: ?(.*))?$", re.MULTILINE)
_LAUNCHER = "torch.distributed.elastic"
_REFUSED = re.compile(r"(\S+)(?: in layer '.*?')? on (.*?) \(")
_HEAP = ("malloc", "free()", "double free", "corrupted", "munmap_chunk", "invalid pointer", "stack smashing")
_MEMORY = ("SIGSEGV", "SIGBUS")


def describe(ending: Ending) -> str:
    """How a run ended, as a signature: `exit status 0`, `ValueError: loss is N`, `SIGABRT`, `timeout`.

    The text of a failed check names its layer and call; what its finding says does not, and stands in its place.
    """
    if ending.timed_out:
        return "timeout"
    name = _signal_of(ending)
    if name is not None:
        return name
    if ending.code == 0:
        return "exit status 0"
    raised = _raised(ending.log) or f"exit status {ending.code}"
    if raised.startswith("CheckFailed") and ending.findings:
        return f"CheckFailed: {ending.findings[-1]}"
    return raised


def normalised(text: str) -> str:
    """`text` without what differs from run to run: addresses and numbers."""
    text = re.sub(r"0x[0-9a-fA-F]+", "<address>", text)
    return re.sub(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", "N", text).strip()[:_LENGTH]


def _raised(log: Path) -> str | None:
    """Type and first line of the last exception that the log shows; of what a launcher says about it, none."""
    for block in reversed(_TRACEBACK.split(_tail(log))[1:]):
        match = _RAISED.search(block)
        if match is None or match[1].startswith(_LAUNCHER):
            continue
        name, message = match[1].rpartition(".")[2], match[2] or ""
        refused = _REFUSED.match(message) if name == "Refused" else None
        if refused is not None:  # the rest names the rule, which differs from trial to trial
            return f"Refused: {refused[1]} on {refused[2]}"
        return normalised(f"{name}: {message}" if message else name)
    return None


def refusal(log: Path) -> list[str]:
    """The lines of the last refusal that the log shows: from "Refused:" on, reason by reason."""
    found: list[str] = []
    for line in _tail(log).splitlines():
        plain = re.sub(f"^{_RANK}", "", line)
        if re.match(r"(?:[A-Za-z_][\w.]*\.)?Refused: ", plain):
            found = [plain[plain.index("Refused: ") :]]
        elif found and plain.startswith("  ") and len(found) < _LINES_OF_REFUSAL:
            found.append(plain)
    return found


def last_words(log: Path) -> list[str]:
    """The last lines of a log that shows no Python exception; none where it does, or is empty."""
    if _raised(log) is not None:
        return []
    return [line.rstrip() for line in _tail(log).splitlines() if line.strip()][-_LAST_LINES:]


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            return file.read().decode("utf-8", "replace").replace("\r\n", "\n")
    except OSError:
        return ""


def _signal_of(ending: Ending) -> str | None:
    """The signal that ended a run, also when a shell in between reported it as 128 + number.

    A fault in memory ends as SIGSEGV one time, as SIGBUS or in the allocator's own checks another: one signature.
    """
    number = ending.signal
    if number is None and ending.code is not None and ending.code > 128:
        number = ending.code - 128
    if number is None or number not in {each.value for each in signal.Signals}:
        return None
    name = signal.Signals(number).name
    broken = name == "SIGABRT" and any(word in line for line in _tail(ending.log).splitlines()[-20:] for word in _HEAP)
    return "memory fault" if name in _MEMORY or broken else name


def _status(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"signal {-code}"


# --- the predicates -------------------------------------------------------------------------------


def _on_exit(ending: Ending) -> str | None:
    return None if ending.timed_out or ending.code == 0 else describe(ending)


def _on_signal(ending: Ending) -> str | None:
    return None if ending.timed_out else _signal_of(ending)


def _on_timeout(ending: Ending) -> str | None:
    return "timeout" if ending.timed_out else None


def _on_finding(kind: str) -> Callable[[Ending], str | None]:
    return lambda ending: next((each for each in ending.findings if each.split()[0] == kind), None)


def _match(text: str, value: str) -> Predicate:
    try:
        pattern = re.compile(value)
    except re.error as cause:
        raise UsageError(f"--fail-on {text}: {value!r} is not a regular expression: {cause}. Correct it.") from cause

    def signature(ending: Ending) -> str | None:
        with ending.log.open(encoding="utf-8", errors="replace") as lines:
            return f"match {value}" if any(pattern.search(line) for line in lines) else None

    return Predicate(text, signature)


def _command(text: str, value: str) -> Predicate:
    try:
        words = tuple(shlex.split(value))
    except ValueError as cause:
        raise UsageError(
            f"--fail-on {text}: {value!r} is not a command: {cause}. Quote it as a shell would."
        ) from cause
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"--fail-on {text}: there is no program {words[0]!r}. Name a program on PATH, or an executable file with "
            f"its folder, such as ./check.sh."
        )

    def signature(ending: Ending) -> str | None:
        return f"script: exit status {ending.script}" if ending.script else None

    return Predicate(text, signature, script=words)


def _mismatch(text: str, value: str) -> Predicate:
    try:
        rtol = float(value or 0)
    except ValueError:
        rtol = -1.0
    if not 0 <= rtol < float("inf"):
        raise UsageError(
            f"--fail-on {text}: {value!r} is not a relative tolerance. Write mismatch=1e-3, or mismatch alone for "
            f"each op's own bound."
        )
    return Predicate(text, _on_finding("mismatch"), check=lambda good: f"mismatch:{value}:{good}")


_PLAIN: dict[str, Callable[[str], Predicate]] = {
    "exit": lambda text: Predicate(text, _on_exit),
    "signal": lambda text: Predicate(text, _on_signal),
    "timeout": lambda text: Predicate(text, _on_timeout, needs_timeout=True),
    "nonfinite": lambda text: Predicate(text, _on_finding("nonfinite"), check=lambda good: "nonfinite"),
    "mismatch": lambda text: _mismatch(text, ""),
}
_WITH_VALUE: dict[str, Callable[[str, str], Predicate]] = {
    "match": _match,
    "mismatch": _mismatch,
    "command": _command,
}
_NOT_YET = ("threads", "children", "rss-slope", "gpu-slope", "compiles")
_FORMS = ("exit", "signal", "timeout", "match=REGEX", "nonfinite", "mismatch", "mismatch=RTOL", "command=SCRIPT")


def parse_predicates(texts: Sequence[str], timeout: float | None) -> tuple[Predicate, ...]:
    """The predicates of `--fail-on`, `exit` when there are none.

    Raises:
        UsageError: one is unknown, malformed or not available, or needs a `--timeout` that is not given.
    """
    predicates = tuple(_parse(text.strip()) for text in texts or ("exit",))
    for each in predicates:
        if each.needs_timeout and timeout is None:
            raise UsageError(
                f"--fail-on {each.text} needs a time after which a run counts as hung. Add --timeout SECONDS."
            )
    if sum(bool(each.script) for each in predicates) > 1:
        raise UsageError("--fail-on command=SCRIPT is given twice. Write one script that runs both.")
    return predicates


def _parse(text: str) -> Predicate:
    name, separator, value = text.partition("=")
    bare = re.split(r"[>=]", text)[0].strip()
    if bare in _NOT_YET:
        raise UsageError(
            f"--fail-on {text}: the predicate {bare!r} is not available yet. Available: {', '.join(_FORMS)}. "
            f"Until then, command=SCRIPT can measure it."
        )
    if not separator and name in _PLAIN:
        return _PLAIN[name](text)
    if name in _WITH_VALUE:
        if not value:
            example = next(form for form in _FORMS if form.startswith(f"{name}="))
            raise UsageError(f"--fail-on {text}: {name} needs a value. Write {example}.")
        return _WITH_VALUE[name](text, value)
    if name in _PLAIN:
        raise UsageError(f"--fail-on {text}: {name} takes no value. Write --fail-on {name}.")
    raise UsageError(f"--fail-on {text}: there is no predicate {bare!r}. {nearest(bare, {*_PLAIN, *_WITH_VALUE})}")


def check_variable(predicates: Sequence[Predicate], good: str) -> str:
    """What TRIPTYCH_CHECK must say for these predicates; "" for nothing."""
    return "|".join(dict.fromkeys(text for text in (each.check(good) for each in predicates) if text))
