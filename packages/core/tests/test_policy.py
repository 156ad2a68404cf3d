"""The policy language: what parses, what it selects, and the texts of what does not parse."""

from __future__ import annotations

import pytest

from triptych.errors import PolicyError
from triptych.policy import DEFAULT_RULE, Policy, Rule, parse

BACKENDS = ("composite", "cuda", "torch", "triton")
OPS = ("add_rms_norm", "rms_norm")


def rules(text: str) -> tuple[Rule, ...]:
    return parse(text, "TRIPTYCH_BACKEND", backends=BACKENDS, ops=OPS)


def decided(
    text: str, op: str, phase: str = "forward", layer: str = "", call: int = 0, rank: int = 0
) -> tuple[str, ...]:
    return Policy().extended(rules(text)).rule_for(op, phase, layer, call, rank).choice


def test_every_part_of_a_selector_is_read() -> None:
    (rule,) = rules("rms_*.backward@layers.3.*#1,4:9,120:%0,2:=cuda, torch")
    assert rule.op == "rms_*"
    assert rule.phase == "backward"
    assert rule.layer == "layers.3.*"
    assert rule.calls == ((1, 2), (4, 9), (120, None))
    assert rule.ranks == ((0, 1), (2, None))
    assert rule.choice == ("cuda", "torch")
    assert rule.source == "TRIPTYCH_BACKEND rule 1"
    assert rule.text == "rms_*.backward@layers.3.*#1,4:9,120:%0,2:=cuda, torch"


@pytest.mark.parametrize("text", ["", ";", " ; ;"])
def test_no_rules_leave_the_default(text: str) -> None:
    assert rules(text) == ()
    assert Policy().rules == (DEFAULT_RULE,)
    assert decided(text, "rms_norm") == ("auto",)


