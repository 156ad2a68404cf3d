"""What a bisection shows while it works: a moving line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from triptych.bisect.session import Trial
from triptych.bisect.trials import Request

_WHAT = {
    "good": "proving that the good policy passes",
    "bad": "proving that the bad policy fails",
    "search": "searching",
    "fix": "confirming the workaround",
    "capture": "capturing the call at fault",
    "again": "running the bad policy again",
}
_AFTER_SEARCH = 3
"""Trials that follow a search: two that confirm, one that captures."""


class Progress:
    """Trials done, candidates left, the last verdict and an estimate of the trials left. Use as a context manager.

    Args:
        console: where to; its kind decides between a moving line and plain ones.
        done: how many trials are known already, from an interrupted bisection.
    """

    def __init__(self, console: Console, done: int = 0) -> None:
        self._console = console
        self._done = done
        self._left: int | None = None
        self._trials_left = _AFTER_SEARCH
        self._last = "none yet"
        self._lock = threading.Lock()
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, state="")
        self._began = time.monotonic()

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def searching(self, left: int, trials_left: int) -> None:
        """The search goes on among `left` candidates and takes about `trials_left` trials more."""
        with self._lock:
            self._left, self._trials_left = left, trials_left + _AFTER_SEARCH

    def confirming(self, trials_left: int) -> None:
        """The search is over."""
        with self._lock:
            self._left, self._trials_left = None, trials_left

    def began(self, request: Request) -> None:
        """A trial begins."""
        with self._lock:
            total = None if self._left is None else self._done + self._trials_left
            what = _WHAT[request.purpose]
            self._bar.update(self._task, description=what, total=total, completed=self._done, state=self._state())

    def finished(self, trial: Trial) -> None:
        """A trial ended."""
        with self._lock:
            self._done += 1
            self._trials_left = max(self._trials_left - 1, 0)
            self._last = trial.verdict.value + (f" ({trial.failure})" if trial.signature else "")
            if not self._console.is_terminal:
                text = f"trial {trial.number} {trial.purpose}: {self._last}, {trial.seconds:.1f} s"
                if self._left is not None:
                    text += f"; {self._search_state()}"
                self._console.print(text, highlight=False, markup=False, soft_wrap=True)
            self._bar.update(self._task, completed=self._done, state=self._state())

    def _state(self) -> str:
        parts = [f"{self._done} trials done"]
        if self._left is not None:
            parts.append(self._search_state())
        return ", ".join([*parts, f"last: {self._last}"])

    def _search_state(self) -> str:
        return f"{self._left} candidate{'s' * (self._left != 1)} left, about {self._trials_left} more trials"
