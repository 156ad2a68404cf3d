"""What counts as the failure: signatures, verdicts of runs, and the errors of `--fail-on`."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from triptych.bisect.endings import Ending, describe, last_words, normalised, refusal
from triptych.bisect.predicates import Verdict, check_variable, judge, parse_predicates
from triptych.errors import UsageError
from triptych.run.ranks import Process, Raised

TRACEBACK = """\
step 3
Traceback (most recent call last):
  File "inner.py", line 3, in <module>
    raise KeyError(3)
KeyError: 3

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "job.py", line 12, in <module>
    main()
{0}
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "run.log"


def ending(
    log: Path, text: str = "", code: int | None = 0, number: int | None = None, timed_out: bool = False,
    findings: tuple[str, ...] = (), script: int | None = None,
) -> Ending:  # fmt: skip
    log.write_text(text)
    return Ending(None if number else code, number, timed_out, log, findings, script)


@pytest.mark.parametrize(
    ("last_line", "signature"),
    [
        ("ValueError: loss is 17.25 at step 4", "ValueError: loss is N at step N"),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
         "AcceleratorError: CUDA error: an illegal memory access was encountered"),
        ("RuntimeError: bad pointer 0x7f3a00 of 3e-05", "RuntimeError: bad pointer <address> of N"),
        ("AssertionError", "AssertionError"),
        ("triptych.errors.Refused: rms_norm.backward in layer 'a.b' on 'triton' (TRIPTYCH_BACKEND rule 2, \"x=triton\")",
         "Refused: rms_norm.backward on 'triton'"),
        ("triptych.errors.Refused: rms_norm.backward on 'triton' (TRIPTYCH_BACKEND rule 1, \"triton\")",
         "Refused: rms_norm.backward on 'triton'"),
    ],
)  # fmt: skip
def test_signature_of_the_last_exception(log: Path, last_line: str, signature: str) -> None:
    assert describe(ending(log, TRACEBACK.format(last_line), code=1)) == signature


