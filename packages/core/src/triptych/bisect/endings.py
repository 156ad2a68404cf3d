"""How a run ended, and what that is called: its signature, the same text whenever the same fault occurs.

Numbers and addresses are left out of a signature. In a job of several ranks it is that of the rank that failed first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from triptych.run.ranks import PEER_LOST, Process

_TAIL = 1 << 20
_LENGTH = 200
_LINES_OF_REFUSAL = 30
_LAST_LINES = 5
_RANK = r"(?:\[\w*?(\d+)\]:\s?)*"
"""What torch and torchrun's --tee put before the lines of a rank: `[rank1]: `, `[default1]:`."""
_PREFIX = re.compile(rf"^{_RANK}")
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):$", re.MULTILINE)
_RAISED = re.compile(r"^([A-Za-z_][\w.]*)(?:: ?(.*))?$", re.MULTILINE)
_LAUNCHER = "torch.distributed.elastic"
_PARENTS = ("torch.multiprocessing.spawn.", "subprocess.CalledProcessError")
_ROOT_CAUSE = re.compile(r"^Root Cause .*?exitcode\s*:\s*-(\d+) \(pid", re.MULTILINE | re.DOTALL)
_REFUSED = re.compile(r"(\S+)(?: in layer '.*?')? on (.*?) \(")
_HEAP = ("malloc", "free()", "double free", "corrupted", "munmap_chunk", "invalid pointer", "stack smashing")
_MEMORY = ("SIGSEGV", "SIGBUS")


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
        failed: the rank that failed first, in a job of several ranks; what the launcher and the others said, and that
            they waited until the time was up, are consequences. None when no rank failed, or there is only one.
    """

    code: int | None
    signal: int | None
    timed_out: bool
    log: Path
    findings: tuple[str, ...] = ()
    script: int | None = None
    failed: Process | None = None

    @property
    def hangs(self) -> bool:
        """Whether the time was up, and not because a rank that the others waited for was gone."""
        return self.timed_out and self.failed is None


def describe(ending: Ending) -> str:
    """How a run ended, as a signature: `exit status 0`, `ValueError: loss is N`, `SIGABRT`, `timeout`.

    The text of a failed check names its layer and call; what its finding says does not, and stands in its place.
    """
    if ending.hangs:
        return "timeout"
    name = signal_of(ending)
    if name is not None:
        return name
    if ending.failed is not None:
        raised = _raised_by(ending.failed)
    elif ending.code == 0:
        return "exit status 0"
    else:
        raised = _raised(ending.log) or f"exit status {ending.code}"
    if raised.startswith("CheckFailed") and ending.findings:
        return f"CheckFailed: {ending.findings[-1]}"
    return raised


def normalised(text: str) -> str:
    """`text` without what differs from run to run: addresses and numbers."""
    text = re.sub(r"0x[0-9a-fA-F]+", "<address>", text)
    return re.sub(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", "N", text).strip()[:_LENGTH]


def _raised_by(process: Process) -> str:
    """How a process failed that no signal ended, as far as it is known."""
    if process.raised is not None:
        return _exception(process.raised.name, process.raised.message.split("\n", 1)[0])
    return "ended without a word" if process.status is None else f"exit status {process.status}"


def _raised(log: Path) -> str | None:
    """Type and first line of the last exception that the log shows; of what a launcher says about it, none.

    What a rank says about a connection to one that was gone, or a parent about its child, counts where nothing else is.
    """
    found = sorted(_exceptions(_tail(log)), key=lambda each: not _is_echo(*each))
    return _exception(found[-1][0].rpartition(".")[2], found[-1][1]) if found else None


def _is_echo(name: str, message: str) -> bool:
    """Whether an exception is about the end of another process."""
    return name.startswith(_PARENTS) or PEER_LOST.search(f"{name}: {message}") is not None


def _exceptions(text: str) -> Iterator[tuple[str, str]]:
    """Type and first line of each exception in a log, in the order in which it shows them whole, rank by rank.

    The lines of several ranks may lie between each other; those of each, with its number before it, are read apart.
    """
    streams: dict[str | None, list[str]] = {}
    for line in text.split("\n"):
        match = _PREFIX.match(line)
        assert match is not None  # it matches the empty string
        streams.setdefault(match[1], []).append(line[match.end() :])
    plain = streams.pop(None, [])
    for lines in (plain, *streams.values()):
        for block in _TRACEBACK.split("\n".join(lines))[1:]:
            match = _RAISED.search(block)
            if match is not None and not match[1].startswith(_LAUNCHER):
                yield match[1], match[2] or ""


def _exception(name: str, message: str) -> str:
    """The signature of an exception, given its type without a module and the first line of its text."""
    refused = _REFUSED.match(message) if name == "Refused" else None
    if refused is not None:  # the rest names the rule, which differs from trial to trial
        return f"Refused: {refused[1]} on {refused[2]}"
    return normalised(f"{name}: {message}" if message else name)


def refusal(log: Path) -> list[str]:
    """The lines of the last refusal that the log shows: from "Refused:" on, reason by reason."""
    found: list[str] = []
    for line in _tail(log).splitlines():
        plain = _PREFIX.sub("", line)
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


def signal_of(ending: Ending) -> str | None:
    """The signal that ended a run, also when a shell in between reported it as 128 + number.

    A fault in memory ends as SIGSEGV one time, as SIGBUS or in the allocator's own checks another: one signature.
    """
    number = ending.signal
    if ending.failed is not None:
        status = ending.failed.status
        number = -status if ending.failed.raised is None and status is not None and status < 0 else None
    elif number is None and ending.code is not None and ending.code > 128:
        number = ending.code - 128
    elif ending.code == 1 and (summary := _ROOT_CAUSE.search(_tail(ending.log))):
        number = int(summary[1])
    if number is None or number not in {each.value for each in signal.Signals}:
        return None
    name = signal.Signals(number).name
    direct = number in (ending.signal, (ending.code or 0) - 128)
    last = _tail(ending.log).splitlines()[-20 if direct else -200 :]  # a launcher writes a page after it
    broken = name == "SIGABRT" and any(word in line for line in last for word in _HEAP)
    return "memory fault" if name in _MEMORY or broken else name


def is_refusal(ending: str) -> bool:
    """Whether a run that ended so was refused: its policy cannot run the job here, and nothing else was shown."""
    return ending.startswith("Refused: ")
