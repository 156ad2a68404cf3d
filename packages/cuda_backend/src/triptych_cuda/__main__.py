"""`python -m triptych_cuda build [cpu] [cuda]` and `python -m triptych_cuda status`.

Exit codes: 0 done, 1 a part could not be built (status: a part is not usable as it is), 2 wrong use.
"""

from __future__ import annotations

import argparse
import sys

from triptych.cli.output import run_program
from triptych.errors import BuildError
from triptych_cuda.native.builder import cache_root
from triptych_cuda.native.recipe import PARTS
from triptych_cuda.parts import CPU, CUDA

BY_NAME = {"cpu": CPU, "cuda": CUDA}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m triptych_cuda", description="Build the parts of triptych-cuda.")
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="build what is not built yet, and load it")
    builder.add_argument("parts", nargs="*", metavar="PART", help="cpu or cuda; default: all that can be built here")
    commands.add_parser("status", help="say where each part is, or why it is not")
    options = parser.parse_args(arguments)
    if options.command == "status":
        return status()
    for name in options.parts:
        if name not in BY_NAME:
            parser.error(f"there is no part {name!r}; the parts are {' and '.join(BY_NAME)}")
    return build(options.parts)


def status() -> int:
    """Print one paragraph a part; 0 when both are built or cannot be."""
    print(f"cache: {cache_root()}")
    pending = False
    for part in BY_NAME.values():
        place = part.place()
        reasons = part.reasons_unavailable()
        if place.binary is not None:
            print(f"{part.name}: built ({place.origin}), {place.binary}")
        elif reasons:
            print(f"{part.name}: unavailable")
        else:
            pending = True
            print(f"{part.name}: not built yet; built at first use by name, or by `python -m triptych_cuda build`")
        for line in [*reasons, *place.notes]:
            print(f"  - {line}")
    return 1 if pending else 0


def build(names: list[str]) -> int:
    """Build the named parts, or all that can be built here, and load each one."""
    code = 0
    for name in names or PARTS:
        part = BY_NAME[name]
        try:
            module = part.module()
        except BuildError as cause:
            if names or not part.place().reasons:
                code = 1
            print(f"{name}: {cause}", file=sys.stderr)
        else:
            print(f"{name}: {module.__file__}")
    return code


if __name__ == "__main__":
    sys.exit(run_program("triptych_cuda", main))
