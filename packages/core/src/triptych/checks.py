"""Checks on every result, while the program runs.

`TRIPTYCH_CHECK` switches them on; several are separated by "|":

    nonfinite                 a phase whose inputs are all finite made an output that is not
    mismatch:RTOL:POLICY      the backend that POLICY chooses, run on the same inputs, gave something else

RTOL is relative to an output's largest magnitude; when it is empty (`mismatch::torch`), each element may lie twice as
far from the other as a correct implementation may lie from the reference. The other backend works on copies, its runs
are neither counted nor numbered, and the program goes on with its own result. A call that POLICY gives to the backend
that ran it anyway is not compared, nor is one whose inputs hold NaN or infinities: whoever made those is at fault.

A finding is appended to the file that `TRIPTYCH_FINDINGS` names, if it is set, and raised as `CheckFailed`. Under CUDA
graph capture nothing can be looked at, and nothing is checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from triptych import registry, scope
from triptych.compare import Difference, all_finite, differences, nonfinite, relative
from triptych.errors import CheckFailed, EnvironmentVariableError, UsageError
from triptych.intercept import Invocation, Proceed
from triptych.jsonlines import Appender, read_lines
from triptych.layout import clone_exactly
from triptych.opspec import Tensors
from triptych.policy import Policy, parse
from triptych.select import Decision, select
from triptych.sync import is_recorded

SCHEMA = 1


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        kind: "nonfinite" or "mismatch".
        signature: the same for every occurrence of the same fault: `nonfinite rms_norm.backward`.
        op, phase, layer, call, backend: what made the wrong result.
        against: the backend it was compared with; None for "nonfinite".
        difference: the first output that is wrong and where, see `triptych.compare.Difference`.
        message: all of it as text.
        pid, rank: where.
    """

    kind: str
    signature: str
    op: str
    phase: str
    layer: str
    call: int
    backend: str
    against: str | None
    difference: dict[str, Any]
    message: str
    pid: int
    rank: int


Report = Callable[[Finding], None]
"""Keeps a finding."""


def read_findings(path: Path) -> tuple[Finding, ...]:
    """The findings in a file that TRIPTYCH_FINDINGS named; none when there is no such file."""
    if not path.exists():
        return ()
    found = []
    for number, line in read_lines(path):
        if not isinstance(line, dict) or line.pop("schema", None) != SCHEMA:
            raise UsageError(
                f"{path} line {number} is not a finding of schema {SCHEMA}. Read it with the version that wrote it."
            )
        found.append(Finding(**line))
    return tuple(found)


def recorder(out: Appender) -> Report:
    """Appends findings to `out`."""
    return lambda finding: out.line({"schema": SCHEMA, **asdict(finding)})


def forget(finding: Finding) -> None:
    """Keeps nothing: the finding is raised, and that is all."""


@dataclass(frozen=True)
class NonFinite:
    """The interceptor of `nonfinite`."""

    report: Report = forget

    def __call__(self, invocation: Invocation, proceed: Proceed) -> Tensors:
        if is_recorded(invocation.decision.call.device):
            return proceed()
        with torch.no_grad():
            innocent = all_finite(invocation.args)  # asked before the launch: a faulty kernel may change its inputs
        outputs = proceed()
        with torch.no_grad():
            for name, output in zip(invocation.spec.phase(invocation.phase).outputs, outputs, strict=True):
                difference = nonfinite(name, output)
                if difference is not None and innocent:
                    chosen = invocation.decision.chosen
                    what = f"{invocation} on {chosen!r} made non-finite values of finite inputs: {difference}."
                    _fail(invocation, "nonfinite", None, difference, what, self.report)
        return outputs


@dataclass(frozen=True)
class Mismatch:
    """The interceptor of `mismatch`.

    Attributes:
        policy: chooses what to compare with.
        rtol: relative to an output's largest magnitude; None for twice the op's own bound.
        report: keeps a finding.
    """

    policy: Policy
    rtol: float | None = None
    report: Report = forget

    def __call__(self, invocation: Invocation, proceed: Proceed) -> Tensors:
        if is_recorded(invocation.decision.call.device):
            return proceed()
        other = self._other(invocation)
        if other.chosen == invocation.decision.chosen:
            return proceed()
        copies = clone_exactly(invocation.args)
        outputs = proceed()
        with torch.no_grad():
            if all_finite(copies):
                self._compare(invocation, other, copies, outputs)
        return outputs

    def _other(self, invocation: Invocation) -> Decision:
        rule = self.policy.rule_for(invocation.op, invocation.phase, invocation.layer, invocation.index, scope.rank())
        call = invocation.decision.call
        return select(call, invocation.layer, rule, registry.backends.names(), registry.backends.get)

    def _compare(self, invocation: Invocation, other: Decision, args: tuple[Any, ...], outputs: Tensors) -> None:
        phase = invocation.spec.phase(invocation.phase)
        # The bound first: the other backend may be the one that changes its inputs.
        bound = phase.bound(*args) if self.rtol is None else None
        wanted = other.function(*args)
        if bound is not None:
            tolerances = tuple(2 * each for each in bound)
        else:
            assert self.rtol is not None
            tolerances = relative(wanted, self.rtol)
        found = differences(phase, outputs, wanted, tolerances)
        if found:
            what = f"{invocation} on {invocation.decision.chosen!r} differs from {other.chosen!r}: {found[0]}."
            _fail(invocation, "mismatch", other.chosen, found[0], what, self.report)


def _fail(
    invocation: Invocation, kind: str, against: str | None, difference: Difference, message: str, report: Report
) -> None:
    signature = f"{kind} {invocation.op}.{invocation.phase}"
    message += (
        f" Choose another backend for it: TRIPTYCH_BACKEND={invocation.op}.{invocation.phase}={against or 'torch'}."
    )
    report(
        Finding(
            kind=kind,
            signature=signature,
            op=invocation.op,
            phase=invocation.phase,
            layer=invocation.layer,
            call=invocation.index,
            backend=invocation.decision.chosen,
            against=against,
            difference=difference.to_json(),
            message=message,
            pid=os.getpid(),
            rank=scope.rank(),
        )
    )
    raise CheckFailed(message, signature)


def parse_checks(text: str, report: Report) -> tuple[NonFinite | Mismatch, ...]:
    """The checks that the text of TRIPTYCH_CHECK asks for.

    Raises:
        EnvironmentVariableError: the text is not in the form above, or its policy is not valid.
    """
    return tuple(_parse_check(part.strip(), text, report) for part in text.split("|") if part.strip())


def _parse_check(part: str, text: str, report: Report) -> NonFinite | Mismatch:
    if part == "nonfinite":
        return NonFinite(report)
    where = f"TRIPTYCH_CHECK is {text!r}"
    kind, _, rest = part.partition(":")
    rtol, _, rules = rest.partition(":")
    if kind != "mismatch" or not rules.strip():
        raise EnvironmentVariableError(
            f"{where}: {part!r} is not a check. Write nonfinite, or mismatch:RTOL:POLICY "
            f"(mismatch:1e-3:torch, or mismatch::torch for the op's own tolerance); separate several with |."
        )
    parsed = parse(rules, "TRIPTYCH_CHECK", backends=registry.backends.names(), ops=registry.ops.names())
    return Mismatch(Policy().extended(parsed), _parse_rtol(rtol.strip(), where), report)


def _parse_rtol(text: str, where: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise EnvironmentVariableError(
            f"{where}: {text!r} is not a relative tolerance. Write a number, 0 or greater, or nothing for the op's own."
        )
    return value
