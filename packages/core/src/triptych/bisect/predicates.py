"""What counts as the failure: `--fail-on`, signatures, and the verdict of one run.

A predicate looks at how a run ended (its exit status, signal, log, findings) and gives a signature when it finds what
it looks for; see endings.py. The signature of the proved bad run is the reference: a run that fails with another
signature has another bug, and says nothing about the one that is searched for.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from triptych.bisect.endings import Ending, describe, is_refusal, signal_of
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
    skipped = ending.code if ending.failed is None else ending.failed.status
    if skipped == SKIP and not ending.hangs:
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
    if ending.hangs:
        return Verdict.TIMEOUT, describe(ending)
    if usual is None or ending.code == 0 or describe(ending) == usual:
        return Verdict.PASS, None
    return Verdict.OTHER, describe(ending)


SKIP = 125
"""The exit status that says: this run says nothing. As in git bisect run."""


def _status(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"signal {-code}"


# --- the predicates -------------------------------------------------------------------------------


def _on_exit(ending: Ending) -> str | None:
    return None if ending.hangs or (ending.code == 0 and ending.failed is None) else describe(ending)


def _on_signal(ending: Ending) -> str | None:
    return None if ending.hangs else signal_of(ending)


def _on_timeout(ending: Ending) -> str | None:
    return "timeout" if ending.hangs else None


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
