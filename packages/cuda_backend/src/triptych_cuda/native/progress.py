"""What is shown while ninja runs: a progress bar on a terminal, single lines elsewhere.

Lines go to the logger `triptych.build` when something listens to it, else to standard error: the first use of a part
takes half a minute, and nobody should have to guess why.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator

LOGGER = logging.getLogger("triptych.build")

Update = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and what the last one was."""

_STATUS = re.compile(r"\[(\d+)/(\d+)\] (.*)")


def parse(line: str) -> tuple[int, int, str] | None:
    """`[3/7] compiling x.o` as (3, 7, "compiling x.o"); None for any other line of ninja's output."""
    match = _STATUS.match(line)
    return None if match is None else (int(match[1]), int(match[2]), match[3].strip())


def say(text: str) -> None:
    """One line for the user."""
    if LOGGER.isEnabledFor(logging.INFO) and LOGGER.hasHandlers():
        LOGGER.info("%s", text)
    else:
        print(f"triptych: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def shown(title: str) -> Iterator[Update]:
    """Show the progress of one build under `title`; yields what to call after each step."""
    if sys.stderr.isatty():
        try:
            import rich.console
            import rich.progress
        except ImportError:
            pass
        else:
            console = rich.console.Console(stderr=True)
            with rich.progress.Progress(console=console, transient=True) as bar:
                task = bar.add_task(title, total=None)

                def update(done: int, total: int, what: str) -> None:
                    bar.update(task, completed=done, total=total, description=f"{title}: {what}")

                yield update
            return
    say(f"{title} (once; the result is kept)")
    yield lambda done, total, what: LOGGER.debug("[%d/%d] %s", done, total, what)
