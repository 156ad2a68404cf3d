"""The program `triptych`: its commands, and what happens to errors.

Exit status: 0 done, 1 done with a negative answer, 2 wrong use or a broken environment; `run` ends as its command does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import triptych
from triptych.cli.bisect import bisect
from triptych.cli.explain import explain
from triptych.cli.info import info
from triptych.cli.output import complain, run_program
from triptych.cli.replay import replay
from triptych.cli.run import run
from triptych.errors import TriptychError

app = typer.Typer(
    name="triptych",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Options stand before the command that is run; everything from its first word on is its own.
OWN_ARGUMENTS = {"allow_interspersed_args": False}

app.command()(info)
app.command()(explain)
app.command(context_settings=OWN_ARGUMENTS)(run)
app.command(context_settings=OWN_ARGUMENTS)(bisect)
app.command()(replay)


def _version(asked: bool) -> None:
    if asked:
        print(f"triptych {triptych.__version__}")
        raise typer.Exit()


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Find kernel bugs by swapping implementations: Triton, CUDA/C++ and plain PyTorch behind one registry."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit.

    Args:
        arguments: the command line without the program's name; None takes it from `sys.argv`.
    """
    sys.exit(run_program("triptych", lambda: _run(arguments)))


def _run(arguments: Sequence[str] | None) -> int:
    try:
        app(args=None if arguments is None else list(arguments), prog_name="triptych")
    except TriptychError as error:
        complain(f"triptych: {error}")
        return 2
    return 0
