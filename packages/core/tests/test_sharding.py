"""Sharding rules: patterns, tiles, where a call is split, seeds; and that the suite finds a rule that is wrong."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from triptych import dispatch, registry
from triptych.errors import ArgumentError, PluginError
from triptych.sharding import seeds
from triptych.sharding.placing import ELSEWHERE, PARTIAL, Operand, Where, choose
from triptych.sharding.rule import Axes, Part, Sharding, parsed
from triptych.sharding.tiles import chunks, whole_tiles
from triptych.testing import CHECKS, Case, Subject, execute
from triptych.testing.execution import FAILED, PASSED, SKIPPED

# --- patterns ---------------------------------------------------------------------------------------------------------


def test_a_pattern_names_axes() -> None:
    pattern = parsed("... n, n, 1 -> ... n, t (...) c, n +...")
    assert pattern.tensors == (Axes(("...", "n")), Axes(("n",)), Axes(("1",)))
    assert pattern.outputs == (Axes(("...", "n")), Axes(("t", "(...)", "c")), Axes(("n",), ("...",)))
    assert pattern.tensors[0].named(3) == ("...0", "...1", "n")
    assert pattern.tensors[0].named(1) == ("n",)


@pytest.mark.parametrize("text", ["... n", "a -> b -> c", "n -> N", "n n -> n", " -> n", "n -> +"])
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(ValueError, match=r"needs one ->|names no axes"):
        parsed(text)


@pytest.mark.parametrize(
    ("sharding", "text"),
    [
        (Sharding("... n -> ... n", "... n -> ... n"), "its forward takes 2 tensors and returns 2, and the sharding"),
        (Sharding("... n, N -> ... n, ...", ""), "'N' names no axes"),
        (Sharding("... n, n -> ... n, ...", "... n, ... n, n, ... -> ... n, n", decides=("z",)), "speaks of z"),
    ],
)
def test_a_spec_with_a_wrong_rule_is_refused(sharding: Sharding, text: str) -> None:
    with pytest.raises(PluginError, match=text):
        dataclasses.replace(registry.ops.get("rms_norm"), sharding=sharding)


def test_every_op_has_a_rule() -> None:
    assert [name for name in registry.ops.names() if registry.ops.get(name).sharding is None] == []


# --- tiles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "parts"), [(8, 2), (7, 2), (7, 3), (1, 2), (0, 2), (5, 4)])
def test_parts_are_those_of_torch(size: int, parts: int) -> None:
    found = [tuple(range(start, start + count)) for start, count in chunks(size, parts) if count]
    assert found == [tuple(each.tolist()) for each in torch.arange(size).chunk(parts) if each.numel()]


@pytest.mark.parametrize(
    ("n", "tiles", "counts", "found"),
    [
        (64, 4, (2,), {(0,): 2, (1,): 2}),
        (64, 4, (2, 2), {(0, 0): 1, (0, 1): 1, (1, 0): 1, (1, 1): 1}),
        (48, 3, (2,), None),  # the second of three tiles lies on both
        (257, 3, (3,), {(0,): 1, (1,): 1, (2,): 1}),  # 86, 86, 85
        (10, 4, (2,), None),  # 3, 3, 2, 2 and 5, 5
        (64, 1, (2,), None),
        (64, 4, (8,), None),
        (64, 4, (), {(): 4}),
    ],
)
def test_whole_tiles(n: int, tiles: int, counts: tuple[int, ...], found: dict[tuple[int, ...], int] | None) -> None:
    assert whole_tiles(n, tiles, counts) == found


# --- where a call is split --------------------------------------------------------------------------------------------


def linear(
    x: tuple[Where, ...], weight: tuple[Where, ...], rows: int = 64, n: int = 32, channels: int = 16
) -> tuple[Operand, ...]:
    pattern = parsed("... n, c n -> ... c +n")
    return (
        Operand("x", pattern.tensors[0], (4, rows, n), 4 * 4 * rows * n, x),
        Operand("weight", pattern.tensors[1], (channels, n), 4 * channels * n, weight),
    )


LINEAR = Sharding(
    "... n, c n -> ... c +n", splits=("...", "c", "n"), decides=("x", "weight"), tiles="tiles", weights=("weight",)
)


@pytest.mark.parametrize(
    ("x", "weight", "axis"),
    [
        (None, None, ""),
        (0, None, "...0"),
        (1, None, "...1"),
        (None, 0, "c"),
        (2, 1, "n"),
        (2, None, "n"),  # a replica becomes a shard for nothing
        (PARTIAL, None, ""),
        (PARTIAL, 0, "c"),  # the sum is taken either way
        (ELSEWHERE, 0, "c"),
        (1, 0, "...1"),  # the weight is smaller
        (1, 1, "...1"),
        (2, 0, "n"),  # the weight moves from shard to shard
    ],
)
def test_the_fewest_bytes_move(x: Where, weight: Where, axis: str) -> None:
    assert choose("linear", LINEAR, linear((x,), (weight,)), (2,), 2) == (axis,)


def test_each_dimension_of_a_mesh_splits_its_own_axis() -> None:
    assert choose("linear", LINEAR, linear((0, None), (None, 0)), (2, 2), 2) == ("...0", "c")
    assert choose("linear", LINEAR, linear((0, 2), (None, 1)), (2, 2), 2) == ("...0", "n")


def test_an_input_whose_tiles_are_cut_is_gathered_and_a_weight_is_refused() -> None:
    assert choose("linear", LINEAR, linear((2,), (None,), n=48), (2,), 3) == ("",)
    with pytest.raises(ArgumentError, match="linear: weight is sharded along its 48 inputs over 2 ranks, 24 \\+ 24"):
        choose("linear", LINEAR, linear((2,), (1,), n=48), (2,), 3)
    assert choose("linear", LINEAR, linear((2,), (1,), n=48), (2,), 0) == ("n",)  # a plain product


def test_the_refusal_says_what_would_fit() -> None:
    for n, tiles, text in ((48, 3, "max_input_size 12, so that"), (60, 1, "max_input_size 30, so that")):
        with pytest.raises(ArgumentError, match=text):
            choose("linear", LINEAR, linear((2,), (1,), n=n), (2,), tiles)
    with pytest.raises(ArgumentError, match="cannot be split: shard the outputs instead"):
        choose("linear", LINEAR, linear((2,), (1,), n=9), (2,), 3)


def test_parts_are_numbered_by_what_they_hold() -> None:
    axes, counts = ("...0", "", "c"), (2, 3, 4)
    part = Part(axes, (1, 2, 3), counts, {})
    assert (part.place(), part.place("c"), part.place("..."), part.place("n")) == (7, 3, 1, 0)
    assert part.place() == Part(axes, (1, 0, 3), counts, {}).place()  # a replica


def test_seeds_of_parts() -> None:
    seed = torch.tensor([2**62 + 5])
    found = [int(seeds.of_part(seed, place)) for place in range(1000)]
    assert found[0] == int(seed)
    assert len(set(found)) == 1000
    bits = [bin((one ^ other) % 2**64).count("1") for one, other in itertools.pairwise(found)]
    assert min(bits) >= 8  # neighbours differ in many bits


# --- the import that is watched for -------------------------------------------------------------------------------------

PROGRAM = """
import sys
import triptych
from triptych.ops.rms_norm import rms_norm
assert "torch.distributed.tensor" not in sys.modules
watching = [type(each).__name__ for each in sys.meta_path]
import torch, torch.distributed as dist
import torch.distributed.tensor as tensor
assert "_Watch" in watching and "_Watch" not in [type(each).__name__ for each in sys.meta_path]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
x = tensor.distribute_tensor(torch.ones(4, 8), mesh, [tensor.Shard(0)])
with triptych.use("composite"):
    y = torch.ops.triptych.rms_norm(x, None, 0.0, 0.0, "after_weight", "")[0]
