"""The policy of a trial swaps exactly its subset, whatever layers are called and processes do."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.bisect import policies
from triptych.bisect.engine import Candidate
from triptych.bisect.policies import PolicyWriter, Side, have_one_effect
from triptych.errors import UsageError
from triptych.policy import Policy, parse

OPS = ("add_rms_norm", "rms_norm")
BACKENDS = ("cuda", "torch", "triton")


@dataclass(frozen=True)
class Record:
    op: str
    phase: str
    layer: str
    call: int
    rank: int = 0
    backend: str = "torch"


def side(text: str) -> Side:
    return Side.parse(text, "a test", Policy(), BACKENDS, OPS)


def writer(good: str, bad: str, records: list[Record]) -> PolicyWriter:
    return PolicyWriter(side(good), side(bad), records)


def chosen(text: str, record: Record) -> str:
    """What a trial's process would choose: the text goes through the environment and the parser."""
    through = os.fsdecode(os.fsencode(text))
    policy = Policy().extended(parse(through, "TRIPTYCH_BACKEND", backends=BACKENDS, ops=OPS))
    return ",".join(policy.rule_for(record.op, record.phase, record.layer, record.call, record.rank).choice)


def candidate(record: Record) -> Candidate:
    return Candidate(record.op, record.phase, record.layer, record.call, record.rank)


def job(layers: int, steps: int) -> list[Record]:
    return [
        Record("rms_norm", phase, f"blocks.{layer}.norm", step * layers + layer)
        for step in range(steps)
        for phase in ("forward", "backward")
        for layer in range(layers)
    ]


NASTY = [
    "",
    "a",
    "a;b",
    "a#b",
    "a=b",
    "a%b",
    "a?b",
    "*",
    "[",
    "[a]",
    "[!a]",
    "]",
    "a@b",
    " a",
    "a ",
    "blocks.0",
    "blöcke",
]
layer_names = st.one_of(
    st.sampled_from(NASTY), st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
)
POLICIES = ("torch", "triton", "triton,torch", "auto", "torch;rms_norm.backward=cuda", "triton;*@a*#2:=cuda;%1=torch")


@st.composite
def traces(draw: st.DrawFn, processes: int) -> list[Record]:
    """What processes do, each numbering its calls of an op and phase from 0, in layers as they come."""
    layers = draw(st.lists(layer_names, min_size=1, max_size=4, unique=True))
    records = []
    for rank in range(processes):
        for op in OPS[: draw(st.integers(1, 2))]:
            for phase in ("forward", "backward"):
                order = draw(st.lists(st.sampled_from(layers), max_size=12))
                records += [Record(op, phase, layer, call, rank) for call, layer in enumerate(order)]
    return records


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_text_selects_exactly_the_subset(data: st.DataObject) -> None:
    records = data.draw(traces(processes=1))
    written = writer(data.draw(st.sampled_from(POLICIES)), data.draw(st.sampled_from(POLICIES)), records)
    subset = {each for each in written.candidates if data.draw(st.booleans())}
    into, out = written.swapped_in(subset), written.swapped_out(subset)
    for record in records:
        site = (record.op, record.phase, record.layer, record.call, record.rank)
        good, bad = written.good.choice(*site), written.bad.choice(*site)
        assert (good != bad) == (candidate(record) in written.candidates)
        assert chosen(into, record) == (bad if candidate(record) in subset else good)
        assert chosen(out, record) == (good if candidate(record) in subset else bad)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_several_processes_with_layers_of_their_own(data: st.DataObject) -> None:
    """Only where two unnameable layers of two processes share a number can it select more than was asked."""
    records = data.draw(traces(processes=2))
    records = [
        record for record in records if record.layer and not set(record.layer) & set(";#%=") and record.layer.strip()
    ]
    records = [record for record in records if record.layer == record.layer.strip()]
    written = writer("torch", "triton;%1=cuda", records)
    subset = {each for each in written.candidates if data.draw(st.booleans())}
    text = written.swapped_in(subset)
    for record in records:
        expected = ("triton", "cuda")[record.rank] if candidate(record) in subset else "torch"
        assert chosen(text, record) == expected


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_subset_of_the_ranks_is_swapped_on_these_ranks_only(data: st.DataObject) -> None:
    """The same calls on every rank, or layers of their own, with names that rules can write."""
    several = data.draw(st.integers(2, 5))
    if data.draw(st.booleans()):
        one = list(data.draw(traces(processes=1)))
        records = [replace(each, rank=rank) for each in one for rank in range(several)]
    else:
        records = data.draw(traces(processes=several))
    plain = "abcdefgh.01"
    records = [each for each in records if each.layer and set(each.layer) <= set(plain)]
    written = writer(data.draw(st.sampled_from(POLICIES)), data.draw(st.sampled_from(POLICIES)), records)
    subset = {each for each in written.candidates if data.draw(st.booleans())}
    into, out = written.swapped_in(subset), written.swapped_out(subset)
    for record in records:
        site = (record.op, record.phase, record.layer, record.call, record.rank)
        good, bad = written.good.choice(*site), written.bad.choice(*site)
        assert chosen(into, record) == (bad if candidate(record) in subset else good)
        assert chosen(out, record) == (good if candidate(record) in subset else bad)


