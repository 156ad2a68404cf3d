"""The conformance suite's own machinery: exclusions, what ran, fresh memory, guard zones, the pytest plug-in."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import torch

import triptych
from triptych import dispatch, registry
from triptych.backend import Backend
from triptych.compare import agreement_or_both_nan
from triptych.testing import CHECKS, Case, Subject, execute, first_failure, grid, layouts, outcomes, plugin, ran, under
from triptych.testing.assertions import assert_no_alias, assert_same_bits, assert_within
from triptych.testing.execution import EXCLUDED, FAILED, PASSED, SKIPPED, unmatched_exclusions
from triptych.testing.faulty import FAULTS, planted
from triptych.testing.memory import filled, guarded
from triptych.testing.running import assert_right

CASE = Case("rms_norm", "columns_33", torch.float32, "cpu")
CPU = torch.device("cpu")


# --- exclusions -------------------------------------------------------------------------------------------------------


def test_an_excluded_failure_is_no_failure() -> None:
    with planted(FAULTS["tail_columns_ignored"]) as subject:
        for pattern in ("forward_values", "forward_*", "forward_values[rms_norm-*]", f"forward_values[{CASE.id}]"):
            excused = dataclasses.replace(subject, exclusions={pattern: "tails come next week"})
            outcome = execute(excused, CHECKS["forward_values"], CASE)
            assert (outcome.verdict, outcome.text) == (EXCLUDED, "tails come next week")


def test_an_exclusion_that_has_expired_is_a_failure() -> None:
    subject = Subject("composite", exclusions={"forward_values": "tails come next week"})
    outcome = execute(subject, CHECKS["forward_values"], CASE)
    assert outcome.verdict == FAILED
    assert "Remove the exclusion" in outcome.text


def test_exclusions_that_match_nothing_or_say_nothing_are_named() -> None:
    subject = Subject("composite", exclusions={"forward_valeus": "typing error", "forward_values[rms_norm-*]": " "})
    first, second = unmatched_exclusions(subject)
    assert "'forward_valeus' matches no test" in first
    assert "gives no reason" in second


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_refused_case_outside_the_floor_is_skipped() -> None:
    fault = dataclasses.replace(
        FAULTS["refused_without_reason"],
        reasons=lambda call: (
            ["No float64 here; convert the tensors to float32."]
            if call.tensors[0][1] is not None and call.tensors[0][1].dtype is torch.float64
            else []
        ),
    )
    with planted(fault) as subject:
        wide = execute(subject, CHECKS["forward_values"], dataclasses.replace(CASE, dtype=torch.float64))
        narrow = execute(subject, CHECKS["forward_values"], CASE)
        refusals = {outcome.verdict for outcome in outcomes(subject, "refusals")}
    assert (wide.verdict, narrow.verdict, refusals) == (SKIPPED, PASSED, {PASSED})
    assert "float64" in wide.text


def test_an_unavailable_backend_fails() -> None:
    with planted(FAULTS["floor_refused"]) as subject:
        subject.plugin.reasons_unavailable = lambda: ["No driver was found; install one."]  # type: ignore[method-assign]
        failure = first_failure(subject, "refusals")
    assert failure is not None
    assert "No driver was found" in failure.text


# --- what ran ---------------------------------------------------------------------------------------------------------


def test_ran_sees_too_few_too_many_and_elsewhere() -> None:
    x = torch.randn(2, 8)
    expected = {("rms_norm", "forward", "composite"): 1}
    with under("composite"), ran(expected):
        triptych.rms_norm(x)
    with pytest.raises(AssertionError, match="ran nothing"), under("composite"), ran(expected):
        pass
    with pytest.raises(AssertionError, match="x2"), under("composite"), ran(expected):
        triptych.rms_norm(triptych.rms_norm(x))
    with planted(FAULTS["one_percent_off"]) as subject:
        with pytest.raises(AssertionError, match="faulty_one_percent_off"), under(subject.backend), ran(expected):
            triptych.rms_norm(x)


def test_under_restores_what_was_in_force() -> None:
    before = triptych.report().policy
    with under("composite"):
        assert triptych.report().policy.endswith("composite")
    assert triptych.report().policy == before


def test_under_refuses_to_be_hidden_by_a_use_block() -> None:
    with triptych.use("composite"), pytest.raises(AssertionError, match=r"triptych\.use"), under("composite"):
        pass


# --- comparing --------------------------------------------------------------------------------------------------------


def _within(output: float, reference: float, bound: float, dtype: torch.dtype = torch.float32) -> None:
    wide = torch.tensor([reference], dtype=torch.float64)
    assert_within(["y"], (torch.tensor([output], dtype=dtype),), (wide,), (torch.full_like(wide, bound),))


def test_within_accepts_the_bound_itself_and_the_infinity_that_rounding_gives() -> None:
    _within(1.5, 1.0, 0.5)
    _within(float("inf"), 70000.0, 1.0, torch.float16)
    _within(float("-inf"), float("-inf"), 1.0)


@pytest.mark.parametrize(
    ("output", "reference", "bound"),
    [
        (1.5, 1.0, 0.25),
        (float("nan"), 1.0, float("inf")),
        (float("nan"), float("nan"), 1.0),
        (float("inf"), 1.0, 1.0),
        (float("inf"), 1.0, float("inf")),
        (float("inf"), float("-inf"), 1.0),
    ],
)
def test_within_rejects(output: float, reference: float, bound: float) -> None:
    with pytest.raises(AssertionError, match="1 of 1 elements lie outside the bound"):
        _within(output, reference, bound)


@pytest.mark.parametrize(
    ("output", "reference", "bound", "right"),
    [
        (5, 5, 0.0, True),
        (6, 5, 0.0, False),
        (6, 5, 1.0, True),
        (2**53 + 1, 2**53, 0.0, False),
        (2**62 + 1, 2**62, 0.0, False),
        (2**63 - 1, -(2**63), 1e18, False),
        (-(2**63), -(2**63), 0.0, True),
    ],
)
def test_integers_are_compared_as_integers(output: int, reference: int, bound: float, right: bool) -> None:
    tensors = (torch.tensor([output]),), (torch.tensor([reference]),), (torch.tensor([bound], dtype=torch.float64),)
    if right:
        assert_within(["count"], *tensors)
    else:
        with pytest.raises(AssertionError, match="1 of 1 elements lie outside the bound"):
            assert_within(["count"], *tensors)


def test_bits_are_compared_with_a_reference_of_another_dtype_without_wrapping_around() -> None:
    bits, bound = torch.tensor([0], dtype=torch.uint8), torch.zeros(1, dtype=torch.float64)
    for reference in (torch.tensor([256]), torch.tensor([256.0]), torch.tensor([float("nan")])):
        with pytest.raises(AssertionError, match="outside the bound"):
            assert_within(["bits"], (bits,), (reference,), (bound,))
    assert_within(["bits"], (bits,), (torch.tensor([0.0]),), (bound,))


def test_nan_is_right_only_where_a_case_makes_it_right() -> None:
    nan, one = torch.tensor([float("nan")], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for name in ("nan", "no_rows"):  # inputs that hold one; a sample that says so
        case = Case("tile_std", name, torch.float32, "cpu")
        assert_right(case, ["std"], (nan,), (nan,), (one,))
        for output, reference in ((nan, one), (one, nan)):
            with pytest.raises(AssertionError, match="outside the bound"):
                assert_right(case, ["std"], (output,), (reference,), (one,))
    with pytest.raises(AssertionError, match=r"Sample\.nan says where NaN is right"):
        assert_right(CASE, ["y"], (nan,), (nan,), (one,))


def test_no_reference_is_nan_where_no_case_makes_it_right() -> None:
    """A reference that broke would otherwise be met by every implementation that broke with it."""
    for op in registry.ops.names():
        for name, sample in grid.samples(op).items():
            case = Case(op, name, torch.bfloat16, "cpu")
            found = any(bool(each.isnan().any()) for each in case.spec.forward.reference(*case.arguments()))
            assert not sample.nan or found, f"{case.id}: nothing is NaN; take nan=True away"
            assert not found or case.agree is agreement_or_both_nan, f"{case.id}: the reference is NaN somewhere"


def test_same_bits_tells_zeros_and_nans_apart() -> None:
    assert_same_bits(["y"], [torch.tensor([float("nan")])], [torch.tensor([float("nan")])], "two NaNs of the same bits")
    with pytest.raises(AssertionError, match="two zeros"):
        assert_same_bits(["y"], [torch.tensor([0.0])], [torch.tensor([-0.0])], "two zeros")


def test_no_alias_sees_views_and_empty_slices() -> None:
    x = torch.randn(4)
    for output in (x, x.view(2, 2), x[:0]):
        with pytest.raises(AssertionError, match="y shares its memory with x"):
            assert_no_alias(["y"], (output,), {"x": x})
    assert_no_alias(["y"], (x.clone(),), {"x": x})


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 16, 1000, 100_000])
def test_fresh_memory_holds_the_pattern(count: int) -> None:
    with filled(0x7F, CPU):
        seen = [
            torch.empty(count, dtype=torch.uint8),
            torch.empty_strided((count,), (1,), dtype=torch.uint8),
            torch.empty_like(torch.zeros(count, dtype=torch.uint8)),
            torch.zeros(1, dtype=torch.uint8).new_empty(count),
        ]
        with torch._C._DisableTorchDispatch():  # as a C++ extension that allocates for itself
            seen.append(torch.empty(count, dtype=torch.uint8))
    for tensor in seen:
        assert tensor.unique().tolist() == [0x7F]


def test_fresh_memory_keeps_the_layout_of_what_it_replaces() -> None:
    with filled(0x7F, CPU):
        made = torch.empty(2, 3, 4, dtype=torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype, made.is_contiguous()) == (
        (2, 3, 4),
        (12, 4, 1),
        torch.bfloat16,
        True,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8])
def test_guarded_copies_keep_values_strides_and_alignment(dtype: torch.dtype) -> None:
    base = torch.arange(120).to(dtype)
    for tensor in (
        base.view(2, 60),
        base[1:].view(7, 17)[:, 3:9],
        base.view(4, 30).t(),
        base[:5].expand(3, 5),
        base[5].expand(2, 3),
        base[:0].view(0, 4),
    ):
        copy = guarded(tensor, 0xC1)
        assert torch.equal(copy.tensor, tensor)
        assert copy.tensor.stride() == tensor.stride()
        if tensor.numel():
            assert copy.tensor.data_ptr() % 64 == tensor.data_ptr() % 64
        assert copy.memory[:4096].unique().tolist() == [0xC1]
        assert copy.memory[-4096:].unique().tolist() == [0xC1]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bfloat16])
def test_layouts_hold_integers_and_single_elements(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for values in (torch.arange(24).to(dtype).view(2, 3, 4), torch.tensor([7]).to(dtype), torch.empty(0, dtype=dtype)):
        for layout in layouts.SAME_VALUES:
            found = layout(values)
            assert torch.equal(found, values), layout.__name__
            assert found.dtype is dtype
        assert torch.equal(layouts.drawn(values, generator), values)


# --- the grid ---------------------------------------------------------------------------------------------------------


def test_a_case_has_the_same_values_whenever_it_is_made() -> None:
    for op in registry.ops.names():
        for case in CHECKS["forward_values"].cases(Subject("composite"), op, "cpu"):
            again = dataclasses.replace(case)
            for one, other in zip(case.tensors(), again.tensors(), strict=True):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    assert_same_bits([case.id], [one], [other], "made twice")
                    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr() or not one.numel()


def test_case_ids_are_unique_and_a_thin_grid_is_part_of_the_full_one() -> None:
    for op in registry.ops.names():
        full = [case.id for case in CHECKS["forward_values"].cases(Subject("composite"), op, "cpu")]
        thin = [case.id for case in CHECKS["forward_values"].cases(Subject("composite", thin="slow"), op, "cpu")]
        assert len(set(full)) == len(full)
        assert len(set(thin)) == len(thin)
        assert set(thin) < set(full)


def test_checks_of_gradients_leave_out_ops_that_have_none() -> None:
    subject = Subject("composite")
    without = [op for op in registry.ops.names() if registry.ops.get(op).backward is None]
    assert without
    for name, of_gradients in (("backward_values", True), ("gradcheck", True), ("outputs_carry_no_gradient", False)):
        for op in registry.ops.names():
            found = list(CHECKS[name].cases(subject, op, "cpu"))
            assert bool(found) == (of_gradients != (op in without)), (name, op)


def _smooth(monkeypatch: pytest.MonkeyPatch, **smooth: tuple[str, ...] | None) -> tuple[list[str], str]:
    """The samples of rms_norm that gradcheck runs, when these name their smooth inputs, and how the first one ends."""
    known = {name: dataclasses.replace(grid.samples("rms_norm")[name], smooth=()) for name in grid.samples("rms_norm")}
    changed = {**known, **{name: dataclasses.replace(known[name], smooth=value) for name, value in smooth.items()}}
    monkeypatch.setattr(grid, "samples", lambda op: changed)
    cases = list(CHECKS["gradcheck"].cases(Subject("composite"), "rms_norm", "cpu"))
    return [case.sample for case in cases], execute(Subject("composite"), CHECKS["gradcheck"], cases[0]).verdict


def test_gradcheck_differentiates_what_is_smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = grid.stand_in("rms_norm")
    assert _smooth(monkeypatch, **{stand_in: None}) == ([stand_in], PASSED)
    assert _smooth(monkeypatch, columns_7=("weight",)) == (["columns_7"], PASSED)
    assert _smooth(monkeypatch, columns_7=("x",), columns_8=("x", "weight"))[0] == ["columns_7", "columns_8"]
    assert _smooth(monkeypatch) == ([stand_in], SKIPPED)


def test_gradcheck_leaves_out_what_is_not_smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of x is spoiled: only where x is named does the check see it."""
    _smooth(monkeypatch, columns_7=("weight",), columns_8=("x",))
    fault = dataclasses.replace(
        FAULTS["gradients_off_in_float64"],
        run=lambda healthy, *args: tuple(
            out * (1.01 if i == 0 and healthy.backward else 1) for i, out in enumerate(healthy(*args))
        ),
    )
    with planted(fault) as subject:
        cases = [Case("rms_norm", name, torch.float64, "cpu") for name in ("columns_7", "columns_8")]
        assert [execute(subject, CHECKS["gradcheck"], case).verdict for case in cases] == [PASSED, FAILED]


