"""One check on one case: ask the backend, run the assertion, honour exclusions. Pytest and the runner both use it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from triptych.call import dtype_name
from triptych.errors import UsageError
from triptych.testing.checks import CHECKS, Check
from triptych.testing.checks.asking import assert_may_be_refused, refused_for
from triptych.testing.grid import Case
from triptych.testing.running import Skip
from triptych.testing.subject import Subject

PASSED, FAILED, SKIPPED, EXCLUDED = "passed", "failed", "skipped", "excluded"


@dataclass(frozen=True)
class Outcome:
    """What came of one check on one case.

    Attributes:
        check, case: which.
        verdict: passed, failed, skipped, or excluded: it failed and the subject's exclusions say that it may.
        text: why, unless it passed.
        cause: the exception behind a failure.
    """

    check: str
    case: Case
    verdict: str
    text: str = ""
    cause: BaseException | None = None


def execute(subject: Subject, check: Check, case: Case) -> Outcome:
    """Run one check on one case. Never raises for what the backend does, except on KeyboardInterrupt and its like."""
    reason = exclusion(subject, check, case)
    try:
        with warnings.catch_warnings():
            # torch's tracers warn of their own deprecations; those are not the backend's.
            warnings.filterwarnings("ignore", module=r"(torch|copyreg)(\.|$)")
            if check.asks:
                _ask(subject, case)
            check.function(subject, case)
    except Skip as skip:
        return Outcome(check.name, case, SKIPPED, str(skip))
    except Exception as cause:
        text = str(cause) if isinstance(cause, AssertionError) else f"{type(cause).__name__}: {cause}"
        if reason is not None:
            return Outcome(check.name, case, EXCLUDED, reason, cause)
        return Outcome(check.name, case, FAILED, text, cause)
    if reason is not None:
        text = f"this case passes, but an exclusion expects it to fail ({reason!r}). Remove the exclusion."
        return Outcome(check.name, case, FAILED, text)
    return Outcome(check.name, case, PASSED)


def exclusion(subject: Subject, check: Check, case: Case) -> str | None:
    """The reason why the subject's author expects this case to fail, or None."""
    for pattern, reason in subject.exclusions.items():
        if fnmatchcase(check.name, pattern) or fnmatchcase(_test_id(check, case), _literal_brackets(pattern)):
            return reason
    return None


def unmatched_exclusions(subject: Subject) -> tuple[str, ...]:
    """Exclusions that name nothing in the grid, or that give no reason, each as a sentence."""
    ids = [
        _test_id(check, case)
        for check in CHECKS.values()
        for device_type in subject.device_types or ("cpu", "cuda")
        for op in subject.tested_ops()
        for case in check.cases(subject, op, device_type)
    ]
    complaints = []
    for pattern, reason in subject.exclusions.items():
        literal = _literal_brackets(pattern)
        if not any(fnmatchcase(name, pattern) for name in CHECKS) and not any(fnmatchcase(i, literal) for i in ids):
            complaints.append(f"The exclusion {pattern!r} matches no test. Write check or check[case].")
        if not reason.strip():
            complaints.append(f"The exclusion {pattern!r} gives no reason. Say why the case fails.")
    return tuple(complaints)


def outcomes(subject: Subject, *checks: str) -> Iterator[Outcome]:
    """Run checks, all of them unless some are named, over their whole grid, on every device type to test.

    Raises:
        UsageError: there is nothing to test on this machine.
    """
    if not subject.tested_device_types() or not subject.tested_ops():
        raise UsageError(
            f"Backend {subject.backend!r} has nothing to test here: no op for a device of this machine. Give Subject "
            f"the device_types on which it runs, or test it on a machine that has one."
        )
    for name in checks or CHECKS:
        for device_type in subject.tested_device_types():
            for op in subject.tested_ops():
                for case in CHECKS[name].cases(subject, op, device_type):
                    yield execute(subject, CHECKS[name], case)


def first_failure(subject: Subject, check: str) -> Outcome | None:
    """The first case on which a check fails, or None when it passes."""
    return next((outcome for outcome in outcomes(subject, check) if outcome.verdict == FAILED), None)


def _ask(subject: Subject, case: Case) -> None:
    for phase in subject.implements(case.op):
        reasons = refused_for(subject, case, phase)
        if reasons:
            assert_may_be_refused(subject, case, phase, reasons)
            what = f"{case.op}.{phase} in {dtype_name(case.dtype)} on {case.device_type}"
            raise Skip(f"{subject.backend} refuses a case outside the floor: {what}")


def _test_id(check: Check, case: Case) -> str:
    return f"{check.name}[{case.id}]"


def _literal_brackets(pattern: str) -> str:
    """`pattern` with its brackets meant literally: in a test id they are no character class."""
    return pattern.replace("[", "[[]")
