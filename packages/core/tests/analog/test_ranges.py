"""Calibrating together: statistics of several processes are those of all their elements; what would be lost is refused.

What needs real processes stands in tests/features.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from analog_configs import CONVERTERS, RANGE, TILES, config

import triptych
from triptych.analog import AnalogLinear, calibrate_input_ranges, ranges, synchronise_ranges
from triptych.errors import ArgumentError, UsageError


@pytest.fixture(autouse=True)
def on_composite() -> Iterator[None]:
    torch.manual_seed(0)
    with triptych.use("composite"):
        yield


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layer(**more: object) -> AnalogLinear:
    return AnalogLinear(13, 7, rpu_config=config(CONVERTERS, RANGE, TILES, more))


def padded(parts: list[torch.Tensor]) -> torch.Tensor:
    """[P, tiles, 7]: statistics, with a range and a count."""
    return torch.cat((torch.stack(parts), torch.ones(len(parts), parts[0].shape[0], 2, dtype=torch.float64)), dim=-1)


@pytest.mark.parametrize("sizes", [(4, 4), (1, 9), (0, 3), (2, 0, 5, 1), (1, 1)])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_parts_are_merged_to_what_all_elements_have(sizes: tuple[int, ...], offset: float) -> None:
    made = layer()
    x = torch.randn(sum(sizes), 13, dtype=torch.float64) * torch.arange(1, 14) + offset
    parts = [ranges._statistics(made, part) for part in x.split(list(sizes))]
    found = ranges._merged(padded(parts))
    for tile, part in enumerate(x.split(made.in_sizes, dim=1)):
        n, mean, squares, low, high = found[tile, :5].tolist()
        assert n == part.numel() and (low, high) == (part.min(), part.max())
        # A few roundings of sums of up to 60 elements, relative to their magnitudes.
        assert mean == pytest.approx(float(part.mean()), rel=1e-13)
        expected = float((part - part.mean()).square().sum())
        assert squares == pytest.approx(expected, rel=1e-10, abs=1e-13 * float(part.square().sum()))
    pair = ranges._pair(found)
    assert pair.std(dim=0).tolist() == pytest.approx([float(part.std()) for part in x.split(made.in_sizes, dim=1)])


@pytest.mark.parametrize("value", [0.1, 1.25, 3e8])
def test_a_tile_without_information_anywhere_has_a_deviation_of_exactly_0(value: float) -> None:
    made = layer()
    parts = [ranges._statistics(made, torch.full((rows, 13), value)) for rows in (3, 7, 1)]
    assert not ranges._pair(ranges._merged(padded(parts))).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_element_of_one_process_makes_the_tile_not_count(bad: float) -> None:
    made = layer()
    x = torch.randn(4, 13)
    x[1, 0] = bad
    found = ranges._merged(padded([ranges._statistics(made, torch.randn(4, 13)), ranges._statistics(made, x)]))
    assert not ranges._pair(found).isfinite().all(0)[0] and ranges._pair(found).isfinite().all(0)[1:].all()


@pytest.mark.usefixtures("one_process")
def test_what_deepspeed_would_undo_is_refused() -> None:
    made = layer()
    made.input_range.ds_id = 3  # type: ignore[union-attr]
    with pytest.raises(UsageError) as error:
        made(torch.randn(4, 13))
    assert str(error.value) == (
        "AnalogLinear: it is to calibrate its input range in the first 2 batches of training, but DeepSpeed keeps the "
        "Parameter elsewhere, and what a forward writes into it is lost. Call "
        "triptych.analog.calibrate_input_ranges(model, ...) before deepspeed.initialize, or set "
        "pre_post.input_range.init_from_data to 0."
    )
    with pytest.raises(ArgumentError, match=r"Calibrate before deepspeed\.initialize"):
        calibrate_input_ranges(made, "Max", [torch.randn(4, 13)])
    made.eval()(torch.randn(4, 13))
    made.train().input_range_update_idx.fill_(2)  # type: ignore[union-attr]
    made(torch.randn(4, 13))


@pytest.mark.usefixtures("one_process")
def test_a_group_of_one_calibrates_as_ever() -> None:
    told, alone = layer(), layer()
    synchronise_ranges(told)
    copies = [told, copy.deepcopy(told)]
    x = torch.randn(4, 13)
    alone(x)
    for each in copies:
        each(x)
        assert torch.equal(each.input_range, alone.input_range)  # type: ignore[arg-type]


def test_there_must_be_a_group() -> None:
    with pytest.raises(UsageError, match=r"synchronise_ranges: there is no process group\. Call"):
        synchronise_ranges(layer())


@pytest.mark.usefixtures("one_process")
def test_a_layer_that_was_read_from_a_file_must_be_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told = layer()
    synchronise_ranges(told)
    read: Any = pickle.loads(pickle.dumps(told))
    monkeypatch.setattr(ranges, "_groups", [])  # as in another process
    with pytest.raises(UsageError, match=r"was read from a file\. Call triptych\.analog\.synchronise_ranges"):
        read(torch.randn(4, 13))
    synchronise_ranges(read)
    read(torch.randn(4, 13))