assert isinstance(y, tensor.DTensor) and y.placements == (tensor.Shard(0),)
assert torch.equal(y.full_tensor(), torch.ones(4, 8))
print("right")
"""


def test_dtensors_cost_nothing_until_they_are_there() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout == "right\n", run.stderr


# --- the suite finds a wrong rule -------------------------------------------------------------------------------------


@contextmanager
def with_rule(op: str, sharding: Sharding | None) -> Iterator[None]:
    """The op with another sharding rule."""
    live = dispatch.define(registry.ops.get(op))
    changed = dataclasses.replace(live.spec, sharding=sharding)
    find = registry.ops.get
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "spec", changed)
        patch.setattr(registry.ops, "get", lambda name: changed if name == op else find(name))
        yield


WRONG: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dw_is_no_sum": ("rms_norm", "columns_33", {"backward": "... n, ... n, n, ... -> ... n, n"}),
    "columns_are_split": ("rms_norm", "columns_33", {"splits": ("...", "n")}),
    "rows_of_a_deviation": ("tile_std", "tiles_of_one_column", {"splits": ("...", "n")}),
    "y_is_no_sum": ("analog_linear", "plain", {"forward": "... n, c n, c, t, t c, 1 -> ... c, t (...) c"}),
    "bias_more_than_once": ("analog_linear", "plain", {"local_forward": None}),
    "decay_of_each_part": ("analog_linear", "learned_decay", {"local_backward": None}),
    "largest_of_the_part": ("analog_weight", "per_tensor_254", {"local_forward": None}),
    "scale_of_the_part": ("analog_weight", "clip", {"local_backward": None}),
    "extremes_of_the_part": ("input_range_update", "extremes_calibrating", {"local_forward": None}),
}


@pytest.mark.parametrize("fault", WRONG)
def test_the_suite_finds_a_wrong_rule(fault: str) -> None:
    op, sample, changes = WRONG[fault]
    case, check = Case(op, sample, torch.float32, "cpu"), CHECKS["sharding_rule"]
    right = execute(Subject("composite"), check, case)
    assert right.verdict == PASSED, right.text
    rule = registry.ops.get(op).sharding
    assert rule is not None
    with with_rule(op, dataclasses.replace(rule, **changes)):
        wrong = execute(Subject("composite"), check, case)
    assert wrong.verdict == FAILED, wrong.text
    assert ", split along " in wrong.text


def test_an_op_without_a_rule_is_skipped() -> None:
    case = Case("rms_norm", "columns_33", torch.float32, "cpu")
    with with_rule("rms_norm", None):
        outcome = execute(Subject("composite"), CHECKS["sharding_rule"], case)
    assert (outcome.verdict, outcome.text) == (SKIPPED, "rms_norm has no sharding rule")