def test_every_check_says_what_it_asserts() -> None:
    for check in CHECKS.values():
        assert check.summary.endswith("."), check.name


# --- the plug-in ------------------------------------------------------------------------------------------------------

STUB = """
    from triptych.testing import BackendSuite, Subject

    class TestMine(BackendSuite):
        subject = Subject("composite", ops=("rms_norm",), exclusions={exclusions})

        def test_of_its_own(self):
            assert self.subject.backend == "composite"
"""


class Outcomes:
    """A pytest plug-in that keeps how the tests of a run ended, and what was said of it."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.texts: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.ended[report.outcome] += 1
            self.texts.append(report.longreprtext)


def run_stub(folder: Path, exclusions: dict[str, str], *options: str) -> tuple[int, Outcomes]:
    """Run pytest in this process over a stub with these exclusions."""
    file = folder / f"test_{folder.name}.py"  # a name that no other run in this process has
    file.write_text(textwrap.dedent(STUB).replace("{exclusions}", repr(exclusions)))
    seen = Outcomes()
    arguments = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull]
    code = pytest.main([*arguments, "--rootdir", str(folder), *options, str(file)], plugins=[seen])
    return int(code), seen


def test_a_stub_runs_the_suite(tmp_path: Path) -> None:
    code, seen = run_stub(tmp_path, {}, "-k", "wanted_gradients or of_its_own")
    assert (code, dict(seen.ended)) == (0, {"passed": 5})


def test_an_expired_exclusion_fails_the_stub(tmp_path: Path) -> None:
    code, seen = run_stub(tmp_path, {"wanted_gradients[*float64*]": "not yet"}, "-k", "wanted_gradients")
    assert (code, dict(seen.ended)) == (1, {"passed": 3, "failed": 1})
    assert any("Remove the exclusion" in text for text in seen.texts)


def test_an_exclusion_that_matches_nothing_stops_the_stub(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = run_stub(tmp_path, {"no_such_check": "not yet"})
    assert code not in (0, 1)
    assert not seen.ended
    assert "'no_such_check' matches no test" in "".join(capsys.readouterr())


def test_the_live_op_is_the_one_programs_call() -> None:
    assert CASE.live is dispatch.live()["rms_norm"]


def test_complaints_are_of_the_subject_itself_not_of_one_that_is_gone() -> None:
    wrong, right = Subject("composite", exclusions={"forward_valeus": "typing error"}), Subject("composite")
    assert len(plugin._complaints(wrong)) == 1
    assert plugin._complaints(right) == ()
    assert any(known is wrong for known, _ in plugin._seen)  # kept, so that no other subject gets its id


def test_the_checks_run_without_pytest() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "from triptych.testing import CHECKS, Subject, first_failure\n"
        "print(first_failure(Subject('composite'), 'refusals'), len(CHECKS) > 20)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "None True\n", done.stderr


def test_nothing_to_test_is_an_error_not_a_success() -> None:
    with pytest.raises(triptych.UsageError, match="has nothing to test here"):
        first_failure(
            Subject("composite", device_types=("cuda",) if not torch.cuda.is_available() else ("xpu",)), "refusals"
        )


def test_a_backend_without_a_place_in_auto_is_tested_everywhere() -> None:
    with registry.backends.added("hidden", Backend("hidden")):
        assert "cpu" in Subject("hidden").tested_device_types()