@pytest.mark.parametrize(
    ("pick", "text"),
    [
        (lambda each: each.rank in (1, 2), "torch;rms_norm%1:3=triton"),
        (lambda each: each.rank != 2 and each.phase == "backward", "torch;rms_norm.backward%0:2,3=triton"),
        (lambda each: each.call == 2 and each.phase == "forward", "torch;rms_norm.forward#2=triton"),
        (
            lambda each: each.phase == "forward" and (each.call < 2 or (each.call == 2 and each.rank < 2)),
            "torch;rms_norm.forward#0:2=triton;rms_norm.forward#2%0:2=triton",
        ),
    ],
)
def test_ranks_are_spans_and_named_only_where_it_matters(pick, text: str) -> None:  # type: ignore[no-untyped-def]
    records = [replace(each, rank=rank) for each in job(layers=2, steps=2) for rank in range(4)]
    written = writer("torch", "triton", records)
    assert written.ranks == (0, 1, 2, 3)
    assert written.swapped_in([each for each in written.candidates if pick(each)]) == text


def test_a_capture_selects_the_rank_where_there_are_several() -> None:
    records = job(layers=1, steps=1)
    chosen_one = candidate(records[0])
    assert writer("torch", "triton", records).selectors([chosen_one]) == "rms_norm.forward#0"
    ranked = [replace(each, rank=rank) for each in records for rank in range(2)]
    assert writer("torch", "triton", ranked).selectors([replace(chosen_one, rank=1)]) == "rms_norm.forward#0%1"


def test_an_unnamed_layer_beside_a_named_one_of_another_process_with_the_same_number() -> None:
    records = [Record("rms_norm", "forward", "", 0, rank=0), Record("rms_norm", "forward", "a", 0, rank=1)]
    text = writer("torch", "triton", records).swapped_in({candidate(records[0])})
    assert [chosen(text, each) for each in records] == ["triton", "torch"]


@pytest.mark.parametrize(
    ("pick", "text"),
    [
        (lambda each: True, "torch;rms_norm=triton"),
        (lambda each: each.phase == "backward", "torch;rms_norm.backward=triton"),
        (
            lambda each: each.phase == "backward" and each.layer == "blocks.1.norm",
            "torch;rms_norm.backward@blocks.1.norm=triton",
        ),
        (
            lambda each: each.phase == "backward" and each.layer == "blocks.1.norm" and each.call >= 31,
            "torch;rms_norm.backward@blocks.1.norm#31:299=triton",
        ),
        (lambda each: each.phase == "forward" and each.call < 100, "torch;rms_norm.forward#0:100=triton"),
        (lambda each: each.phase == "forward" and each.call in (3, 7), "torch;rms_norm.forward#3,7=triton"),
        (lambda each: False, "torch"),
    ],
)
def test_rules_are_as_coarse_as_they_can_be(pick, text: str) -> None:  # type: ignore[no-untyped-def]
    written = writer("torch", "triton", job(layers=3, steps=100))
    assert written.swapped_in([each for each in written.candidates if pick(each)]) == text


def test_the_workaround_is_the_bad_policy_and_one_rule() -> None:
    written = writer("torch", "triton", job(layers=3, steps=4))
    assert written.swapped_out(written.phase_of(Candidate("rms_norm", "backward", "blocks.1.norm", 7))) == (
        "triton;rms_norm.backward=torch"
    )


def test_a_whole_phase_also_holds_for_calls_that_the_good_run_did_not_make() -> None:
    written = writer("torch", "triton", job(layers=3, steps=4))
    text = written.swapped_in([each for each in written.candidates if each.phase == "backward"])
    assert chosen(text, Record("rms_norm", "backward", "blocks.9.norm", 5000)) == "triton"
    assert chosen(text, Record("rms_norm", "forward", "blocks.9.norm", 5000)) == "torch"


def test_what_both_policies_choose_alike_is_no_candidate() -> None:
    written = writer("torch", "torch;rms_norm.backward=cuda", job(layers=2, steps=2))
    assert {each.phase for each in written.candidates} == {"backward"}
    assert written.swapped_in(written.candidates) == "torch;rms_norm.backward=cuda"


def test_a_long_list_of_layers_is_written_from_its_shorter_side(monkeypatch: pytest.MonkeyPatch) -> None:
    records = job(layers=40, steps=2)
    written = writer("torch", "triton", records)
    subset = {each for each in written.candidates if each.layer != "blocks.7.norm"}
    monkeypatch.setattr(policies, "SIZE_LIMIT", 200)
    text = written.swapped_in(subset)
    assert len(text) <= 200
    assert all((chosen(text, each) == "triton") == (candidate(each) in subset) for each in records)


def test_a_policy_that_no_environment_can_hold_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    written = writer("torch", "triton", job(layers=40, steps=2))
    monkeypatch.setattr(policies, "SIZE_LIMIT", 60)
    with pytest.raises(UsageError) as caught:
        written.swapped_in([each for each in written.candidates if int(each.layer.split(".")[1]) % 2])
    assert "an environment variable holds 60. Narrow the search" in str(caught.value)


@pytest.mark.parametrize(
    ("good", "bad", "same"),
    [
        ("torch", "torch", True),
        ("torch", "triton;torch", True),
        ("torch", "torch;rms_norm=torch", True),
        ("torch", "triton", False),
        ("torch", "torch;rms_norm.backward=triton", False),
        ("torch", "torch;rms_norm#3=triton", False),
        ("torch;rms_norm#3=triton", "torch; rms_norm#3=triton", True),
        ("torch;rms_norm#3=triton", "torch;rms_norm#3 = triton", True),
    ],
)
def test_policies_that_cannot_differ_are_known_before_anything_runs(good: str, bad: str, same: bool) -> None:
    assert have_one_effect(side(good), side(bad), OPS) is same
