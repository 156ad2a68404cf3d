"""`triptych bisect`: find the op, phase, layer and call at fault by swapping implementations."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from triptych.bisect import present
from triptych.bisect.session import DEFAULT
from triptych.bisect.start import Asked
from triptych.bisect.start import bisect as run_bisection
from triptych.cli.output import write_json
from triptych.run import preflight

INTERRUPTED = 130
"""The exit status after Ctrl-C, as a shell gives it: neither an answer nor wrong use."""


def bisect(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="The command and its arguments.")],
    good: Annotated[
        str | None, typer.Option(metavar="POLICY", help="The policy that passes.", show_default="torch")
    ] = None,
    bad: Annotated[
        str | None, typer.Option(metavar="POLICY", help="The policy that fails.", show_default="the policy in force")
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PREDICATE",
            help="What counts as the failure; any of several: exit, signal, timeout, match=REGEX, nonfinite, "
            "mismatch[=RTOL], command=SCRIPT.",
            show_default="exit",
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="The most that one run may take.", show_default="no limit")
    ] = None,
    repeat: Annotated[int, typer.Option(metavar="N", help="A trial passes when it passed N times.")] = 1,
    confidence: Annotated[
        float | None,
        typer.Option(
            metavar="C",
            help="In place of --repeat: a trial passes when it passed so often that one is this sure, such as 0.95, "
            "given how often the bad policy fails.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", help="How many runs may go on at a time.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted bisection.")] = False,
    state: Annotated[Path, typer.Option(metavar="DIR", help="Where all state is kept.")] = DEFAULT,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the verdict to FILE.")] = None,
) -> None:
    """Find the op, phase, layer and call that make a command fail, by running it under mixed policies.

    Exit status: 0 isolated, 1 another verdict, 2 wrong use, 130 interrupted (continue with --resume).
    """
    if json_file is not None:
        preflight.check_writable(json_file, "--json")
    asked = Asked(tuple(command), good, bad, tuple(fail_on or ()), timeout, repeat, confidence, jobs, state)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        report = run_bisection(asked, Console(stderr=True), resume=resume)
    except KeyboardInterrupt:
        print(
            f"triptych: interrupted; the running trial was ended, finished ones are kept in {state}. Continue with:\n"
            f"  {shlex.join(_resuming(asked, json_file))}",
            file=sys.stderr,
        )
        raise typer.Exit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    if json_file is not None:
        write_json(json_file, report.to_json())
    present.show(report, Console())
    raise typer.Exit(report.exit_code)


def _resuming(asked: Asked, json_file: Path | None) -> list[str]:
    """The command line that continues an interrupted bisection."""
    options: list[tuple[str, object]] = [("--good", asked.good), ("--bad", asked.bad)]
    options += [("--fail-on", each) for each in asked.fail_on]
    options += [("--timeout", asked.timeout), ("--confidence", asked.confidence), ("--json", json_file)]
    for name, value, default in (("--repeat", asked.repeat, 1), ("--jobs", asked.jobs, 1)):
        options.append((name, None if value == default else value))
    options.append(("--state", None if asked.state == DEFAULT else asked.state))
    given = [str(word) for name, value in options if value is not None for word in (name, value)]
    return ["triptych", "bisect", "--resume", *given, "--", *asked.command]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
