"""A bisection's result for a reader: a verdict, the culprits, the evidence, what to do next."""

from __future__ import annotations

import shlex

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from triptych.bisect.verdicts import Answer, Evidence, Report

_SENTENCES = {
    Answer.ISOLATED: "isolated: the fault is found",
    Answer.NOT_REPRODUCED: "not-reproduced: the bad policy does not fail",
    Answer.GOOD_FAILS: "good-fails: the good policy fails as well",
    Answer.NOT_A_BACKEND: "not-a-backend: no swap makes the difference",
    Answer.FLAKY: "flaky: it fails too rarely for the repeats that were allowed",
    Answer.UNRESOLVED: "unresolved: too few trials said anything",
}
_REPLAYED = {
    "agrees": "; run alone it agrees with the reference",
    "differs": "; run alone it differs from the reference",
    "raises": "; run alone it raises the error too",
    "crashes": "; run alone it crashes too",
    "hangs": "; run alone it hangs too",
}


def show(report: Report, console: Console) -> None:
    """Print a report."""
    console.print(_evidence(report, console.width))
    for line in lines(report):
        console.print(Text(line), soft_wrap=True)


def lines(report: Report) -> list[str]:
    """The report without the table of evidence, line by line."""
    found = [f"Verdict: {_SENTENCES[report.verdict]}"]
    if report.signature:
        found.append(f"Failure: {report.signature}")
    for word, sites in (("Culprit", report.culprits), ("Victim", report.victims), ("Suspect", report.suspects)):
        for site in sites:
            found.append(f"{word}: {site}{_REPLAYED.get(site.replay or '', '')}")
    found += [line for note in report.notes for line in note.splitlines()]
    if report.workaround is not None:
        found.append("Workaround, proved to pass:")
        found.append(f"  {assignment(report.workaround)} {report.shell_command}")
    for capture in dict.fromkeys(site.capture for site in (*report.culprits, *report.victims) if site.capture):
        found.append("The captured call, alone:")
        found.append(f"  triptych replay {shlex.quote(capture)}")
    seconds = f"{report.seconds:.1f} s"
    found.append(f"{report.trials} trials in {seconds}; everything they left is in {report.state}")
    return found


def assignment(policy: str) -> str:
    """`TRIPTYCH_BACKEND="..."` as a shell takes it."""
    if any(character in policy for character in '$`"\\!\n'):
        return f"TRIPTYCH_BACKEND={shlex.quote(policy)}"
    return f'TRIPTYCH_BACKEND="{policy}"'


def _evidence(report: Report, width: int) -> Table:
    """The trials, a table for a console of this width: a signature is cut to one line, a policy is not cut.

    The whole text of the failure stands below the table, that of other signatures in the JSON.
    """
    repeated = report.repeat > 1
    table = Table(title="Evidence", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("for", no_wrap=True)
    table.add_column("policy", overflow="fold")
    table.add_column("verdict", min_width=8, max_width=10)
    if repeated:
        table.add_column("sure", justify="right", no_wrap=True)
    table.add_column("signature", no_wrap=True, overflow="ellipsis", max_width=max(12, width // 5))
    table.add_column("s", justify="right", no_wrap=True)
    for each in report.evidence:
        row = [str(each.trial), each.purpose, _by_rule(each.policy)]
        row += _repeated(each) if repeated else [each.verdict]
        whose = "" if each.rank is None else f"rank {each.rank}: "
        row += [f"{whose}{each.signature}" if each.signature else "", f"{each.seconds:.1f}"]
        table.add_row(*map(Text, row))
    return table


def _by_rule(policy: str) -> str:
    """A policy with a line for each rule, so that lines break between rules before they break inside one."""
    return policy.replace(";", ";\n")


def _repeated(each: Evidence) -> list[str]:
    """The verdict with how many of its runs failed, and how sure one is of a trial that passed."""
    verdict = f"{each.verdict} {each.failures}/{each.runs}"
    return [verdict, "" if each.confidence is None else f"{each.confidence:.1%}"]
