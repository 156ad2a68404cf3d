"""The course of a bisection: prove the start, search, confirm both ways, capture, judge the captured calls.

What to test next is the engine's business, how a trial runs that of trials.py; here it is decided what the trials mean.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from triptych.bisect.engine import (
    Candidate,
    Culprit,
    Finding,
    Level,
    Outcome,
    Question,
    Search,
    Status,
    ask,
    search,
)
from triptych.bisect.policies import PolicyWriter, Side
from triptych.bisect.predicates import Verdict
from triptych.bisect.progress import Progress
from triptych.bisect.session import Trial
from triptych.bisect.trials import Request, Trials
from triptych.bisect.verdicts import Answer, Evidence, Report, Site
from triptych.run.process import run_trial
from triptych.trace import CallRecord, read

_AGAIN = 4
"""How often the bad policy is run again when the evidence looks flaky."""
_ENOUGH = 0.95
"""The confidence from which a trial that passed counts as evidence."""
_FAULTS = 3
"""After so many separate faults with one signature the search ends."""
_REPLAY_SECONDS = 300.0
"""The most that replaying a captured call may take where there is no --timeout."""
_OUTCOMES = {Verdict.PASS: Outcome.PASS, Verdict.FAIL: Outcome.FAIL}


@dataclass(frozen=True)
class _Fault:
    """A minimal failing set, its confirmation, and what was learnt on the way."""

    finding: Finding
    workaround: str | None
    elsewhere: bool | None
    after: Trial
    """The trial with the culprits' phases swapped out: it passes where there is a workaround."""


