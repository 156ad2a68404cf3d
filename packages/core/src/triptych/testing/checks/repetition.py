"""The same call again: the same bits."""

from __future__ import annotations

import torch

from triptych.testing import grid
from triptych.testing.assertions import assert_same_bits
from triptych.testing.checks.catalogue import check
from triptych.testing.grid import Case
from triptych.testing.running import Skip, arguments_of, phases_of, run_phase
from triptych.testing.subject import Subject


@check(grid.full)
def deterministic(subject: Subject, case: Case) -> None:
    """Four runs of each phase give the same bits (W2)."""
    for phase in phases_of(subject, case):
        args = arguments_of(subject, case, phase)
        first = run_phase(subject.backend, case, phase, args)
        for number in range(2, 3 if subject.thin else 5):
            again = run_phase(subject.backend, case, phase, args)
            assert_same_bits(case.spec.phase(phase).outputs, first, again, f"{phase}, run 1 and run {number}")


@check(grid.largest)
def thread_counts(subject: Subject, case: Case) -> None:
    """On the CPU, results are the same bits with 1, 2 and 3 threads."""
    if case.device_type != "cpu":
        raise Skip("the number of CPU threads does not matter on other devices")
    if not subject.same_for_any_thread_count:
        raise Skip(f"{subject.backend} declares that its results depend on the number of threads")
    threads = torch.get_num_threads()
    try:
        for phase in phases_of(subject, case):
            args = arguments_of(subject, case, phase)
            torch.set_num_threads(1)
            single = run_phase(subject.backend, case, phase, args)
            for count in (2, 3):
                torch.set_num_threads(count)
                several = run_phase(subject.backend, case, phase, args)
                assert_same_bits(case.spec.phase(phase).outputs, single, several, f"{phase}, 1 and {count} threads")
    finally:
        torch.set_num_threads(threads)
