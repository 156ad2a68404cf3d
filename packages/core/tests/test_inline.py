"""Compile modes: how they are asked for, which ops they reach, and what explain and report say of them."""

from __future__ import annotations

import dataclasses
import logging
import threading
from pathlib import Path

import pytest
import torch

import triptych
from triptych import caches, compile_mode, environment, fingerprint, in_force, inline, intercept, registry, scope
from triptych.compile_mode import DEFAULT, INLINE, OPAQUE, Mode
from triptych.errors import EnvironmentVariableError, UsageError
from triptych.explain import Explanation
from triptych.opspec import OpSpec, Tensors
from triptych.policy import Policy, parse
from triptych.run import preflight, process

X = torch.ones(2, 8)
ASKED = Mode(INLINE, "triptych.use")
BOTH = ("forward", "backward")


def policy(rules: str) -> Policy:
    return Policy().extended(parse(rules, "test", backends=registry.backends.names(), ops=registry.ops.names()))


def explained(op: str = "rms_norm", layer: str = "") -> Explanation:
    return triptych.explain(op, X, None, 1e-6, 0.0, "after_weight", layer=layer)


# --- asking for a mode ------------------------------------------------------------------------------------------------


def test_a_wrong_value_is_an_error_before_anything_runs(fresh_scope: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_COMPILE", "inlin")
    text = (
        "TRIPTYCH_COMPILE is 'inlin'. It takes opaque (the default: torch.compile does not look into the ops) or "
        "inline (it traces through those that run on 'torch' or 'auto'). Did you mean 'inline'?"
    )
    with pytest.raises(EnvironmentVariableError) as raised:
        triptych.rms_norm(X)
    assert str(raised.value) == text
    with pytest.raises(EnvironmentVariableError) as raised:
        preflight.check_environment({"TRIPTYCH_COMPILE": "inlin"})
    assert str(raised.value) == text
    assert "TRIPTYCH_COMPILE" in environment.VARIABLES


@pytest.mark.parametrize("mode", ["inlin", "", 1, True])
def test_use_checks_the_mode_at_once(mode: object) -> None:
    with pytest.raises(
        UsageError, match=r"^triptych\.use takes compile=\"opaque\" or compile=\"inline\"; it was given"
    ):
        triptych.use(compile=mode)  # type: ignore[arg-type]


def test_use_takes_rules_or_a_mode_or_both() -> None:
    with pytest.raises(UsageError, match="takes rules as a string"):
        triptych.use()
    with pytest.raises(UsageError, match="takes rules as a string"):
        triptych.use(1, compile="inline")  # type: ignore[arg-type]
    with triptych.use("composite", compile="inline"), triptych.use("torch"):
        assert (explained().mode, explained().chosen) == (ASKED, "torch")
    with pytest.raises(UsageError, match=r"Write `with triptych\.use\(compile='inline'\):` inside it"):
        triptych.use(compile="inline")(OpSpec)


def test_the_innermost_use_that_names_one_counts_then_the_environment(
    fresh_scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(explained().mode) == "opaque (default)"
    monkeypatch.setenv("TRIPTYCH_COMPILE", "inline")
    monkeypatch.setattr(scope, "_process", None)
    assert str(explained().mode) == "inline (TRIPTYCH_COMPILE)"
    with triptych.use(compile="opaque"):
        assert str(explained().mode) == "opaque (triptych.use)"
        with triptych.use("torch"):
            assert explained().mode.name == OPAQUE
            with triptych.use(compile="inline"):
                assert str(explained().mode) == "inline (triptych.use)"
    assert str(explained().mode) == "inline (TRIPTYCH_COMPILE)"


# --- which ops it reaches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "reached"),
    [
        ("auto", True),
        ("torch", True),
        ("torch,triton", True),
        ("triton", False),
        ("triton,torch", False),
        ("rms_norm.backward=composite", False),
        ("add_rms_norm=composite", True),
        ("composite;rms_norm@blocks.*=auto", True),
        ("composite;rms_norm@head=auto", False),
        ("rms_norm.backward@head#3:=triton", False),
        ("add_rms_norm#3:=triton", True),
        ("*%1=triton", True),
        ("*%0=triton", False),
    ],
)
def test_rules_decide_and_are_not_overridden(rules: str, reached: bool) -> None:
    against = compile_mode.against(policy(rules), "rms_norm", BOTH, "blocks.0", rank=0)
    assert (against == "") is reached
    assert (compile_mode.sites(policy(rules), ASKED, 0) == "") is (rules in ("triton", "triton,torch", "*%0=triton"))
    assert compile_mode.sites(policy(rules), DEFAULT, 0) == ""


def test_policies_that_trace_through_the_same_have_one_text() -> None:
    def text(rules: str, rank: int = 0) -> str:
        return compile_mode.sites(policy(rules), ASKED, rank)

    assert text("auto") == text("torch") == text("torch,cuda") == text("triton;torch") == "*=inline"
    assert text("triton") == text("cuda;rms_norm=triton") == ""
    assert text("rms_norm=triton") == text("rms_norm=cuda") == text("torch;rms_norm=cuda,torch") != text("auto")
    assert text("*%1=cuda") == text("auto")
    assert text("*%1=cuda", rank=1) == ""
    assert text("rms_norm#7=cuda") != text("auto")
    assert text("rms_norm@a=cuda") != text("rms_norm@b=cuda")


def test_tools_and_trials_keep_everything_opaque(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_mode, "_said", set())
    with triptych.use(compile="inline"), caplog.at_level(logging.WARNING, "triptych.compile"):
        assert in_force.inlining == "*=inline"
        undo = intercept.install(lambda invocation, proceed: proceed())
        try:
            assert in_force.inlining == in_force.inlining == ""
            assert explained().opaque == "a tool is on that must see every call"
        finally:
            undo()
        assert in_force.inlining == "*=inline"
        monkeypatch.setenv(process.MARK, "1")
        assert in_force.inlining == ""
    assert caplog.messages == [
        "Compile mode inline is not applied, ops stay opaque: a tool is on that must see every call.",
        "Compile mode inline is not applied, ops stay opaque: this is a trial of triptych bisect, which must see every "
        "call.",
    ]


def test_a_mode_holds_for_its_own_thread() -> None:
    found: list[str] = []
    with triptych.use(compile="inline"):
        thread = threading.Thread(target=lambda: found.append(in_force.inlining))
        thread.start()
        thread.join()
        assert in_force.inlining == "*=inline"
    assert found == [""]
    with pytest.raises(AttributeError, match="has no attribute 'inlinin'"):
        _ = in_force.inlinin


# --- what is said of it -----------------------------------------------------------------------------------------------


def test_explain_says_why_a_call_stays_opaque() -> None:
    assert explained().opaque == "the compile mode is opaque"
    with triptych.use(compile="inline"):
        assert explained().opaque == ""
        assert explained().to_json()["compile"] == {"mode": "inline", "source": "triptych.use", "opaque": ""}
        with triptych.use("rms_norm=composite"):
            assert explained().opaque == (
                "rms_norm.forward is to run on 'composite' (triptych.use rule 1, \"rms_norm=composite\")"
            )
        with triptych.use("rms_norm@other#5:=composite"):
            assert explained().opaque == (
                'a rule counts calls of rms_norm (triptych.use rule 1, "rms_norm@other#5:=composite"), and one that '
                "was traced through has no number"
            )


def test_an_op_that_the_torch_backend_lacks_stays_opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    with triptych.use(compile="inline"):
        monkeypatch.setattr(registry.backends.get("torch"), "implementation", lambda op, phase: None)
        inline._version.cache_clear()
        assert explained().opaque == "backend 'torch' does not implement it"
        assert inline.version_of("rms_norm", "", in_force.inlining) == ""
    inline._version.cache_clear()


def test_the_report_names_the_mode() -> None:
    with triptych.use("torch", compile="inline"):
        assert str(triptych.report()).splitlines()[:2] == ["policy: torch", "compile mode: inline (triptych.use)"]
        undo = intercept.install(lambda invocation, proceed: proceed())
        text = "inline (triptych.use), not applied: a tool is on that must see every call"
        assert triptych.report().compile_mode == text
        undo()
    assert str(triptych.report()).splitlines()[1] == "compile mode: opaque (default)"


# --- fingerprints -----------------------------------------------------------------------------------------------------


def double(x: float) -> float:
    return x * FACTOR


def scaled(x: float) -> float:
    return helper(x)


def helper(x: float) -> float:
    return double(x) + 1


FACTOR = 2


def test_a_fingerprint_changes_with_what_a_function_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: float) -> float:
        return x * FACTOR + 0.5

    before = fingerprint.of(scaled)
    assert fingerprint.of(scaled) == before
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "FACTOR", 3)
        assert fingerprint.of(scaled) != before
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "double", other)
        assert fingerprint.of(scaled) != before
    assert fingerprint.of(scaled) == before


def test_a_changed_declaration_changes_the_key_of_compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = registry.ops.get("rms_norm")
    config = torch.compiler.config

    def fake(*args: object) -> Tensors:
        return (torch.empty(0), torch.empty(0))

    monkeypatch.setattr(caches, "_declared", dict(caches._declared))
    monkeypatch.setattr(caches, "_known", dict(caches._known))
    with config.patch(cache_key_tag="mine"):
        caches.declare(spec)
        first = config.cache_key_tag
        caches.declare(dataclasses.replace(spec, forward=dataclasses.replace(spec.forward, fake=fake)))
        second = config.cache_key_tag
        caches.declare(dataclasses.replace(spec, saved=("x", "rstd")))
        third = config.cache_key_tag
        caches.declare(spec)
        assert config.cache_key_tag == first
        config.cache_key_tag = "yours"
        caches.keep()
        assert config.cache_key_tag == first.replace("mine", "yours")
    assert len({first, second, third}) == 3
    assert all(tag.startswith("mine;triptych-") and tag.count("triptych") == 1 for tag in (first, second, third))
