"""From what the user asked to a bisection that can run: everything is checked here, before anything runs."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from triptych import environment, registry
from triptych.bisect.bisection import Bisection
from triptych.bisect.policies import Side, have_one_effect
from triptych.bisect.predicates import parse_predicates
from triptych.bisect.progress import Progress
from triptych.bisect.session import Identity, Session
from triptych.bisect.trials import Trials
from triptych.bisect.verdicts import Answer, Report
from triptych.errors import UsageError
from triptych.policy import Policy, parse
from triptych.run import preflight


@dataclass(frozen=True)
class Asked:
    """What the user asked for.

    Attributes:
        command: the job, program first.
        good: the policy that passes; None for "torch".
        bad: the policy that fails; None for the one in force: TRIPTYCH_BACKEND, else the configuration file, else auto.
        fail_on: predicates; none for `exit`.
        timeout: seconds for one run; None for no limit.
        repeat: how often a trial runs before it counts as passed.
        confidence: how sure a trial that passed must make; decides how often it runs, in place of `repeat`. None to
            leave it at `repeat`.
        jobs: how many runs may go on at a time.
        state: the state directory.
    """

    command: tuple[str, ...]
    good: str | None
    bad: str | None
    fail_on: tuple[str, ...]
    timeout: float | None
    repeat: int
    confidence: float | None
    jobs: int
    state: Path


def bisect(asked: Asked, console: Console, *, resume: bool) -> Report:
    """Run a bisection, or continue one, and return its report.

    Raises:
        UsageError: something asked for cannot be meant. Nothing has run.
        KeyboardInterrupt: the running trials were ended; the state directory continues from there.
    """
    for option, number in (("--repeat", asked.repeat), ("--jobs", asked.jobs)):
        if number < 1:
            raise UsageError(f"{option} is {number}. It must be 1 or more.")
    if asked.confidence is not None:
        if not 0 < asked.confidence < 1:
            raise UsageError(f"--confidence is {asked.confidence}. It must lie between 0 and 1, such as 0.95.")
        if asked.repeat > 1:
            raise UsageError(
                f"--repeat {asked.repeat} says how often a trial runs, --confidence {asked.confidence} derives it from "
                f"how often the bad policy fails. Leave out one of them."
            )
    if asked.timeout is not None and not 0 < asked.timeout < float("inf"):
        raise UsageError(f"--timeout is {asked.timeout}. It must be a number of seconds greater than 0.")
    if not asked.command:
        raise UsageError("No command was given. Write it after --, for example: triptych bisect -- python train.py")
    predicates = parse_predicates(asked.fail_on, asked.timeout)
    good, bad = sides(asked.good, asked.bad)
    preflight.check_command(asked.command, os.environ)
    preflight.check_environment(os.environ)
    identity = Identity(
        asked.command,
        os.getcwd(),
        good.text,
        bad.text,
        asked.fail_on or ("exit",),
        asked.timeout,
        asked.repeat,
        asked.confidence,
    )
    state = asked.state.absolute()
    session = Session.resume(state, identity) if resume else Session.create(state, identity)
    with closing(session), Progress(console, len(session.trials)) as progress:
        trials = Trials(
            session,
            asked.command,
            Path.cwd(),
            good.text,
            predicates,
            asked.timeout,
            asked.repeat,
            asked.jobs,
            progress.began,
            progress.finished,
        )
        blank = Report(
            Answer.UNRESOLVED,
            asked.command,
            good.text,
            bad.text,
            identity.fail_on,
            asked.repeat,
            str(asked.state),
            confidence=asked.confidence,
        )
        return Bisection(trials, good, bad, blank, progress).run()


def sides(good: str | None, bad: str | None) -> tuple[Side, Side]:
    """Both policies, checked: they parse, and they differ in effect.

    Raises:
        PolicyError, UsageError: they do not.
    """
    backends, ops = registry.backends.names(), registry.ops.names()
    configured, where = environment.configured() or ("", "")
    beneath = Policy().extended(parse(configured, where, backends=backends, ops=ops))
    if good is None:
        good = "torch" if "torch" in backends else "composite"
    source = "--bad"
    if bad is None:
        bad = os.environ.get("TRIPTYCH_BACKEND", "") or configured or "auto"
        source = "the policy in force (--bad is not given)"
    for option, text in (("--good", good), (source, bad)):
        if not text.strip(" ;"):
            raise UsageError(f"{option} is empty. Write policy rules, such as {option} torch.")
    left = Side.parse(good, "--good", beneath, backends, ops)
    right = Side.parse(bad, source, beneath, backends, ops)
    if have_one_effect(left, right, ops):
        raise UsageError(
            f'--good "{good}" and --bad "{bad}" choose the same backend for every op: there is nothing to swap. '
            f"Name the backend that fails with --bad. Backends: {', '.join(backends)}."
        )
    return left, right
