"""What a reader sees of a bisection on a terminal of 80 columns."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from triptych.bisect.present import show
from triptych.bisect.verdicts import Answer, Evidence, Report

FAILURE = "RuntimeError: setStorage: sizes [N, N], strides [N, N], storage offset N, and itemsize N are out of bounds"
POLICY = "torch;rms_norm.forward#0:2=shaky;rms_norm.backward@blocks.1.attention_norm#1=shaky"
EVIDENCE = (
    Evidence(1, "good", "torch", "pass", None, 1.7, 5, 0, 0.99999),
    Evidence(2, "bad", "shaky", "fail", FAILURE, 1.9, 5, 5),
    Evidence(3, "search", POLICY, "other failure", "KeyError: somewhere_else_entirely_and_long", 12.5, 1, 0),
)
REPORT = Report(
    Answer.ISOLATED, ("python", "job.py"), "torch", "shaky", ("exit",), 1, "state", signature=FAILURE, evidence=EVIDENCE
)


def shown(report: Report, width: int) -> list[str]:
    out = io.StringIO()
    show(report, Console(file=out, width=width))
    return out.getvalue().splitlines()


def evidence(report: Report, width: int) -> list[str]:
    """The lines of the table."""
    lines = shown(report, width)
    return lines[: next(n for n, line in enumerate(lines) if line.startswith("Verdict:"))]


@pytest.mark.parametrize("repeat", [1, 5])
def test_the_table_fits_and_a_signature_takes_one_line(repeat: int) -> None:
    table = evidence(replace(REPORT, repeat=repeat), 80)
    assert max(len(line.rstrip()) for line in table) <= 80
    first_lines = [line for line in table if re.match(r" *\d ", line)]
    assert [line.split()[0] for line in first_lines] == ["1", "2", "3"]
    assert re.search(r"RuntimeError: \S*\N{HORIZONTAL ELLIPSIS} ", first_lines[1])
    assert re.search(r"KeyError: \w+\N{HORIZONTAL ELLIPSIS} ", first_lines[2])
    assert len(table) <= 13  # three of them the heading
    for seconds, line in zip(("1.7", "1.9", "12.5"), first_lines, strict=True):
        assert line.rstrip().endswith(seconds)
    assert ("5/5" in first_lines[1]) is (repeat > 1)


def test_a_policy_breaks_between_rules_before_it_breaks_inside_one() -> None:
    words = [word for line in evidence(REPORT, 80) for word in line.split()]
    assert "torch;" in words
    assert "rms_norm.forward#0:2=shaky;" in words
    assert "rms_norm.backward@blocks.1.attention_norm#1=shaky" not in words  # too long for its column: folded, not cut
    start = next(n for n, word in enumerate(words) if word.startswith("rms_norm.backward@"))
    assert "".join(words[start:]) == "rms_norm.backward@blocks.1.attention_norm#1=shaky"


def test_the_whole_failure_stands_once() -> None:
    for width in (80, 200):
        text = "\n".join(shown(REPORT, width))
        assert text.count(FAILURE) == 1
        assert f"Failure: {FAILURE}" in text
