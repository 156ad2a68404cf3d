"""The search against synthetic predicates: what it finds, and in how many trials."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.bisect.engine import (
    LIMIT,
    Candidate,
    Finding,
    Level,
    Outcome,
    Question,
    Status,
    ask,
    hierarchical,
    search,
)

Predicate = Callable[[frozenset[Candidate]], Outcome]


def program(ops: int, layers: int, steps: int) -> tuple[Candidate, ...]:
    """The calls of a training job: every op in every layer, forward and backward, step after step."""
    calls = []
    for step in range(steps):
        for phase in ("forward", "backward"):
            for op in range(ops):
                for layer in range(layers):
                    calls.append(Candidate(f"op{op}", phase, f"blocks.{layer}", step * layers + layer))
    return hierarchical(calls)


def fails_with(*sets: set[Candidate]) -> Predicate:
    """FAIL when one of the sets is swapped in completely."""
    return lambda subset: Outcome.FAIL if any(each <= subset for each in sets) else Outcome.PASS


class Run:
    """A search run to its end, with every question that it asked."""

    def __init__(self, candidates: Sequence[Candidate], predicate: Predicate) -> None:
        self.questions: list[Question] = []
        self.outcomes: list[Outcome] = []
        running = search(candidates)
        try:
            question = next(running)
            while True:
                self.questions.append(question)
                self.outcomes.append(predicate(frozenset(question.subset)))
                question = running.send(self.outcomes[-1])
        except StopIteration as end:
            self.finding: Finding = end.value

    @property
    def trials(self) -> int:
        return len(self.questions)

    @property
    def found(self) -> set[Candidate]:
        return set(self.finding.members)


PROGRAMS = [(1, 1, 1), (1, 1, 2), (2, 3, 5), (3, 5, 100), (2, 9, 117), (9, 1, 50), (1, 100, 17), (5, 33, 12)]


@pytest.mark.parametrize(("ops", "layers", "steps"), PROGRAMS)
def test_one_culprit_takes_log2_trials_and_its_confirmation(ops: int, layers: int, steps: int) -> None:
    candidates = program(ops, layers, steps)
    limit = math.ceil(math.log2(len(candidates))) + 1
    generator = random.Random(len(candidates))
    for culprit in generator.sample(candidates, min(60, len(candidates))):
        run = Run(candidates, fails_with({culprit}))
        assert run.found == {culprit}
        assert run.finding.culprits[0].level is Level.CALL
        assert run.trials <= limit


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_skewed_hierarchies_cost_no_more(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=12))
    sites = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 4)),
                               min_size=len(sizes), max_size=len(sizes), unique=True))  # fmt: skip
    calls = [
        Candidate(f"op{op}", ("forward", "backward")[phase], f"layer{layer}", call)
        for size, (op, phase, layer) in zip(sizes, sites, strict=True)
        for call in range(size)
    ]
    candidates = hierarchical(calls)
    culprit = data.draw(st.sampled_from(candidates))
    run = Run(candidates, fails_with({culprit}))
    assert run.found == {culprit}
    assert run.trials <= math.ceil(math.log2(len(candidates))) + 1


def test_a_layer_that_fails_at_every_call_is_answered_with_its_first_call() -> None:
    candidates = program(2, 5, 20)
    layer = [each for each in candidates if (each.op, each.phase, each.layer) == ("op1", "backward", "blocks.3")]
    run = Run(candidates, fails_with(*({each} for each in layer)))
    assert run.found == {layer[0]}
    assert layer[0].call == min(each.call for each in layer)


def test_an_op_that_fails_everywhere_is_answered_with_its_first_call_in_its_first_layer() -> None:
    candidates = program(2, 5, 20)
    bad = [each for each in candidates if each.op == "op1"]
    run = Run(candidates, fails_with(*({each} for each in bad)))
    assert run.found == {bad[0]}


@pytest.mark.parametrize(("ops", "layers", "steps"), PROGRAMS[2:])
def test_pairs_and_triples_that_fail_only_together(ops: int, layers: int, steps: int) -> None:
    candidates = program(ops, layers, steps)
    generator = random.Random(7)
    for size in (2, 3):
        for _ in range(25):
            together = set(generator.sample(candidates, size))
            run = Run(candidates, fails_with(together))
            assert run.found == together
            assert run.trials <= (size + 1) * math.ceil(math.log2(len(candidates))) + 2 * size + 4


def test_a_pair_within_one_call_of_two_ops() -> None:
    candidates = program(3, 5, 100)
    forward = Candidate("op0", "forward", "blocks.2", 152)
    backward = Candidate("op2", "backward", "blocks.2", 152)
    run = Run(candidates, fails_with({forward, backward}))
    assert run.finding.members == (forward, backward)
    assert run.trials <= 2 * math.ceil(math.log2(len(candidates))) + 5


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_the_predicate_the_answer_fails_and_nothing_can_be_left_out(data: st.DataObject) -> None:
    """Arbitrary predicates, monotone or not: FAIL, PASS and UNRESOLVED scattered by a hash of the subset."""
    candidates = program(2, 2, data.draw(st.integers(1, 8)))
    seed = data.draw(st.integers(0, 2**32))
    unresolved = data.draw(st.sampled_from([0.0, 0.1, 0.4]))
    everything = frozenset(candidates)

    def predicate(subset: frozenset[Candidate]) -> Outcome:
        if subset == everything:
            return Outcome.FAIL
        draw = random.Random(f"{seed} {sorted(map(str, subset))}").random()
        if draw < unresolved:
            return Outcome.UNRESOLVED
        return Outcome.FAIL if draw < unresolved + 0.3 else Outcome.PASS

    run = Run(candidates, predicate)
    if run.finding.status is Status.UNRESOLVED:
        assert unresolved
        assert run.finding.suspects
        return
    assert run.finding.status is Status.FOUND
    assert predicate(frozenset(run.found)) is Outcome.FAIL
    for culprit in run.finding.culprits:
        rest = frozenset(run.found) - frozenset(culprit.members)
        if rest:
            assert predicate(rest) is not Outcome.FAIL
    assert len(run.questions) == len({question.subset for question in run.questions})


def test_a_failure_that_needs_many_calls_is_answered_with_the_layer() -> None:
    candidates = program(2, 4, 100)
    layer = frozenset(
        each for each in candidates if (each.op, each.phase, each.layer) == ("op1", "forward", "blocks.2")
    )

    def leak(subset: frozenset[Candidate]) -> Outcome:
        return Outcome.FAIL if len(subset & layer) >= 60 else Outcome.PASS

    run = Run(candidates, leak)
    assert run.finding.culprits[0].level is Level.LAYER
    assert run.found == layer
    assert run.trials <= (LIMIT + 2) * math.ceil(math.log2(len(candidates)))


def test_a_failure_that_needs_many_layers_is_answered_with_the_phase() -> None:
    candidates = program(2, 12, 20)
    phase = frozenset(each for each in candidates if (each.op, each.phase) == ("op1", "backward"))

    def drift(subset: frozenset[Candidate]) -> Outcome:
        return Outcome.FAIL if len(subset & phase) >= 200 else Outcome.PASS

    run = Run(candidates, drift)
    assert [culprit.level for culprit in run.finding.culprits] == [Level.PHASE]
    assert run.found == phase


def test_a_failure_that_needs_a_call_of_every_layer_is_answered_with_the_phase() -> None:
    candidates = program(2, 3, 10)
    phase = frozenset(each for each in candidates if (each.op, each.phase) == ("op0", "forward"))

    def seventh_call_in_a_process(subset: frozenset[Candidate]) -> Outcome:
        return Outcome.FAIL if len(subset & phase) >= 21 else Outcome.PASS

    run = Run(candidates, seventh_call_in_a_process)
    assert [culprit.level for culprit in run.finding.culprits] == [Level.PHASE]
    assert run.found == phase


def test_a_failure_that_needs_many_calls_of_two_ops_is_answered_with_their_phases() -> None:
    candidates = program(3, 4, 25)
    first = frozenset(each for each in candidates if (each.op, each.phase) == ("op0", "forward"))
    second = frozenset(each for each in candidates if (each.op, each.phase) == ("op2", "backward"))

    def both(subset: frozenset[Candidate]) -> Outcome:
        enough = len(subset & first) >= 70 and len(subset & second) >= 70
        return Outcome.FAIL if enough else Outcome.PASS

    run = Run(candidates, both)
    assert run.found == first | second
    assert [culprit.level for culprit in run.finding.culprits] == [Level.PHASE, Level.PHASE]


def test_nothing_fails_when_swapping_everything_passes() -> None:
    candidates = program(3, 5, 100)
    run = Run(candidates, lambda subset: Outcome.PASS)
    assert run.finding.status is Status.NOTHING_FAILS
    assert run.trials <= math.ceil(math.log2(len(candidates))) + 2


def test_no_candidates_is_nothing_fails() -> None:
    assert ask(lambda: search(()), []) == Finding(Status.NOTHING_FAILS)


def test_everything_unresolved_ends_soon_and_names_suspects() -> None:
    candidates = program(3, 5, 100)
    run = Run(candidates, lambda subset: Outcome.UNRESOLVED)
    assert run.finding.status is Status.UNRESOLVED
    assert run.finding.suspects == candidates
    assert run.trials <= 2 * math.ceil(math.log2(len(candidates))) + 2


@pytest.mark.parametrize(("hider", "culprit"), [(17, 201), (130, 201), (100, 110), (5, 239), (300, 20), (0, 479)])
def test_what_spoils_the_trials_that_hold_it_is_walked_around(hider: int, culprit: int) -> None:
    """One candidate makes every trial that holds it end in another way, unless everything is swapped."""
    candidates = program(2, 3, 40)

    def predicate(subset: frozenset[Candidate]) -> Outcome:
        if candidates[hider] in subset and len(subset) < len(candidates):
            return Outcome.UNRESOLVED
        return Outcome.FAIL if candidates[culprit] in subset else Outcome.PASS

    run = Run(candidates, predicate)
    assert run.found == {candidates[culprit]}
    assert run.trials <= 4 * math.ceil(math.log2(len(candidates))) + 4


def test_a_forward_that_only_its_own_backward_understands_does_not_hide_a_fault_in_that_backward() -> None:
    """Swapped forward with the other backward ends in a way of its own, in every layer and call."""
    candidates = program(1, 4, 30)
    culprit = Candidate("op0", "backward", "blocks.2", 62)

    def predicate(subset: frozenset[Candidate]) -> Outcome:
        forward = {(each.layer, each.call) for each in subset if each.phase == "forward"}
        backward = {(each.layer, each.call) for each in subset if each.phase == "backward"}
        if forward - backward:
            return Outcome.UNRESOLVED
        return Outcome.FAIL if culprit in subset else Outcome.PASS

    assert Run(candidates, predicate).found == {culprit}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_a_flaky_failure_gives_an_answer_that_holds_the_culprit(seed: int, repeats: int) -> None:
    candidates = program(2, 3, 10)
    generator = random.Random(seed)
    culprit = generator.choice(candidates)

    def predicate(subset: frozenset[Candidate]) -> Outcome:
        failed = culprit in subset and any(generator.random() < 0.5 for _ in range(repeats))
        return Outcome.FAIL if failed else Outcome.PASS

    run = Run(candidates, predicate)
    if run.finding.status is Status.FOUND:
        assert culprit in run.found
    else:
        assert run.finding.status is Status.NOTHING_FAILS


def test_told_the_same_outcomes_it_asks_the_same_questions() -> None:
    candidates = program(2, 4, 25)
    run = Run(candidates, fails_with({candidates[30], candidates[150]}))
    for count, question in enumerate(run.questions):
        assert ask(lambda: search(candidates), run.outcomes[:count]) == question
    assert ask(lambda: search(candidates), run.outcomes) == run.finding


def test_cuts_fall_between_ops_phases_and_layers_where_that_is_free() -> None:
    candidates = program(2, 4, 16)
    run = Run(candidates, fails_with({candidates[0]}))
    sizes = [len(question.subset) for question in run.questions]
    assert sizes == [128, 64, 32, 16, 8, 4, 2, 1]
    edges = [(candidates[size - 1], candidates[size]) for size in sizes[:4]]
    assert [before.op != after.op for before, after in edges] == [True, False, False, False]
    assert edges[1][0].phase != edges[1][1].phase
    assert edges[2][0].layer != edges[2][1].layer
