"""Ops on DTensors: values, gradients and placements are those of the whole call, and nothing is gathered for them."""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Rank, Ranks
from spreading import (
    COLUMNS,
    GATHER,
    ROWS,
    SEQUENCE,
    WHOLE,
    compared,
    everything_ran_where_it_should,  # noqa: F401
    mesh_of,
    spread,
    tensor,
    whole,
)
from subjects import assert_close
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor

import triptych
from triptych import dispatch, registry
from triptych.layers import RMSNorm
from triptych.ops.add_rms_norm import add_rms_norm
from triptych.ops.analog_linear import analog_linear
from triptych.ops.rms_norm import rms_norm
from triptych.scope import process_policy

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import third_party_op


def norm(rank: Rank, backend: str, x: Placement, weight: Placement) -> Any:
    values = (tensor(4, 6, 32), tensor(32, number=1) + 1)
    with process_policy(backend):
        return compared(rank, lambda x, weight: rms_norm(x, weight, eps=1e-6), values, (x, weight))


@pytest.mark.feature("DTensor")
@pytest.mark.parametrize("x", [ROWS, SEQUENCE, WHOLE], ids=str)
def test_a_norm_runs_on_its_rows_and_gathers_nothing(two_ranks: Ranks, backend: str, x: Placement) -> None:
    before = two_ranks.counts.copy()
    for collectives, outputs, gradients in two_ranks(norm, backend, x, WHOLE):
        assert collectives == {}
        assert outputs == [str(x)]
        assert gradients == [str(x), "R" if x is WHOLE else "P(sum)"]
    assert {each for _, _, each in two_ranks.counts - before} == {backend}


def uneven_norm(rank: Rank, backend: str) -> Any:
    values = (tensor(3, 5, 32), tensor(3, 5, 32, number=2), tensor(32, number=1) + 1)
    with process_policy(backend):
        return compared(rank, lambda *args: add_rms_norm(*args, eps=1e-6), values, (SEQUENCE, SEQUENCE, WHOLE))


@pytest.mark.feature("DTensor")
def test_the_fused_addition_runs_on_uneven_rows(two_ranks: Ranks, backend: str) -> None:
    for collectives, outputs, gradients in two_ranks(uneven_norm, backend):
        assert (collectives, outputs, gradients) == ({}, ["S(1)"] * 2, ["S(1)", "S(1)", "P(sum)"])


def beside_torch(rank: Rank, x: Placement, weight: Placement) -> Any:
    """What our norm and torch's send for the same placements."""
    values = (tensor(4, 6, 32), tensor(32, number=1) + 1)
    with process_policy("torch"):
        ours = compared(rank, lambda x, weight: rms_norm(x, weight, eps=1e-6), values, (x, weight))
    torchs = compared(rank, lambda x, weight: torch.nn.functional.rms_norm(x, (32,), weight, 1e-6), values, (x, weight))
    return ours, torchs


@pytest.mark.feature("DTensor")
@pytest.mark.parametrize("x", [ROWS, SEQUENCE, WHOLE], ids=str)
def test_a_norm_sends_no_more_than_torchs(two_ranks: Ranks, x: Placement) -> None:
    for ours, torchs in two_ranks(beside_torch, x, WHOLE):
        assert ours == torchs


@pytest.mark.feature("DTensor")
@pytest.mark.parametrize("placed", [(COLUMNS, WHOLE), (COLUMNS, ROWS), (WHOLE, ROWS)], ids=str)
def test_a_norm_over_split_columns_gathers_them(two_ranks: Ranks, placed: tuple[Placement, Placement]) -> None:
    """Forward and backward gather each what is split: x, and the weight."""
    gathers = 2 * sum(each is not WHOLE for each in placed)
    for collectives, outputs, _ in two_ranks(norm, "torch", *placed):
        assert (collectives, outputs) == ({"all_gather_into_tensor": gathers}, ["R"])