@pytest.mark.parametrize(
    ("text", "site", "choice"),
    [
        ("torch", {}, "torch"),
        ("triton;rms_norm.backward=torch", {}, "triton"),
        ("triton;rms_norm.backward=torch", {"phase": "backward"}, "torch"),
        ("rms_norm=torch;triton", {}, "triton"),  # the last rule that matches, not the closest
        ("triton;*=torch", {}, "torch"),
        ("triton;add_*=torch", {}, "triton"),
        ("auto;rms_norm@layers.3.*#120:=cuda", {"layer": "layers.3.norm", "call": 120}, "cuda"),
        ("auto;rms_norm@layers.3.*#120:=cuda", {"layer": "layers.3.norm", "call": 119}, "auto"),
        ("auto;rms_norm@layers.3.*#120:=cuda", {"layer": "layers.30.norm", "call": 120}, "auto"),
        ("auto;rms_norm#:5=cuda", {"call": 4}, "cuda"),
        ("auto;rms_norm#:5=cuda", {"call": 5}, "auto"),
        ("auto;rms_norm#3,5=cuda", {"call": 4}, "auto"),
        ("auto;rms_norm#3,5=cuda", {"call": 5}, "cuda"),
        ("auto;rms_norm#:=cuda", {"call": 9**9}, "cuda"),
        ("triton;rms_norm%0=torch", {"rank": 0}, "torch"),
        ("triton;rms_norm%0=torch", {"rank": 1}, "triton"),
        ("triton;@blocks.?.norm=torch", {"layer": "blocks.7.norm"}, "torch"),
        ("triton;.backward=torch", {"phase": "backward"}, "torch"),
    ],
)
def test_the_last_rule_that_matches_decides(text: str, site: dict[str, object], choice: str) -> None:
    assert decided(text, "rms_norm", **site) == (choice,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("trch", """TRIPTYCH_BACKEND rule 1, "trch": there is no backend 'trch'. Did you mean 'torch'?"""),
        (
            "numpy",
            """TRIPTYCH_BACKEND rule 1, "numpy": there is no backend 'numpy'. """
            """Known: auto, composite, cuda, torch, triton.""",
        ),
        (
            "torch;attention=torch",
            """TRIPTYCH_BACKEND rule 2, "attention=torch": no op matches 'attention'. """
            """Known: add_rms_norm, rms_norm.""",
        ),
        (
            "rms_norm.bakward=torch",
            """TRIPTYCH_BACKEND rule 1, "rms_norm.bakward=torch": there is no phase 'bakward'. Did you mean 'backward'?""",
        ),
        (
            "rms_norm#x=torch",
            """TRIPTYCH_BACKEND rule 1, "rms_norm#x=torch": "#x" is not a set of numbers. Write #7, #3,5, #2:9 (2 to 8), """
            """#120: (120 and later) or #:5 (0 to 4).""",
        ),
        (
            "rms_norm#" + "9" * 30 + "=torch",
            'TRIPTYCH_BACKEND rule 1, "rms_norm#' + "9" * 30 + '=torch": "#' + "9" * 30 + '" is not a set of numbers. '
            "Write #7, #3,5, #2:9 (2 to 8), #120: (120 and later) or #:5 (0 to 4).",
        ),
        (
            "rms_norm%-1=torch",
            """TRIPTYCH_BACKEND rule 1, "rms_norm%-1=torch": "%-1" is not a set of numbers. Write %7, %3,5, """
            """%2:9 (2 to 8), %120: (120 and later) or %:5 (0 to 4).""",
        ),
        (
            "rms_norm#5:5=torch",
            """TRIPTYCH_BACKEND rule 1, "rms_norm#5:5=torch": the span "5:5" is empty. Its end must lie after its start.""",
        ),
        (
            "rms_norm@=torch",
            """TRIPTYCH_BACKEND rule 1, "rms_norm@=torch": nothing follows "@". """
            """Write a module path or a glob, such as @blocks.*.""",
        ),
        (
            "=torch",
            """TRIPTYCH_BACKEND rule 1, "=torch": "" is not a selector. A selector is op[.phase][@layer][#calls][%ranks], """
            """for example rms_norm.backward@blocks.0.*#120:. Write selector=backend.""",
        ),
        (
            "rms_norm%0#3=torch",
            """TRIPTYCH_BACKEND rule 1, "rms_norm%0#3=torch": "%0#3" is not a set of numbers. Write %7, %3,5, """
            """%2:9 (2 to 8), %120: (120 and later) or %:5 (0 to 4).""",
        ),
        (
            "rms_norm=",
            """TRIPTYCH_BACKEND rule 1, "rms_norm=": '' is not a backend name. A rule ends with a backend, with several in """
            """order of preference (cuda,torch), or with auto. Known backends: composite, cuda, torch, triton.""",
        ),
        (
            "torch,,cuda",
            """TRIPTYCH_BACKEND rule 1, "torch,,cuda": '' is not a backend name. A rule ends with a backend, with several """
            """in order of preference (cuda,torch), or with auto. Known backends: composite, cuda, torch, triton.""",
        ),
        (
            "torch,auto",
            """TRIPTYCH_BACKEND rule 1, "torch,auto": auto is a list of backends already and stands alone. """
            """Write auto, or names.""",
        ),
        (
            "torch,cuda,torch",
            """TRIPTYCH_BACKEND rule 1, "torch,cuda,torch": a backend is named twice. """
            """Write each once, in order of preference.""",
        ),
    ],
)
def test_what_does_not_parse_says_what_would(text: str, error: str) -> None:
    with pytest.raises(PolicyError) as raised:
        rules(text)
    assert str(raised.value) == error


def test_only_rules_with_calls_or_ranks_are_dynamic_and_only_for_their_ops() -> None:
    policy = Policy().extended(rules("torch;rms_norm#3:=cuda"))
    assert policy.is_dynamic("rms_norm")
    assert not policy.is_dynamic("add_rms_norm")
    assert not Policy().extended(rules("torch;rms_norm@a.*=cuda")).is_dynamic("rms_norm")
