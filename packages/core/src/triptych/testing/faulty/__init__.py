"""Planted faults, which prove the conformance suite: each must be caught, the loopback must pass.

with planted(FAULTS["last_row_never_written"]) as subject:
    assert first_failure(subject, "fresh_memory") is not None
"""

from triptych.testing.faulty import conduct, memory, values
from triptych.testing.faulty.catalogue import FAULTS, LOOPBACK, Fault, FaultyBackend, planted

__all__ = ["FAULTS", "LOOPBACK", "Fault", "FaultyBackend", "conduct", "memory", "planted", "values"]
