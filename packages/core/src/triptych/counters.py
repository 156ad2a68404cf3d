"""Counting without locks: an itertools.count steps atomically, so that threads never lose a count."""

from __future__ import annotations

import itertools
import threading


class Counter:
    """A count that any thread may advance.

    `next()` returns the value before the step. Reading the value has to step the iterator too; the steps that reading
    took are subtracted again.
    """

    __slots__ = ("_lock", "_reads", "next")

    def __init__(self) -> None:
        self.next = itertools.count().__next__
        self._reads = 0
        self._lock = threading.Lock()

    @property
    def value(self) -> int:
        """How many times `next` was called."""
        with self._lock:
            value = self.next() - self._reads
            self._reads += 1
            return value