def test_the_launcher_that_reports_a_failed_rank_is_not_the_failure(log: Path) -> None:
    text = (
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "job.py", line 2\n[rank1]: ValueError: nan 3\n'
        'Traceback (most recent call last):\n  File "torchrun", line 8\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    assert describe(ending(log, text, code=1)) == "ValueError: nan N"


PEER = (
    '[rank0]: Traceback (most recent call last):\n[rank0]:   File "job.py", line 9\n'
    "[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:41858. This is typically ...\n"
)
LAUNCHER = (
    'Traceback (most recent call last):\n  File "torchrun", line 8\n'
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    "Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 100)  (SIGTERM)\n"
    "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : {0} (pid: 101)\n"
)


@pytest.mark.parametrize("first", [True, False])
def test_a_lost_connection_is_not_the_failure(log: Path, first: bool) -> None:
    own = "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: nan 3\n"
    text = (own + PEER if first else PEER + own) + LAUNCHER.format(1)
    assert describe(ending(log, text, code=1)) == "ValueError: nan N"
    assert describe(ending(log, PEER + LAUNCHER.format(1), code=1)).startswith("RuntimeError: [pair.cc:N] Connection")


def test_lines_of_ranks_between_each_other_are_read_rank_by_rank(log: Path) -> None:
    lines = [
        "[rank1]: Traceback (most recent call last):",
        "[rank0]: Traceback (most recent call last):",
        '[rank1]:   File "job.py", line 2',
        '[default0]:[rank0]:   File "job.py", line 9',
        "[rank0]: RuntimeError: Connection closed by peer",
        "[rank1]: KeyError: 'weight'",
    ]
    assert describe(ending(log, "\n".join(lines) + "\n", code=1)) == "KeyError: 'weight'"


def test_a_launchers_summary_names_the_signal(log: Path) -> None:
    assert describe(ending(log, PEER + LAUNCHER.format(-11), code=1)) == "memory fault"
    assert describe(ending(log, PEER + LAUNCHER.format(-8), code=1)) == "SIGFPE"
    assert verdict("signal", ending(log, PEER + LAUNCHER.format(-8), code=1)) is Verdict.FAIL


def test_what_a_parent_says_of_its_child_counts_where_nothing_else_does(log: Path) -> None:
    said = (
        "Traceback (most recent call last):\n  File x\n"
        "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGSEGV\n"
    )
    assert describe(ending(log, said, code=1)) == "ProcessExitedException: process N terminated with signal SIGSEGV"
    own = "Traceback (most recent call last):\n  File y\nValueError: x\n"
    for text in (own + said, said + own):
        assert describe(ending(log, text, code=1)) == "ValueError: x"


def rank(**how: Any) -> Process:
    return Process(101, 1, 1, 0.0, ended=1.0, **how)


@pytest.mark.parametrize(
    ("failed", "signature"),
    [
        (rank(raised=Raised("builtins.ValueError", "loss is 3\nmore")), "ValueError: loss is N"),
        (rank(raised=Raised("builtins.AssertionError", ""), status=1), "AssertionError"),
        (rank(raised=Raised("triptych.errors.CheckFailed", "x"), status=-15), "CheckFailed: nonfinite a.forward"),
        (rank(status=-11), "memory fault"),
        (rank(status=-6), "SIGABRT"),
        (rank(status=7), "exit status 7"),
        (rank(), "ended without a word"),
    ],
)
def test_the_rank_that_failed_first_is_the_failure(log: Path, failed: Process, signature: str) -> None:
    """Whatever the log and the launcher say, and also when the others waited until the time was up."""
    base = ending(log, PEER + LAUNCHER.format(1), code=1, findings=("nonfinite a.forward",))
    for found in (replace(base, failed=failed), replace(base, code=None, signal=15, timed_out=True, failed=failed)):
        assert describe(found) == signature
        assert verdict("exit", found) is Verdict.FAIL
        assert verdict("exit", found, reference="exit status 1") is Verdict.OTHER
        assert verdict("timeout", found, usual="exit status 0") is Verdict.OTHER
        assert verdict("signal", found, usual="exit status 0") is (
            Verdict.FAIL if signature in ("memory fault", "SIGABRT") else Verdict.OTHER
        )


def test_a_rank_that_skips_says_nothing(log: Path) -> None:
    assert verdict("exit", replace(ending(log, code=1), failed=rank(status=125))) is Verdict.UNRESOLVED


def test_a_refusal_on_a_rank_is_one(log: Path) -> None:
    refused = Raised("triptych.errors.Refused", "rms_norm.forward in layer 'a' on 'x' (rule 1, \"x\")\n  - no.")
    found = replace(ending(log, PEER, code=1), failed=rank(raised=refused))
    assert describe(found) == "Refused: rms_norm.forward on 'x'"
    assert verdict("exit", found) is Verdict.UNRESOLVED


def test_signatures_without_a_traceback(log: Path) -> None:
    assert describe(ending(log, "boom", code=3)) == "exit status 3"
    assert describe(ending(log)) == "exit status 0"
    assert describe(ending(log, number=signal.SIGABRT)) == "SIGABRT"
    assert describe(ending(log, code=128 + signal.SIGKILL)) == "SIGKILL"
    assert describe(ending(log, timed_out=True, number=signal.SIGTERM)) == "timeout"


def test_broken_memory_has_one_signature(log: Path) -> None:
    assert describe(ending(log, number=signal.SIGSEGV)) == "memory fault"
    assert describe(ending(log, number=signal.SIGBUS)) == "memory fault"
    assert describe(ending(log, "malloc(): corrupted top size\n", number=signal.SIGABRT)) == "memory fault"


def test_a_failed_check_is_known_by_its_finding(log: Path) -> None:
    text = TRACEBACK.format("triptych.errors.CheckFailed: rms_norm.forward call 3 in layer 'x' made non-finite values")
    found = ending(log, text, code=1, findings=("nonfinite rms_norm.forward",))
    assert describe(found) == "CheckFailed: nonfinite rms_norm.forward"
    predicates = parse_predicates(["exit", "nonfinite"], None)
    assert judge(predicates, found) == (Verdict.FAIL, "nonfinite rms_norm.forward")


def test_numbers_and_addresses_are_left_out() -> None:
    assert normalised("0xdeadBEEF 12 -3.5 1e-9 v2 ") == "<address> N -N N vN"
    assert len(normalised("x" * 1000)) == 200


def verdict(fail_on: str, found: Ending, reference: str | None = None, usual: str | None = None) -> Verdict:
    return judge(parse_predicates([fail_on], 10.0), found, reference, usual)[0]


def test_exit(log: Path) -> None:
    assert verdict("exit", ending(log)) is Verdict.PASS
    assert verdict("exit", ending(log, code=1)) is Verdict.FAIL
    assert verdict("exit", ending(log, number=11)) is Verdict.FAIL
    assert verdict("exit", ending(log, code=1), reference="exit status 1") is Verdict.FAIL
    assert verdict("exit", ending(log, code=2), reference="exit status 1") is Verdict.OTHER
    assert verdict("exit", ending(log, code=125)) is Verdict.UNRESOLVED
    assert verdict("exit", ending(log, timed_out=True, number=15)) is Verdict.TIMEOUT


def test_a_refusal_says_nothing_whatever_is_searched_for(log: Path) -> None:
    text = TRACEBACK.format("triptych.errors.Refused: rms_norm.forward on 'x' (rule 1, \"x\")\n  - no.\n  asked: y")
    for fail_on in ("exit", "nonfinite", "match=Refused"):
        for reference in (None, "exit status 1"):
            assert verdict(fail_on, ending(log, text, code=1), reference) is Verdict.UNRESOLVED
    assert verdict("command=true", ending(log, text, code=1, script=1)) is Verdict.UNRESOLVED
    assert verdict("nonfinite", ending(log, text, code=1, findings=("nonfinite a.forward",))) is Verdict.FAIL
    assert verdict("exit", ending(log, text, code=0)) is Verdict.PASS
    log.write_text("[rank1]: " + text.replace("triptych.errors", "[rank1]: triptych.errors"))
    assert refusal(log) == ["Refused: rms_norm.forward on 'x' (rule 1, \"x\")", "  - no.", "  asked: y"]
    assert last_words(log) == []


def test_signal(log: Path) -> None:
    assert verdict("signal", ending(log, number=6)) is Verdict.FAIL
    assert verdict("signal", ending(log, code=134)) is Verdict.FAIL
    assert verdict("signal", ending(log, code=1), usual="exit status 1") is Verdict.PASS
    assert verdict("signal", ending(log, code=1), usual="exit status 0") is Verdict.OTHER


def test_timeout(log: Path) -> None:
    assert verdict("timeout", ending(log, timed_out=True, number=15)) is Verdict.FAIL
    assert verdict("timeout", ending(log)) is Verdict.PASS


def test_match(log: Path) -> None:
    assert verdict("match=loss: (nan|inf)", ending(log, "a\nloss: nan\n")) is Verdict.FAIL
    assert verdict("match=loss: (nan|inf)", ending(log, "loss: 3\n")) is Verdict.PASS
    assert verdict("match=loss: (nan|inf)", ending(log, "loss: 3\n", code=1), usual="exit status 0") is Verdict.OTHER


def test_findings(log: Path) -> None:
    nan = ending(log, code=1, findings=("nonfinite rms_norm.forward",))
    assert verdict("nonfinite", nan) is Verdict.FAIL
    assert verdict("nonfinite", nan, reference="nonfinite rms_norm.backward") is Verdict.OTHER
    assert verdict("mismatch", nan, usual="exit status 0") is Verdict.OTHER
    assert verdict("mismatch=1e-3", ending(log, findings=("mismatch rms_norm.forward",))) is Verdict.FAIL


def test_command(log: Path) -> None:
    assert verdict("command=true", ending(log, code=1, script=0)) is Verdict.PASS
    assert verdict("command=true", ending(log, script=3)) is Verdict.FAIL
    assert verdict("command=true", ending(log, script=125)) is Verdict.UNRESOLVED
    assert verdict("command=true", ending(log, script=-9)) is Verdict.UNRESOLVED
    assert verdict("command=true", ending(log, script=200)) is Verdict.UNRESOLVED


def test_any_of_several_predicates_makes_the_failure(log: Path) -> None:
    predicates = parse_predicates(["signal", "match=nan"], None)
    assert judge(predicates, ending(log, "nan")) == (Verdict.FAIL, "match nan")
    assert judge(predicates, ending(log, "nan", number=6), "match nan") == (Verdict.FAIL, "match nan")
    assert judge(predicates, ending(log, number=6), "match nan") == (Verdict.OTHER, "SIGABRT")


def test_checks_are_asked_for_in_the_environment() -> None:
    predicates = parse_predicates(["nonfinite", "mismatch=1e-3", "exit"], None)
    assert check_variable(predicates, "torch;rms_norm#2:=cuda") == "nonfinite|mismatch:1e-3:torch;rms_norm#2:=cuda"
    assert check_variable(parse_predicates(["mismatch"], None), "torch") == "mismatch::torch"
    assert check_variable(parse_predicates([], None), "torch") == ""


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        (["exti"], "--fail-on exti: there is no predicate 'exti'. Did you mean 'exit'?"),
        (["threads>64"],
         "--fail-on threads>64: the predicate 'threads' is not available yet. Available: exit, signal, timeout, "
         "match=REGEX, nonfinite, mismatch, mismatch=RTOL, command=SCRIPT. Until then, command=SCRIPT can measure it."),
        (["gpu-slope>1MB/step"],
         "--fail-on gpu-slope>1MB/step: the predicate 'gpu-slope' is not available yet. Available: exit, signal, "
         "timeout, match=REGEX, nonfinite, mismatch, mismatch=RTOL, command=SCRIPT. Until then, command=SCRIPT can "
         "measure it."),
        (["match"], "--fail-on match: match needs a value. Write match=REGEX."),
        (["match=("],
         "--fail-on match=(: '(' is not a regular expression: missing ), unterminated subpattern at position 0. "
         "Correct it."),
        (["exit=3"], "--fail-on exit=3: exit takes no value. Write --fail-on exit."),
        (["timeout"],
         "--fail-on timeout needs a time after which a run counts as hung. Add --timeout SECONDS."),
        (["mismatch=small"],
         "--fail-on mismatch=small: 'small' is not a relative tolerance. Write mismatch=1e-3, or mismatch alone for "
         "each op's own bound."),
        (["command=no-such-program-here x"],
         "--fail-on command=no-such-program-here x: there is no program 'no-such-program-here'. Name a program on "
         "PATH, or an executable file with its folder, such as ./check.sh."),
        (["command=true", "command=false"], "--fail-on command=SCRIPT is given twice. Write one script that runs both."),
    ],
)  # fmt: skip
def test_wrong_predicates(texts: list[str], error: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_predicates(texts, None)
    assert str(caught.value) == error
