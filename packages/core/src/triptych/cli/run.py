"""`triptych run`: a command with a policy and tools switched on, through its environment alone."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from triptych import ends, environment
from triptych import trace as traces
from triptych.cli.output import complain, write_json
from triptych.errors import UsageError
from triptych.run import preflight, ranks
from triptych.run.command import Exit, run_command
from triptych.run.process import signal_name
from triptych.run.witness import Witness, records

NOT_YET = "is not available yet. Leave it out; --trace, --sync and --capture are."


def run(
    command: Annotated[list[str], typer.Argument(metavar="CMD", help="The command and its arguments.")],
    backend: Annotated[str | None, typer.Option(metavar="POLICY", help="Policy rules, as in TRIPTYCH_BACKEND.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write each call to FILE before it runs; FILE is replaced.")
    ] = None,
    sync: Annotated[bool, typer.Option("--sync", help="Wait for the device around each call.")] = False,
    capture: Annotated[
        str | None, typer.Option(metavar="DIR|SELECTOR", help="Store the inputs of the selected calls in DIR.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write what ran to FILE.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Not available yet.")] = False,
    guard: Annotated[bool, typer.Option("--guard", help="Not available yet.")] = False,
    compare: Annotated[str | None, typer.Option(metavar="REF", help="Not available yet.")] = None,
) -> None:
    """Run a command with a policy and tools switched on; end as it ends (128 + n when signal n ended it).

    Nothing in the program is changed: its environment carries everything, to its child processes too.
    """
    for name, value in (("--watch", watch), ("--guard", guard), ("--compare", compare)):
        if value:
            raise UsageError(f"{name} {NOT_YET}")
    environ = _environment(backend, trace, sync, capture)
    preflight.check_command(command, environ)
    preflight.check_environment(environ)
    if trace is not None:
        preflight.check_appendable(trace, "--trace")
    preflight.check_places(environ, json_file)
    with _scratch() as scratch:
        if json_file is not None and not environ.get("TRIPTYCH_TRACE"):
            environ["TRIPTYCH_TRACE"] = str(scratch / "trace.jsonl")
        if trace is not None:
            os.truncate(trace, 0)
        if trace is not None or json_file is not None:
            environ.setdefault(ends.VARIABLE, str(scratch / "ends.jsonl"))
        written, said = _named(environ, "TRIPTYCH_TRACE"), _named(environ, ends.VARIABLE)
        start, before = _size(written), _size(said)
        with Witness(said) as witness:
            end = run_command(command, environ)
        totals = _totals(written, start)
        found = () if said is None else ranks.processes(records(said, before), witness.sightings)
    if trace is not None:
        complain("\n".join(summary(totals, end, found)))
    if json_file is not None:
        write_json(json_file, result(totals, end, found))
    raise typer.Exit(end.status)


def _named(environ: dict[str, str], variable: str) -> Path | None:
    return Path(environ[variable]) if environ.get(variable) else None


def _size(path: Path | None) -> int:
    return path.stat().st_size if path is not None and path.exists() else 0


def _environment(backend: str | None, trace: Path | None, sync: bool, capture: str | None) -> dict[str, str]:
    """Our environment with what the options ask for; paths are made absolute, for a command that changes directory."""
    environ = dict(os.environ)
    if backend is not None:
        preflight.check_policy(backend, "--backend")
        environ["TRIPTYCH_BACKEND"] = backend
    if trace is not None:
        environ["TRIPTYCH_TRACE"] = str(environment.absolute(trace, "--trace"))
    if sync:
        environ["TRIPTYCH_SYNC"] = "1"
    if capture is not None:
        directory, bar, selectors = capture.rpartition("|")
        folder = environment.absolute(directory, "--capture") if bar and directory else directory
        environ["TRIPTYCH_CAPTURE"] = f"{folder}{bar}{selectors}"
    return environ


@contextmanager
def _scratch() -> Iterator[Path]:
    """A directory for a trace that nobody asked to keep."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="triptych-run-", ignore_cleanup_errors=True)
    except OSError as cause:
        raise UsageError(
            f"No temporary directory can be made: {cause.strerror}. Set TMPDIR to one that can be written to."
        ) from cause
    with folder as path:
        yield Path(path)


def _totals(path: Path | None, start: int) -> tuple[traces.Total, ...]:
    if path is None or not path.exists():
        return ()
    try:
        return traces.totals(traces.read(path, start))
    except UsageError as cause:
        # The command has ended, and its end is what we must report; what it left behind is not worth another.
        complain(f"triptych: what ran cannot be told: {cause}")
        return ()


def summary(totals: tuple[traces.Total, ...], end: Exit, found: tuple[ranks.Process, ...] = ()) -> list[str]:
    """What ran, as lines of text; by rank where the ranks differ, and how each rank ended where one failed."""
    lines = []
    for each in totals:
        by_rank = ", ".join(f"rank {rank}: {calls}" for rank, calls in each.ranks) if each.differs else ""
        lines.append(
            f"triptych: {each.calls} call{'s' * (each.calls != 1)} of {each.op}.{each.phase} on {each.backend} "
            f"in {each.processes} process{'es' * (each.processes != 1)}" + (f" ({by_rank})" if by_rank else "")
        )
    lines = lines or ["triptych: no Triptych op ran"]
    first = ranks.first_failure(found)
    if first is not None:
        members = sorted(ranks.ranks(found), key=lambda each: (each is not first, each.rank))
        lines += [f"triptych: rank {each.rank} (process {each.pid}) {each.end}" for each in members]
        lines[-len(members)] += "; it was the first that failed"
    if end.signal is not None:
        lines.append(f"triptych: the command was ended by {signal_name(end.signal)}")
    return lines


def result(totals: tuple[traces.Total, ...], end: Exit, found: tuple[ranks.Process, ...] = ()) -> dict[str, Any]:
    """What ran, as `--json` writes it."""
    calls = [
        {
            "op": each.op,
            "phase": each.phase,
            "backend": each.backend,
            "calls": each.calls,
            "processes": each.processes,
            "ranks": [{"rank": rank, "calls": count} for rank, count in each.ranks],
        }
        for each in totals
    ]
    first = ranks.first_failure(found)
    return {
        "schema": 1,
        "exit": {"code": end.code, "signal": end.signal},
        "calls": calls,
        "processes": [each.to_json() for each in found],
        "failed_first": None if first is None else first.rank,
    }