class Bisection:
    """One bisection.

    Args:
        trials: runs the trials.
        good, bad: the policies.
        blank: a report with what was asked, to be completed.
        progress: told what the search does.
    """

    def __init__(self, trials: Trials, good: Side, bad: Side, blank: Report, progress: Progress) -> None:
        self._trials = trials
        self._good = good
        self._bad = bad
        self._blank = blank
        self._progress = progress
        self._notes: list[str] = []
        self._bad_runs: list[bool] = []
        self._blamed: set[str] = set()
        self._bad_backends: dict[Candidate, str] = {}

    def run(self) -> Report:
        """Run to the end."""
        good = Request("good", self._good.text, traced=True)
        bad = Request("bad", self._bad.text, traced=True, whole=True)
        good_trial, bad_trial = self._trials.run_all([good, bad])
        self._bad_runs = [run.verdict is Verdict.FAIL for run in bad_trial.runs]
        negative = self._unproved(good_trial, bad_trial)
        if negative is not None:
            return negative
        self._trials.reference = bad_trial.signature
        self._trials.usual = good_trial.runs[0].ending
        self._note_rate()
        good_calls, bad_calls = self._trace(good_trial), self._trace(bad_trial)
        writer = PolicyWriter(self._good, self._bad, good_calls)
        if not writer.candidates:
            return self._nothing_to_swap(good_calls)
        self._bad_backends = {_candidate(each): each.backend for each in bad_calls}
        self._note_unselectable(good_calls)
        return self._search(writer, self._narrowed(writer, good_calls, bad_calls))

    # --- the start --------------------------------------------------------------------------------

    def _unproved(self, good: Trial, bad: Trial) -> Report | None:
        """The report when the start does not hold: the good policy must pass, the bad one fail."""
        for name, trial in (("good", good), ("bad", bad)):
            if trial.verdict is Verdict.TIMEOUT:
                advice = "Allow more with --timeout" + (
                    ", or search for it with --fail-on timeout." if name == "bad" else "."
                )
                return self._report(Answer.UNRESOLVED, f"The {name} policy ran out of time. {advice}")
            if trial.verdict is Verdict.UNRESOLVED:
                return self._report(Answer.UNRESOLVED, f"The {name} policy's run says nothing ({trial.signature}).")
        if good.verdict is Verdict.FAIL:
            how = f"The good policy fails: {good.signature}."
            if good.runs[0].verdict is not Verdict.FAIL:
                how = f"The good policy fails now and then (in run {len(good.runs)}): {good.signature}."
            if bad.verdict is Verdict.FAIL and bad.signature == good.signature:
                text = "The bad policy fails in the same way: the cause lies outside what the policies choose."
                return self._report(Answer.NOT_A_BACKEND, f"{how} {text}", signature=bad.signature)
            return self._report(
                Answer.GOOD_FAILS, f"{how} Choose a --good policy that passes.", signature=good.signature
            )
        if bad.verdict is not Verdict.FAIL:
            ended = f" Its run ended so: {bad.runs[0].ending}." if bad.runs[0].ending != "exit status 0" else ""
            times = f" in {len(bad.runs)} runs" if len(bad.runs) > 1 else ""
            hint = " If it fails now and then, use --repeat." if len(bad.runs) == 1 else ""
            return self._report(Answer.NOT_REPRODUCED, f"The bad policy does not fail{times}.{ended}{hint}")
        return None

    def _nothing_to_swap(self, calls: Sequence[CallRecord]) -> Report:
        if calls:
            text = "Both policies choose alike for every call that the good run made: the cause lies outside them."
        else:
            text = (
                "The good run called no Triptych op: the cause lies outside them. If it should have, check that the "
                "command runs a program that uses triptych in this environment."
            )
        return self._report(Answer.NOT_A_BACKEND, text)

    def _trace(self, trial: Trial) -> tuple[CallRecord, ...]:
        """The calls of the run that decided a trial."""
        decisive = next((n for n, run in enumerate(trial.runs, 1) if run.verdict is trial.verdict), 1)
        path = self._trials.session.folder(trial.number) / f"run-{decisive}.trace.jsonl"
        return read(path).calls if path.exists() else ()

    def _narrowed(
        self, writer: PolicyWriter, good_calls: Sequence[CallRecord], bad_calls: Sequence[CallRecord]
    ) -> tuple[Candidate, ...]:
        """The candidates that the bad run reached, on another backend than the good run: the cause is among these.

        A call is traced before it is launched, so that what is missing from the bad run's trace did not run before the
        failure. That holds as far as the program does the same in each run; `_find` does not rely on it.
        """
        before, after = _backends(good_calls), _backends(bad_calls)
        return tuple(each for each in writer.candidates if each in after and after[each] != before[each])

    def _note_unselectable(self, good_calls: Sequence[CallRecord]) -> None:
        only_bad = self._bad_backends.keys() - {_candidate(each) for each in good_calls}
        if only_bad:
            self._notes.append(
                f"Calls that happen only under the bad policy: {len(only_bad)}. They cannot be selected one by one; "
                f"they run as the good policy says, or with their op or phase where that is swapped as a whole."
            )

    # --- search and confirmation ------------------------------------------------------------------

    def _search(self, writer: PolicyWriter, reached: tuple[Candidate, ...]) -> Report:
        faults: list[_Fault] = []
        swapped_out: list[Candidate] = []
        pool = reached
        while True:
            finding = self._find(
                writer, pool, tuple(each for each in writer.candidates if each not in set(swapped_out))
            )
            if finding.status is not Status.FOUND:
                if not faults:
                    return self._not_found(writer, finding)
                self._notes.append("The failure that remains could not be isolated.")
                break
            if len(finding.culprits) > 1 and self._is_flaky():
                return self._flaky(writer, finding.members)
            fault = self._confirmed(writer, finding, swapped_out)
            faults.append(fault)
            if fault.after.verdict is not Verdict.FAIL:
                if fault.workaround is None:
                    self._notes.append(
                        f"With the culprits swapped out the command does not pass: {fault.after.verdict.value}, "
                        f"{fault.after.signature}. That is another fault; no workaround is proved."
                    )
                break
            if len(faults) == _FAULTS:
                self._notes.append(f"The search ended after {_FAULTS} faults with this signature; there are more.")
                break
            for each in finding.members:
                swapped_out += writer.phase_of(each)
            # What ran before the first fault says nothing about the next one: every call is a candidate again.
            pool = ()
        return self._isolated(writer, faults)

    def _find(self, writer: PolicyWriter, pool: tuple[Candidate, ...], everything: tuple[Candidate, ...]) -> Finding:
        """Search `pool`; where nothing in it fails, or it is empty, search everything."""
        if pool and len(pool) < len(everything):
            finding = self._drive(writer, pool)
            if finding.status is Status.FOUND:
                return finding
        if not pool or len(pool) < len(everything):
            # Nothing narrows the search down, so that the whole had better be proved before it.
            whole = self._trials.run(Request("search", writer.swapped_in(everything)))
            if whole.verdict is Verdict.PASS:
                return Finding(Status.NOTHING_FAILS)
        return self._drive(writer, everything)

    def _drive(self, writer: PolicyWriter, candidates: tuple[Candidate, ...]) -> Finding:
        """Run the engine's search; with several jobs, also what it may ask next."""
        make = partial(search, candidates)
        history: list[Outcome] = []
        while True:
            step = ask(make, history)
            if isinstance(step, Finding):
                return step
            self._progress.searching(step.left, step.trials_left)
            ahead = self._ahead(make, history, step) if self._trials.jobs > 1 and self._trials.repeat == 1 else [step]
            requests = [Request("search", writer.swapped_in(question.subset)) for question in ahead]
            trial = self._trials.run_all(requests)[0]
            history.append(_OUTCOMES.get(trial.verdict, Outcome.UNRESOLVED))

    def _ahead(self, make: Callable[[], Search], history: list[Outcome], step: Question) -> list[Question]:
        """This question and those that follow from its possible answers, as many as there are jobs."""
        questions, frontier = [step], [history]
        while frontier and len(questions) < self._trials.jobs:
            known = frontier.pop(0)
            for outcome in (Outcome.PASS, Outcome.FAIL):
                following = ask(make, [*known, outcome])
                if isinstance(following, Question):
                    frontier.append([*known, outcome])
                    if following not in questions and len(questions) < self._trials.jobs:
                        questions.append(following)
        return questions

    def _confirmed(self, writer: PolicyWriter, finding: Finding, swapped_out: list[Candidate]) -> _Fault:
        """Prove the fix: first the culprit alone swapped out, then the smallest of its phases that cures."""
        self._progress.confirming(3)
        self._blamed.add(writer.swapped_in(finding.members))
        elsewhere = None
        if len(finding.culprits) == 1 and finding.culprits[0].level is Level.CALL:
            alone = self._fix(writer, [*swapped_out, *finding.members])
            if alone.verdict in (Verdict.PASS, Verdict.FAIL):
                elsewhere = alone.verdict is Verdict.FAIL
        phases = list(dict.fromkeys(writer.phase_of(each) for each in finding.members))
        choices = [[*phase] for phase in phases]
        if len(phases) > 1:
            choices.append([each for phase in phases for each in phase])
        for choice in choices:
            after = self._fix(writer, [*swapped_out, *choice])
            if after.verdict is Verdict.PASS:
                return _Fault(finding, after.policy, elsewhere, after)
        return _Fault(finding, None, elsewhere, after)

    def _fix(self, writer: PolicyWriter, subset: Sequence[Candidate]) -> Trial:
        return self._trials.run(Request("fix", writer.swapped_out(subset)))

    # --- the end ----------------------------------------------------------------------------------

    def _isolated(self, writer: PolicyWriter, faults: Sequence[_Fault]) -> Report:
        culprits: list[Site] = []
        victims: list[Site] = []
        for fault in faults:
            sites = self._captured(writer, fault)
            together = len(sites) > 1
            wrong = [site for site in sites if site.replay not in ("agrees", None)]
            if together and wrong and all(site.replay is not None for site in sites):
                culprits += wrong
                victims += [site for site in sites if site not in wrong]
            else:
                culprits += sites
            if together:
                self._note_members(sites, wrong)
        for site in culprits:
            if site.elsewhere:
                self._notes.append(
                    f"{site.op}.{site.phase} fails at other calls too; this is the first that fails alone."
                )
            if site.replay == "agrees" and len(faults) == 1 and len(culprits) == 1:
                self._notes.append(
                    "The captured call agrees with the reference when it is run alone: the fault may depend on what "
                    "lies around its tensors in memory, or on what ran before it."
                )
        return self._report(
            Answer.ISOLATED,
            culprits=tuple(culprits),
            victims=tuple(victims),
            interaction=any(len(fault.finding.culprits) > 1 for fault in faults),
            workaround=faults[-1].workaround,
            signature=self._trials.reference,
        )

    def _note_members(self, sites: Sequence[Site], wrong: Sequence[Site]) -> None:
        text = "They fail only together; swapping one of them out is enough."
        if not wrong:
            text += " Each is right when it is run alone."
        elif len(wrong) < len(sites):
            text += " A victim computes rightly from what it is given, but does not stand what the culprit does."
        self._notes.append(text)

    def _captured(self, writer: PolicyWriter, fault: _Fault) -> list[Site]:
        """The culprits of a fault, with their captured calls, each run alone."""
        firsts = [culprit.members[0] for culprit in fault.finding.culprits]
        request = Request("capture", writer.swapped_in(fault.finding.members), captured=writer.selectors(firsts))
        trial = self._trials.run(request)
        folder = self._trials.session.folder(trial.number) / "capture"
        sites = []
        for culprit, first in zip(fault.finding.culprits, firsts, strict=True):
            site = replace(self._site(culprit), elsewhere=fault.elsewhere)
            capture = folder / f"{first.op}.{first.phase}.{first.call}"
            if (capture / "replay.py").exists():
                shown = Path(self._blank.state) / capture.relative_to(self._trials.session.path)
                site = replace(site, capture=str(shown), replay=self._replayed(capture))
            sites.append(site)
        return sites

    def _replayed(self, capture: Path) -> str | None:
        """What running a captured call alone shows; in a process of its own, since it may crash."""
        result, log = (capture.with_name(f"{capture.name}.replay.{kind}") for kind in ("json", "log"))
        if not result.exists():
            command = (sys.executable, "-m", "triptych", "replay", str(capture), "--json", str(result))
            outcome = run_trial(command, self._trials.environment(), self._trials.timeout or _REPLAY_SECONDS, log)
            if outcome.timed_out:
                return "hangs"
            if outcome.signal is not None:
                return "crashes"
        if not result.exists():
            return None
        found = json.loads(result.read_text(encoding="utf-8"))
        return "raises" if found["error"] else "agrees" if found["agrees"] else "differs"

    def _not_found(self, writer: PolicyWriter, finding: Finding) -> Report:
        if self._is_flaky():
            return self._flaky(writer, finding.suspects or writer.candidates)
        if finding.status is Status.NOTHING_FAILS:
            text = (
                "The bad policy fails, but swapping every call that the good run made does not: the cause lies in what "
                "only the bad run does."
            )
            return self._report(Answer.NOT_A_BACKEND, text, signature=self._trials.reference)
        text = "Too many trials ended otherwise than with the failure that is searched for; see the evidence."
        return self._report(
            Answer.UNRESOLVED, text, suspects=self._suspects(finding.suspects), signature=self._trials.reference
        )

    def _is_flaky(self) -> bool:
        """Whether trials that passed prove nothing; asked when the evidence suggests that.

        The bad policy is run again then, unless --repeat has shown already how often it fails.
        """
        if self._trials.repeat == 1 and len(self._bad_runs) == 1:
            for number in range(1, _AGAIN + 1):
                trial = self._trials.run(Request("again", self._bad.text, again=number))
                self._bad_runs.append(trial.verdict is Verdict.FAIL)
        return not all(self._bad_runs) and self._confidence(self._trials.repeat) < _ENOUGH

    def _flaky(self, writer: PolicyWriter, suspects: Sequence[Candidate]) -> Report:
        rate = self._rate()
        failed, total = sum(self._bad_runs), len(self._bad_runs)
        text = (
            f"The bad policy failed in {failed} of {total} runs: trials that passed may have passed by luck. "
            f"--repeat {repeats_for(0.95, rate)} gives each of them 95 % confidence, "
            f"--repeat {repeats_for(0.99, rate)} 99 %."
        )
        return self._report(Answer.FLAKY, text, suspects=self._suspects(suspects), signature=self._trials.reference)

    # --- odds and ends of the report --------------------------------------------------------------

    def _rate(self) -> float:
        """How often the bad policy fails, on the careful side: as if one more run had passed."""
        return sum(self._bad_runs) / (len(self._bad_runs) + 1)

    def _confidence(self, runs: int) -> float:
        """How likely a policy with the failure would have failed at least once in so many runs."""
        return 1 - (1 - self._rate()) ** runs

    def _note_rate(self) -> None:
        if self._trials.repeat == 1 or all(self._bad_runs):
            return
        rate, repeat = self._rate(), self._trials.repeat
        confidence = self._confidence(repeat)
        text = (
            f"The bad policy failed in {sum(self._bad_runs)} of {len(self._bad_runs)} runs; a trial that passed "
            f"{repeat} times had no failure with {confidence:.0%} confidence."
        )
        if confidence < _ENOUGH:
            text += f" --repeat {repeats_for(0.95, rate)} gives 95 %, --repeat {repeats_for(0.99, rate)} 99 %."
        self._notes.append(text)

    def _site(self, culprit: Culprit) -> Site:
        first = culprit.members[0]
        backend = self._bad_backends.get(first)
        if backend is None:
            backend = self._bad.choice(first.op, first.phase, first.layer, first.call, 0)
        single = culprit.level is Level.CALL
        return Site(
            first.op,
            first.phase,
            first.layer if culprit.level in (Level.CALL, Level.LAYER) else None,
            first.call if single else None,
            len(culprit.members),
            backend,
        )

    def _suspects(self, candidates: Sequence[Candidate]) -> tuple[Site, ...]:
        """Suspects, layer by layer: there may be thousands of calls."""
        layers: dict[tuple[str, str, str], list[Candidate]] = {}
        for each in candidates:
            layers.setdefault((each.op, each.phase, each.layer), []).append(each)
        groups = [tuple(members) for members in layers.values()]
        return tuple(self._site(Culprit(Level.CALL if len(g) == 1 else Level.LAYER, g)) for g in groups)

    def _report(self, verdict: Answer, *notes: str, **found: object) -> Report:
        evidence = tuple(self._evidence(trial) for trial in self._trials.session.trials)
        rate = sum(self._bad_runs) / len(self._bad_runs) if self._bad_runs else None
        report = replace(self._blank, verdict=verdict, evidence=evidence, failure_rate=rate, **found)  # type: ignore[arg-type]
        return report.noted(*notes, *self._notes)

    def _evidence(self, trial: Trial) -> Evidence:
        blames = trial.purpose == "search" and trial.policy in self._blamed
        confidence = None
        if self._trials.repeat > 1 and trial.verdict is Verdict.PASS and self._trials.reference is not None:
            confidence = round(self._confidence(len(trial.runs)), 4)
        return Evidence(
            trial.number,
            "blame" if blames else trial.purpose,
            trial.policy,
            trial.verdict.value,
            trial.signature,
            round(trial.seconds, 2),
            len(trial.runs),
            trial.failures,
            confidence,
        )


def repeats_for(confidence: float, rate: float) -> int:
    """How many runs show a failure of this rate at least once, with this confidence."""
    repeats = 1
    while 1 - (1 - rate) ** repeats < confidence:
        repeats += 1
    return repeats


def _backends(calls: Iterable[CallRecord]) -> dict[Candidate, set[str]]:
    """What ran each candidate, in whatever process."""
    found: dict[Candidate, set[str]] = defaultdict(set)
    for call in calls:
        found[_candidate(call)].add(call.backend)
    return found


def _candidate(call: CallRecord) -> Candidate:
    return Candidate(call.op, call.phase, call.layer, call.call)