def partial_sum(rank: Rank, backend: str) -> Any:
    """x as a sum that has not been taken: the norm of the sum, not the sum of norms."""
    mesh, x = mesh_of(rank), tensor(4, 32).to(rank.device)
    mine = (x * (0.25 if rank.number == 0 else 0.75)).requires_grad_()
    with process_policy(backend):
        y = rms_norm(DTensor.from_local(mine, mesh, [Partial()], run_check=False), None, eps=1e-6)
        assert_close(whole(y), rms_norm(x, None, eps=1e-6).cpu())
    return str(y.placements[0])


@pytest.mark.feature("DTensor")
def test_a_sum_is_taken_before_the_norm(two_ranks: Ranks, backend: str) -> None:
    assert two_ranks(partial_sum, backend) == ["R", "R"]


# --- refusals, and other ways in --------------------------------------------------------------------------------------


def refused(rank: Rank, kind: str) -> str:
    mesh = mesh_of(rank)

    def of(value: Tensor, placement: Placement = WHOLE) -> Any:
        return spread(value, mesh, placement, rank.device)

    with process_policy("torch"), pytest.raises(triptych.ArgumentError) as raised:
        if kind == "plain":
            rms_norm(of(tensor(4, 32)), tensor(32).to(rank.device), eps=1e-6)
        elif kind == "cut":
            x, weight = of(tensor(4, 56), COLUMNS), of(tensor(8, 56), COLUMNS)
            ranges = of(torch.ones(7))
            analog_linear(x, weight, input_range=ranges, tiles=7, input_range_mode="learned")
        elif kind == "maxima":
            x, weight, wmax = of(tensor(4, 32)), of(tensor(8, 32), ROWS), of(tensor(1, 8), Shard(1))
            seed = torch.zeros(1, dtype=torch.int64, device=rank.device)
            both: dict[str, Any] = {"out_noise": 0.1, "out_bound": 1.0, "out_bound_per_channel": True}
            analog_linear(x, weight, wmax=wmax, seed=seed, input_range_mode="dynamic", **both)
        else:
            other = init_device_mesh(mesh.device_type, (1, rank.world))
            weight = distribute_tensor(tensor(32).to(rank.device), other, [WHOLE, WHOLE], src_data_rank=None)
            rms_norm(of(tensor(4, 32)), weight, eps=1e-6)
    return str(raised.value)


REFUSALS = {
    "plain": "rms_norm: weight is a plain tensor and x is a DTensor. All tensors of a call must be DTensors",
    "cut": (
        "analog_linear: weight is sharded along its 56 inputs over 2 ranks, 28 + 28, and the inputs are split into 7 "
        "tiles of 8. A tile is one crossbar and cannot be split: choose mapping.max_input_size 7, so that every rank "
        "has whole tiles, or shard the outputs instead (ColwiseParallel, Shard(0))."
    ),
    "maxima": (
        "out_noise and out_bound are relative to different maxima: out_noise_per_channel is False, "
        "out_bound_per_channel is True"
    ),
    "meshes": "All tensors of a call must be spread over one mesh",
}


@pytest.mark.feature("DTensor")
@pytest.mark.parametrize("kind", REFUSALS)
def test_what_cannot_be_right_is_refused(two_ranks: Ranks, kind: str) -> None:
    for text in two_ranks(refused, kind):
        assert REFUSALS[kind] in text


def called_directly(rank: Rank, backend: str) -> None:
    """The operators themselves, as an exported graph calls them, with keywords too."""
    mesh = mesh_of(rank)
    x, weight = tensor(4, 6, 32).to(rank.device), tensor(32, number=1).to(rank.device)
    part, whole_weight = spread(x, mesh, ROWS, rank.device), spread(weight, mesh, WHOLE, rank.device)
    with process_policy(backend):
        y, rstd = torch.ops.triptych.rms_norm(part, whole_weight, 1e-6, 0.0, "after_weight", layer="")
        expected = torch.ops.triptych.rms_norm(x, weight, 1e-6, 0.0, "after_weight", "")
    assert (y.placements, rstd.placements) == ((ROWS,), (ROWS,))
    assert_close(whole(y), whole(expected[0]))
    assert_close(whole(rstd), whole(expected[1]))


