"""The course of a bisection: prove the start, search, confirm both ways, capture, judge the captured calls.

What to test next is the engine's business, how a trial runs that of trials.py; here it is decided what the trials mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from triptych import registry
from triptych.bisect import proof, replays, stalled
from triptych.bisect.endings import is_refusal, last_words, refusal
from triptych.bisect.engine import (
    Candidate,
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
from triptych.bisect.rate import PROOF_FAILURES, PROOF_RUNS, Rate
from triptych.bisect.session import Trial
from triptych.bisect.sites import Sites, candidate
from triptych.bisect.trials import Request, Trials
from triptych.bisect.verdicts import Answer, Evidence, Report, Site
from triptych.trace import CallRecord, read

_AGAIN = 4
"""How often the bad policy is run again when the evidence looks flaky."""
_ENOUGH = 0.95
"""The confidence from which a trial that passed counts as evidence, where none was asked for."""
_FAULTS = 3
"""After so many separate faults with one signature the search ends."""
Replay = Callable[[Path, Trials], str | None]
"""What running the call in a captured folder alone shows, see `Site.replay`."""

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
        replay: runs a captured call alone.
    """

    def __init__(
        self,
        trials: Trials,
        good: Side,
        bad: Side,
        blank: Report,
        progress: Progress,
        replay: Replay = replays.alone,
    ) -> None:
        self._trials = trials
        self._good = good
        self._bad = bad
        self._blank = blank
        self._progress = progress
        self._replay = replay
        self._notes: list[str] = []
        self._rate = Rate()
        self._blamed: set[str] = set()
        self._sites = Sites(bad, ())
        self._suspect: int | None = None

    def run(self) -> Report:
        """Run to the end."""
        report = self._run()
        self._trials.session.conclude(report.verdict)
        return report

    def _run(self) -> Report:
        good_trial, bad_trial = self._start()
        named = {name for side in (self._good, self._bad) for rule in side.policy.rules for name in rule.choice}
        negative = proof.unproved(good_trial, bad_trial, proof.alternatives(registry.backends.names(), named))
        if negative is not None:
            if bad_trial.verdict is Verdict.TIMEOUT:
                self._notes += stalled.note(self._trace(good_trial), self._trace(bad_trial))
            shown = self._shown(negative.trial)
            return self._report(negative.verdict, negative.text, *shown, signature=negative.signature)
        self._trials.reference = bad_trial.signature
        self._trials.usual = good_trial.runs[0].ending
        self._note_rate()
        good_calls, bad_calls = self._trace(good_trial), self._trace(bad_trial)
        writer = PolicyWriter(self._good, self._bad, good_calls)
        if not writer.candidates:
            return self._report(Answer.NOT_A_BACKEND, proof.nothing_to_swap(good_calls))
        self._sites = Sites(self._bad, bad_calls, writer.ranks)
        self._suspect = bad_trial.rank
        if self._suspect is None and bad_trial.signature == "timeout":
            self._suspect = stalled.suspect(good_calls, bad_calls)
            self._notes += stalled.note(good_calls, bad_calls)
        self._note_unselectable(good_calls)
        return self._search(writer, self._narrowed(writer, good_calls, bad_calls))

    # --- the start --------------------------------------------------------------------------------

    def _start(self) -> tuple[Trial, Trial]:
        """Run the good and the bad policy, and learn how often the bad one fails.

        With a confidence to reach, the bad policy comes first, and how often it fails decides how often a trial must
        pass from then on: the good policy's first of all.
        """
        confidence, repeat = self._blank.confidence, self._trials.repeat
        good = Request("good", self._good.text, traced=True)
        bad = Request("bad", self._bad.text, traced=True, failures=repeat)
        if confidence is None:
            good_trial, bad_trial = self._trials.run_all([good, bad])
        else:
            bad_trial = self._trials.run(replace(bad, runs=PROOF_RUNS, failures=PROOF_FAILURES))
        self._rate.runs = [run.verdict is Verdict.FAIL for run in bad_trial.runs]
        if confidence is not None:
            if self._rate.failures:
                self._trials.repeat = self._rate.repeats_for(confidence)
            good_trial = self._trials.run(good)
        return good_trial, bad_trial

    def _trace(self, trial: Trial) -> tuple[CallRecord, ...]:
        """The calls of the run that decided a trial."""
        path = self._trials.session.folder(trial.number) / f"run-{trial.decisive}.trace.jsonl"
        return read(path).calls if path.exists() else ()

    def _narrowed(
        self, writer: PolicyWriter, good_calls: Sequence[CallRecord], bad_calls: Sequence[CallRecord]
    ) -> tuple[Candidate, ...]:
        """The candidates that the bad run reached, on another backend than the good run: the cause is among these.

        A call is traced before it is launched, so that what is missing from the bad run's trace did not run before the
        failure. That holds as far as the program does the same in each run; `_find` does not rely on it.
        """
        before, after = _backends(good_calls), _backends(bad_calls)
        return tuple(each for each in writer.candidates if each.site in after and after[each.site] != before[each.site])

    def _note_unselectable(self, good_calls: Sequence[CallRecord]) -> None:
        only_bad = self._sites.backends.keys() - {candidate(each) for each in good_calls}
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
                return self._flaky(finding.members)
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
        make = partial(search, candidates, self._suspect)
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
        if len(finding.culprits) == 1:
            self._blamed.add(writer.swapped_in(finding.culprits[0].proved))
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
                where = "at other calls" if site.rank is None else "at other calls or on other ranks"
                self._notes.append(f"{site.op}.{site.phase} fails {where} too; this is the first that fails alone.")
            if site.alike:
                self._notes.append(
                    f"Every rank is at fault, not one: it fails where it is swapped in on rank {site.ranks[0]} alone, "
                    f"and on another one alone."
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
        culprits = fault.finding.culprits
        firsts = [culprit.members[0] for culprit in culprits]
        members = culprits[0].proved if len(culprits) == 1 else fault.finding.members
        request = Request("capture", writer.swapped_in(members), captured=writer.selectors(firsts))
        trial = self._trials.run(request)
        folder = self._trials.session.folder(trial.number) / "capture"
        sites = []
        for culprit, first in zip(culprits, firsts, strict=True):
            site = replace(self._sites.of(culprit), elsewhere=fault.elsewhere)
            capture = folder / f"{first.op}.{first.phase}.{first.call}.rank{first.rank}"
            if not capture.exists():
                capture = capture.with_suffix("")  # a process that is alone, or was when it made the call
            if (capture / "replay.py").exists():
                shown = Path(self._blank.state) / capture.relative_to(self._trials.session.path)
                site = replace(site, capture=str(shown), replay=self._replay(capture, self._trials))
            sites.append(site)
        return sites

    def _not_found(self, writer: PolicyWriter, finding: Finding) -> Report:
        if self._is_flaky():
            return self._flaky(finding.suspects or writer.candidates)
        if finding.status is Status.NOTHING_FAILS:
            text = (
                "The bad policy fails, but swapping every call that the good run made does not: the cause lies in what "
                "only the bad run does."
            )
            return self._report(Answer.NOT_A_BACKEND, text, signature=self._trials.reference)
        text = "Too many trials ended otherwise than with the failure that is searched for; see the evidence."
        return self._report(
            Answer.UNRESOLVED, text, suspects=self._sites.suspects(finding.suspects), signature=self._trials.reference
        )

    def _is_flaky(self) -> bool:
        """Whether trials that passed prove nothing; asked when the evidence suggests that.

        The bad policy is run again then, unless --repeat has shown already how often it fails.
        """
        if self._trials.repeat == 1 and len(self._rate.runs) == 1:
            requests = [Request("again", self._bad.text, again=number) for number in range(1, _AGAIN + 1)]
            self._rate.runs += [trial.verdict is Verdict.FAIL for trial in self._trials.run_all(requests)]
        enough = self._blank.confidence or _ENOUGH
        return not all(self._rate.runs) and self._rate.confidence(self._trials.repeat) < enough

    def _flaky(self, suspects: Sequence[Candidate]) -> Report:
        rate = self._rate
        text = (
            f"The bad policy failed in {rate.failures} of {len(rate.runs)} runs: trials that passed may have passed by "
            f"luck. --repeat {rate.repeats_for(0.95)} gives each of them 95 % confidence, "
            f"--repeat {rate.repeats_for(0.99)} 99 %."
        )
        return self._report(
            Answer.FLAKY, text, suspects=self._sites.suspects(suspects), signature=self._trials.reference
        )

    # --- odds and ends of the report --------------------------------------------------------------

    def _note_rate(self) -> None:
        rate, repeat = self._rate, self._trials.repeat
        if repeat == 1 or all(rate.runs):
            return
        confidence = rate.confidence(repeat)
        text = (
            f"The bad policy failed in {rate.failures} of {len(rate.runs)} runs; a trial that passed "
            f"{repeat} times had no failure with {confidence:.0%} confidence."
        )
        if confidence < (self._blank.confidence or _ENOUGH):
            text += f" {rate.advice()}."
        self._notes.append(text)

    def _report(self, verdict: Answer, *notes: str, **found: object) -> Report:
        evidence = tuple(self._evidence(trial) for trial in self._trials.session.trials)
        known = replace(self._blank, repeat=self._trials.repeat, failure_rate=self._rate.share)
        report = replace(known, verdict=verdict, evidence=evidence, **found)  # type: ignore[arg-type]
        return report.noted(*notes, *self._notes)

    def _shown(self, trial: Trial | None) -> list[str]:
        """What the log of the run that decided a trial says, where its signature does not: a note, or none."""
        if trial is None:
            return []
        number = trial.decisive
        ending = trial.runs[number - 1].ending
        log = self._trials.session.folder(trial.number) / f"run-{number}.log"
        if ending in ("exit status 0", "timeout"):
            return []
        said = refusal(log) if is_refusal(ending) else last_words(log)
        path = Path(self._blank.state) / log.relative_to(self._trials.session.path)
        if is_refusal(ending):
            return ["\n".join([*said, f"The whole log: {path}"])]
        if said:
            return ["\n".join([f"The end of its log, {path}:", *(f"  {line}" for line in said)])]
        return [] if log.exists() and log.stat().st_size else [f"It printed nothing; its log is {path}."]

    def _evidence(self, trial: Trial) -> Evidence:
        blames = trial.purpose == "search" and trial.policy in self._blamed
        confidence = None
        if self._trials.repeat > 1 and trial.verdict is Verdict.PASS and self._trials.reference is not None:
            confidence = round(self._rate.confidence(len(trial.runs)), 4)
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
            trial.rank,
        )


def _backends(calls: Iterable[CallRecord]) -> dict[tuple[str, str, str, int], set[str]]:
    """What ran each call, on whatever rank: one that fails keeps the others from getting as far."""
    found: dict[tuple[str, str, str, int], set[str]] = defaultdict(set)
    for call in calls:
        found[candidate(call).site].add(call.backend)
    return found
