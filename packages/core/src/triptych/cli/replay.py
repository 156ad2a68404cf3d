"""`triptych replay`: one captured call, alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triptych import capture
from triptych.cli.output import write_json
from triptych.errors import UsageError


def replay(
    folder: Annotated[Path, typer.Argument(metavar="CAPTURE", help="A folder that --capture or bisect wrote.")],
    backend: Annotated[str | None, typer.Option(metavar="NAME", help="What runs it; default: what ran it.")] = None,
    against: Annotated[str, typer.Option(metavar="reference|NAME", help="What to compare with.")] = "reference",
    device: Annotated[str | None, typer.Option(help="Where to run it; default: where it ran.")] = None,
    guard: Annotated[bool, typer.Option("--guard", help="Not available yet.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result to FILE.")] = None,
) -> None:
    """Run a captured call alone and compare; exit status 1 when it differs, raises or changes its inputs."""
    if guard:
        raise UsageError("--guard is not available yet. Leave it out; replay compares every element without it.")
    result = capture.replay(capture.load(folder, device), backend, against)
    if json_file is not None:
        write_json(json_file, result.to_json())
    print(result)
    raise typer.Exit(0 if result.agrees else 1)
