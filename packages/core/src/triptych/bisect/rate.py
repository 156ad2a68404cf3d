"""How often the bad policy fails, and what a trial that passed is therefore worth."""

from __future__ import annotations

from dataclasses import dataclass, field

PROOF_FAILURES = 3
"""With a confidence to reach, the bad policy is run until it failed so often,"""
PROOF_RUNS = 30
"""but no more often than this. A policy that fails in one of ten runs fails three times in 30, on average."""


@dataclass
class Rate:
    """What the runs of the bad policy showed.

    Attributes:
        runs: for each of them, whether it failed.
    """

    runs: list[bool] = field(default_factory=list)

    @property
    def failures(self) -> int:
        """How many runs failed."""
        return sum(self.runs)

    @property
    def share(self) -> float | None:
        """The share of the runs that failed; None before the first."""
        return self.failures / len(self.runs) if self.runs else None

    @property
    def careful(self) -> float:
        """How often the bad policy fails, on the careful side: as if one more run had passed."""
        return self.failures / (len(self.runs) + 1)

    def confidence(self, passes: int) -> float:
        """How likely a policy with the failure would have failed at least once in so many runs."""
        return 1 - (1 - self.careful) ** passes

    def repeats_for(self, confidence: float) -> int:
        """How often a trial must pass to count as evidence with this confidence."""
        return repeats_for(confidence, self.careful)

    def advice(self) -> str:
        """Which repeats would do: `--repeat 5 gives 95 %, --repeat 7 99 %`."""
        return f"--repeat {self.repeats_for(0.95)} gives 95 %, --repeat {self.repeats_for(0.99)} 99 %"


def repeats_for(confidence: float, rate: float) -> int:
    """How many runs show a failure of this rate at least once, with this confidence."""
    repeats = 1
    while 1 - (1 - rate) ** repeats < confidence:
        repeats += 1
    return repeats