@pytest.mark.feature("DTensor")
def test_operators_called_directly(two_ranks: Ranks, backend: str) -> None:
    before = two_ranks.counts.copy()
    two_ranks(called_directly, backend)
    assert {each for _, _, each in two_ranks.counts - before} == {backend}


def exported(rank: Rank) -> None:
    """A program that was exported from plain tensors runs on DTensors, and trains."""
    mesh = mesh_of(rank)
    x, weight = tensor(4, 6, 32).to(rank.device), tensor(32, number=1).to(rank.device)

    class Norm(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return rms_norm(x, weight, eps=1e-6)

    program = torch.export.export(Norm(), (x, weight)).module()
    with process_policy("torch"):
        collectives, outputs, gradients = compared(rank, program, (x, weight), (SEQUENCE, WHOLE))
    assert (collectives, outputs, gradients) == ({}, ["S(1)"], ["S(1)", "P(sum)"])
    assert mesh.size() == rank.world


@pytest.mark.feature("DTensor")
def test_an_exported_program_takes_dtensors(two_ranks: Ranks) -> None:
    before = two_ranks.counts.copy()
    two_ranks(exported)
    assert {("rms_norm", "backward", "torch"), ("rms_norm", "forward", "torch")} == set(two_ranks.counts - before)


def only_the_sum(rank: Rank, backend: str) -> Any:
    """Only h of the fused addition takes part in the loss: the gradient of y is missing."""
    values = (tensor(4, 6, 32), tensor(4, 6, 32, number=2), tensor(32, number=1) + 1)
    with process_policy(backend):
        return compared(rank, lambda *args: add_rms_norm(*args, eps=1e-6)[1], values, (SEQUENCE, SEQUENCE, WHOLE))


@pytest.mark.feature("DTensor")
def test_a_missing_gradient_is_zero(two_ranks: Ranks, backend: str) -> None:
    for collectives, outputs, _ in two_ranks(only_the_sum, backend):
        assert (collectives, outputs) == ({}, ["S(1)"])


def several_dimensions(rank: Rank, backend: str) -> Any:
    """A layer that normalises two dimensions together: it flattens its input."""
    layer = RMSNorm((4, 8), eps=1e-6, elementwise_affine=False)
    with process_policy(backend):
        return compared(rank, layer, (tensor(4, 6, 4, 8),), (SEQUENCE,))


@pytest.mark.feature("DTensor")
def test_a_norm_of_several_dimensions(two_ranks: Ranks, backend: str) -> None:
    for collectives, outputs, gradients in two_ranks(several_dimensions, backend):
        assert (collectives, outputs, gradients) == ({}, ["S(1)"], ["S(1)"])


def without_a_rule(rank: Rank) -> tuple[Any, list[str]]:
    """An op of another package that says nothing of sharding."""
    spec = dataclasses.replace(third_party_op.SPEC, name="unruly", sharding=None)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("triptych.sharding").addHandler(handler)
    with registry.ops.added("unruly", spec), process_policy("composite"):
        call = dispatch.define(spec).call
        found = [compared(rank, lambda x: call("", x, 3.0), (tensor(4, 6),), (ROWS,)) for _ in range(2)]
    return found, said


@pytest.mark.feature("DTensor")
def test_an_op_without_a_rule_runs_whole_and_says_so_once(two_ranks: Ranks) -> None:
    for found, said in two_ranks(without_a_rule):
        for collectives, outputs, _ in found:
            assert (collectives, outputs) == ({GATHER: 2}, ["R"])  # x, in forward and in backward
        assert len(said) == 1
        assert said[0].startswith("unruly has no sharding rule: its operands are gathered")
