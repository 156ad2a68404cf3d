"""The analog ops on DTensors: tiles stay whole, maxima are those of all channels, parts draw noise of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Rank, Ranks
from spreading import (
    COLUMNS,
    GATHER,
    REDUCE,
    ROWS,
    SEQUENCE,
    WHOLE,
    compared,
    everything_ran_where_it_should,  # noqa: F401
    mesh_of,
    spread,
    tensor,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Shard

import triptych
from triptych.ops.analog_linear import analog_linear
from triptych.ops.analog_weight import analog_weight
from triptych.ops.input_range_update import input_range_update
from triptych.ops.tile_abs_max import tile_abs_max
from triptych.ops.tile_std import tile_std
from triptych.scope import process_policy

LEARNED = {"tiles": 2, "input_range_mode": "learned", "inp_res": 254.0, "decay": 0.01, "input_min_percentage": 0.5}
ADC = {**LEARNED, "out_bound": 0.2, "out_res": 62.0}
LINEAR: dict[str, dict[str, Any]] = {
    "plain": {"tiles": 2},
    "learned": LEARNED,
    "learned_far": {**LEARNED, "input_min_percentage": 0.99},
    "fast": {**LEARNED, "input_range_mode": "fast"},
    "dynamic": {**ADC, "input_range_mode": "dynamic"},
    "adc": ADC,
    "adc_per_channel": {**ADC, "out_bound_per_channel": True},
}
PLACED = {
    "rows": (ROWS, WHOLE, WHOLE, WHOLE, WHOLE),
    "sequence": (SEQUENCE, WHOLE, WHOLE, WHOLE, WHOLE),
    "columns": (WHOLE, ROWS, ROWS, WHOLE, Shard(1)),
    "inputs": (COLUMNS, Shard(1), WHOLE, ROWS, ROWS),
}
ON_A_MESH = {
    "rows and columns": ((ROWS, WHOLE), (WHOLE, ROWS), (WHOLE, ROWS), (WHOLE, WHOLE), (WHOLE, Shard(1))),
    "rows and inputs": ((ROWS, COLUMNS), (WHOLE, Shard(1)), (WHOLE, WHOLE), (WHOLE, ROWS), (WHOLE, ROWS)),
    "rows twice": ((ROWS, ROWS), *[(WHOLE, WHOLE)] * 4),
    "columns and inputs": ((WHOLE, COLUMNS), (ROWS, Shard(1)), (ROWS, WHOLE), (WHOLE, ROWS), (Shard(1), ROWS)),
}


def sent(settings: str, placed: str) -> dict[str, int]:
    """What the analog product must exchange beyond what a digital one does, by how it is split.

    Rows: the decay of a learned range counts all rows, [T]. Channels: the gradient of a learned range needs that of the
    inputs, whose sum the next layer down would ask for; an ADC relative to the largest weight asks for [T] maxima.
    """
    learned = LINEAR[settings].get("input_range_mode") == "learned"
    if placed == "inputs" or settings == "plain":
        return {}
    found = {REDUCE: 1} if learned else {}
    maxima = placed == "columns" and "out_bound" in LINEAR[settings] and settings != "adc_per_channel"
    return found | ({GATHER: 1} if maxima else {})


def linear(rank: Rank, backend: str, settings: str, placed: str, channels: int = 24) -> Any:
    mesh = (
        None if placed in PLACED else init_device_mesh("cpu" if rank.device == "cpu" else "cuda", (2, rank.world // 2))
    )
    scalars, mode = LINEAR[settings], LINEAR[settings].get("input_range_mode", "none")
    weight = tensor(channels, 32, number=1)
    # A multiple of a power of two: their sums are exact, so that no tie of a quantiser breaks in another way.
    values = [
        (tensor(4, 6, 32) * 16).round() / 16,
        (weight * 16).round() / 16,
        tensor(channels, number=2),
        torch.tensor([1.5, 1.0]) if mode in ("learned", "fast") else None,
        torch.stack([weight[:, :16].abs().amax(1), weight[:, 16:].abs().amax(1)]) if "out_bound" in scalars else None,
    ]

    def run(x: Any, weight: Any, bias: Any, input_range: Any, wmax: Any) -> Any:
        wmax = None if wmax is None else wmax.detach()
        return analog_linear(x, weight, bias, input_range=input_range, wmax=wmax, **scalars)

    with process_policy(backend):
        return compared(rank, run, tuple(values), (PLACED | ON_A_MESH)[placed], mesh)


RESULT = {"rows": "S(0)", "sequence": "S(1)", "columns": "S(2)", "inputs": "P(sum)"}


@pytest.mark.feature("DTensor")
@pytest.mark.parametrize("settings", LINEAR)
@pytest.mark.parametrize("placed", PLACED)
def test_the_analog_product_runs_where_its_operands_are(two_ranks: Ranks, settings: str, placed: str) -> None:
    for collectives, outputs, gradients in two_ranks(linear, "torch", settings, placed):
        assert (collectives, outputs) == (sent(settings, placed), [RESULT[placed]])
        assert gradients[1] == {"columns": "S(0)", "inputs": "S(1)"}.get(placed, "P(sum)")


@pytest.mark.feature("DTensor")
@pytest.mark.parametrize("placed", PLACED)
def test_the_analog_product_on_every_backend(two_ranks: Ranks, backend: str, placed: str) -> None:
    before = two_ranks.counts.copy()
    two_ranks(linear, backend, "adc", placed)
    ran = two_ranks.counts - before
    assert {op for op, _, _ in ran} == {"analog_linear"}
    assert {each for _, _, each in ran} == {backend}


@pytest.mark.feature("DTensor")
def test_channels_that_fill_no_bytes(two_ranks: Ranks) -> None:
    """13 channels are 7 and 6: the packed bits of clipped outputs are those of each part."""
    for _, outputs, _ in two_ranks(linear, "torch", "adc", "columns", channels=13):
        assert outputs == ["S(2)"]


@pytest.mark.feature("DTensor")
@pytest.mark.parametrize("placed", ON_A_MESH)
def test_the_analog_product_on_a_mesh_of_two_dimensions(four_ranks: Ranks, placed: str) -> None:
    before = four_ranks.counts.copy()
    result = {
        "rows and columns": "S(0) S(2)",
        "rows and inputs": "S(0) P(sum)",
        "rows twice": "S(0) S(0)",
        "columns and inputs": "S(2) P(sum)",
    }
    for settings in ("plain", "adc"):
        for collectives, outputs, _ in four_ranks(linear, "torch", settings, placed):
            assert outputs == [result[placed]]
            assert not collectives or settings == "adc"
    assert {each for _, _, each in four_ranks.counts - before} == {"torch"}


GRAINS = ("none", "per_tensor", "per_channel")


def weights(rank: Rank, backend: str, placed: Placement) -> Any:
    """Every quantisation, with a learned clip and without; what each sends."""
    weight, clip = tensor(24, 32), tensor(2, 24, number=1).abs() + 0.5
    found = []
    with process_policy(backend):
        for quantization in GRAINS:
            for given in (None, clip):
                if given is not None and quantization == "per_tensor":
                    continue
                of_clip = Shard(1) if placed == ROWS else placed if placed == WHOLE else Shard(0)
                scalars: dict[str, Any] = {"tiles": 2, "quantization": quantization, "res": 30.0}

                def run(weight: Any, clip: Any, scalars: Any = scalars) -> Any:
                    return analog_weight(weight, clip, **scalars)

                found.append(compared(rank, run, (weight, given), (placed, of_clip)))
    return found


@pytest.mark.feature("DTensor")
@pytest.mark.parametrize("placed", [ROWS, COLUMNS, WHOLE], ids=str)
def test_the_weights_of_parts_are_parts_of_the_weights(two_ranks: Ranks, backend: str, placed: Placement) -> None:
    for found in two_ranks(weights, backend, placed):
        sizes = [sum(collectives.values()) for collectives, _, _ in found]
        assert sizes == [0, 0, 1 if placed == ROWS else 0, 0, 0]  # per_tensor: the largest of all channels
        assert {outputs[0] for _, outputs, _ in found} == {{ROWS: "S(0)", COLUMNS: "S(1)"}.get(placed, "R")}


def statistics(rank: Rank, backend: str, placed: Placement) -> Any:
    x = tensor(4, 6, 32)
    of_tiles = ROWS if placed == COLUMNS else WHOLE
    ranges, count = torch.tensor([1.5, 2.0]), torch.tensor([0, 3])
    lowest, highest = torch.tensor([-1.0, -2.0]), torch.tensor([0.5, 4.0])

    def deviation(x: Any, *state: Any) -> Any:
        return input_range_update(x, *state, tiles=2)[:2]

    def extremes(x: Any, *state: Any) -> Any:
        return input_range_update(x, *state, tiles=2, mode="extremes")

    with process_policy(backend), torch.no_grad():
        return [
            compared(rank, lambda x: tile_abs_max(x, tiles=2), (x,), (placed,)),
            compared(rank, lambda x: tile_std(x, tiles=2), (x,), (placed,)),
            compared(rank, deviation, (x, ranges, count), (placed, of_tiles, of_tiles)),
            compared(rank, extremes, (x, ranges, count, lowest, highest), (placed, *[of_tiles] * 4)),
        ]


@pytest.mark.feature("DTensor")
@pytest.mark.parametrize("placed", [ROWS, SEQUENCE, COLUMNS, WHOLE], ids=str)
def test_statistics_of_parts_are_those_of_the_whole(two_ranks: Ranks, backend: str, placed: Placement) -> None:
    split_rows = placed in (ROWS, SEQUENCE)
    for found in two_ranks(statistics, backend, placed):
        sent = [sum(collectives.values()) for collectives, _, _ in found]
        assert sent == [0, *[1 if split_rows else 0] * 3]
        assert found[0][1] == [{ROWS: "S(1)", SEQUENCE: "S(2)", COLUMNS: "S(0)"}.get(placed, "R")]
        assert {each for _, outputs, _ in found[1:] for each in outputs} == {"S(0)" if placed == COLUMNS else "R"}


# --- noise ------------------------------------------------------------------------------------------------------------


def noisy(rank: Rank, backend: str, placed: str) -> dict[str, Any]:
    """The noise alone that weights and outputs get on this rank."""
    mesh = mesh_of(rank)
    seed = torch.randint(2**62, (1,), device=rank.device)  # the same on all ranks
    of_x, of_weight, _, of_range, of_wmax = PLACED[placed]
    x, weight = spread(torch.zeros(8, 512, 64), mesh, of_x, rank.device), torch.full((64, 64), 0.5)
    weight = spread(weight, mesh, of_weight, rank.device)
    ranges = spread(torch.ones(2), mesh, of_range, rank.device)
    wmax = spread(torch.full((2, 64), 0.5), mesh, of_wmax, rank.device)
    settings: dict[str, Any] = {"tiles": 2, "input_range_mode": "learned", "out_noise": 0.1}
    with process_policy(backend), torch.no_grad():
        modified, _ = analog_weight(weight, None, seed, tiles=2, noise="per_tensor", std_dev=0.1)
        again, _ = analog_weight(weight, None, seed, tiles=2, noise="per_tensor", std_dev=0.1)
        y = analog_linear(x, weight, input_range=ranges, wmax=wmax.detach(), seed=seed, **settings)
    assert torch.equal(modified.to_local(), again.to_local())
    return {"weight": (modified - weight.detach()).to_local().cpu().numpy(), "y": y.to_local().cpu().numpy()}


@pytest.mark.feature("DTensor")
@pytest.mark.parametrize("placed", PLACED)
def test_parts_draw_noise_of_their_own_and_replicas_the_same(two_ranks: Ranks, placed: str) -> None:
    first, second = two_ranks(noisy, "torch", placed)
    split = {"rows": ("y",), "sequence": ("y",)}.get(placed, ("weight", "y"))
    for name, deviation in (("weight", 0.05), ("y", 0.05 / 2**0.5 if placed == "inputs" else 0.05)):
        one, other = (torch.from_numpy(each[name]).flatten().double() for each in (first, second))
        count = one.numel()
        if name in split:
            # Of independent samples the correlation is normal, with a deviation of 1 / sqrt(count): five of them.
            correlation = torch.corrcoef(torch.stack([one, other]))[0, 1].abs()
            assert bool(correlation < 5 / count**0.5), f"{name}: {correlation}"
        else:
            assert torch.equal(one, other)
        # The standard error of a deviation of n numbers is that times 1 / sqrt(2 n).
        for each in (one, other):
            assert bool((each.std() / deviation - 1).abs() < 5 / (2 * count) ** 0.5), f"{name}: {each.std()}"


def different_seeds(rank: Rank) -> str:
    mesh = mesh_of(rank)
    weight = spread(tensor(24, 32), mesh, ROWS, rank.device).detach()
    seed = torch.full((1,), rank.number, dtype=torch.int64, device=rank.device)
    with process_policy("torch"), pytest.raises(triptych.ArgumentError) as raised:
        analog_weight(weight, None, seed, noise="per_channel", std_dev=0.1)
    return str(raised.value)


@pytest.mark.feature("DTensor")
def test_ranks_that_draw_different_seeds_are_told(two_ranks: Ranks) -> None:
    for text in two_ranks(different_seeds):
        assert "have drawn different seeds, [0, 1]" in text
        assert "Call torch.manual_seed with one value on all ranks" in text
