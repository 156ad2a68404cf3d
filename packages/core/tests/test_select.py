"""Selection, from plain data: strict names, lists, auto, and the texts of refusals."""

from __future__ import annotations

import pytest
import torch

from triptych.backend import Backend
from triptych.call import Call, TensorMeta
from triptych.errors import BuildError, PluginError, Refused
from triptych.opspec import PhaseFunction
from triptych.policy import DEFAULT_RULE, Rule, parse
from triptych.select import auto_order, select

META = TensorMeta.contiguous((4, 8), torch.float32, torch.device("cpu"))
CALL = Call("rms_norm", "backward", (("dy", META), ("weight", None)), (("eps", 1e-6),))


def nothing(*args: object) -> tuple[torch.Tensor, ...]:
    return ()


class Fake(Backend):
    def __init__(self, name: str, place: int | None, reasons: tuple[str, ...] = (), auto: tuple[str, ...] = ()) -> None:
        super().__init__(name)
        self.place, self.reasons, self.auto = place, reasons, auto

    def ops(self) -> tuple[str, ...]:
        return ("rms_norm",)

    def priority(self, device_type: str) -> int | None:
        return self.place if device_type == "cpu" else None

    def implementation(self, op: str, phase: str) -> PhaseFunction | None:
        return nothing

    def reasons_against(self, call: Call) -> list[str]:
        return list(self.reasons)

    def reasons_against_auto(self, call: Call) -> list[str]:
        return list(self.auto)


BACKENDS = {
    backend.name: backend
    for backend in (
        Fake("fast", 30, ("rows of 8 columns are too short; it needs 16. Use 'plain'.", "it is Tuesday. Wait.")),
        Fake("lazy", 20, auto=("it is not built. Build it.",)),
        Fake("plain", 10),
        Fake("hidden", None),
    )
}
NAMES = (*sorted(BACKENDS), "torn")


def get(name: str) -> Backend:
    if name == "torn":
        raise PluginError("Backend 'torn' failed to load.")
    return BACKENDS[name]


def rule(text: str) -> Rule:
    return parse(text, "TRIPTYCH_BACKEND", backends=NAMES, ops=("rms_norm",))[0]


def test_auto_is_by_priority_without_the_hidden_and_the_broken() -> None:
    torn = (("torn", "Backend 'torn' failed to load."),)
    assert auto_order("cpu", NAMES, get) == (("fast", "lazy", "plain"), torn)
    assert auto_order("cuda", NAMES, get) == ((), torn)


def test_auto_moves_past_refusals_and_records_them() -> None:
    decision = select(CALL, "a.b", DEFAULT_RULE, NAMES, get)
    assert decision.chosen == "plain"
    assert decision.function is nothing
    assert decision.rejected == (
        ("torn", ("Backend 'torn' failed to load.",)),
        ("fast", BACKENDS["fast"].reasons),  # type: ignore[attr-defined]
        ("lazy", BACKENDS["lazy"].auto),  # type: ignore[attr-defined]
    )
    assert decision.broken == ("torn",)


def test_a_name_is_strict_and_reasons_of_auto_do_not_count() -> None:
    assert select(CALL, "", rule("lazy"), NAMES, get).chosen == "lazy"
    with pytest.raises(Refused) as raised:
        select(CALL, "blocks.0.norm", rule("rms_norm=fast"), NAMES, get)
    assert str(raised.value) == (
        "rms_norm.backward in layer 'blocks.0.norm' on 'fast' (TRIPTYCH_BACKEND rule 1, \"rms_norm=fast\")\n"
        "  - rows of 8 columns are too short; it needs 16. Use 'plain'.\n"
        "  - it is Tuesday. Wait.\n"
        "  asked: rms_norm.backward(dy=float32[4, 8] on cpu, weight=None, eps=1e-06)"
    )
    assert raised.value.rejected == (("fast", BACKENDS["fast"].reasons),)  # type: ignore[attr-defined]


def test_a_list_is_an_order_of_preference() -> None:
    assert select(CALL, "", rule("fast,hidden,plain"), NAMES, get).chosen == "hidden"
    with pytest.raises(Refused) as raised:
        select(CALL, "", rule("fast,torn"), NAMES, get)
    assert str(raised.value).splitlines()[:4] == [
        "rms_norm.backward on 'fast', 'torn' (TRIPTYCH_BACKEND rule 1, \"fast,torn\")",
        "  - fast: rows of 8 columns are too short; it needs 16. Use 'plain'.",
        "  - fast: it is Tuesday. Wait.",
        "  - torn: Backend 'torn' failed to load.",
    ]


def test_auto_with_nothing_for_the_device_says_so() -> None:
    far = TensorMeta.contiguous((4, 8), torch.float32, torch.device("cuda", 0))
    with pytest.raises(Refused, match="no installed backend has a place in auto for this device"):
        select(Call("rms_norm", "forward", (("x", far),), ()), "", DEFAULT_RULE, sorted(BACKENDS), get)


def test_an_op_or_phase_that_is_missing_is_a_reason() -> None:
    with pytest.raises(Refused, match="it does not implement softmax; it implements rms_norm"):
        select(Call("softmax", "forward", (("x", META),), ()), "", rule("plain"), NAMES, get)


def test_a_record_is_plain_data() -> None:
    record = select(CALL, "a.b", DEFAULT_RULE, NAMES, get).to_json()
    assert record["chosen"] == "plain"
    assert record["rule"] == "auto"
    assert record["source"] == "default"
    assert record["call"]["tensors"] == {
        "dy": {"shape": [4, 8], "stride": [8, 1], "dtype": "float32", "device": "cpu", "aligned": True},
        "weight": None,
    }


def raises(*args: object) -> object:
    raise KeyError("planted")


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("priority", "high"),
        ("ops", "rms_norm"),
        ("reasons_unavailable", None),
        ("reasons_against", "a sentence that is not in a list."),
        ("reasons_against_auto", (1, 2)),
        ("implementation", "forward"),
    ],
)
def test_a_plug_in_that_errs_is_rejected_with_its_cause(method: str, wrong: object) -> None:
    for answer, said in ((raises, "raised KeyError: 'planted'"), (lambda *args: wrong, f"answered {wrong!r}")):
        bad = Fake("bad", 99)
        setattr(bad, method, answer)
        backends = {"bad": bad, "plain": BACKENDS["plain"]}
        decision = select(CALL, "", DEFAULT_RULE, tuple(backends), backends.__getitem__)
        assert decision.chosen == "plain"
        assert decision.broken == ("bad",)
        ((name, (reason,)),) = decision.rejected
        assert name == "bad"
        assert f"its {method} {said}" in reason


def test_a_preparation_that_fails_is_a_reason_and_a_list_moves_on() -> None:
    prepared = []

    def prepare(backend: Backend, call: Call) -> None:
        prepared.append(backend.name)
        if backend.name == "hidden":
            raise BuildError("the compiler is not there. Install it.")

    decision = select(CALL, "", rule("fast,hidden,plain"), NAMES, get, prepare)
    assert prepared == ["hidden", "plain"]
    assert decision.chosen == "plain"
    assert decision.rejected[1] == ("hidden", ("the compiler is not there. Install it.",))
    assert decision.broken == ()
    with pytest.raises(Refused, match=r"the compiler is not there\. Install it\."):
        select(CALL, "", rule("hidden"), NAMES, get, prepare)
