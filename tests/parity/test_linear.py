"""AnalogLinear against the reference: outputs, all gradients, calibrated ranges and counters, over the grid."""

from __future__ import annotations

from collections.abc import Iterator

import grid
import pytest
import torch
from comparing import Worst
from grid import Case
from peer import twins
from running import backends_that_ran, ran, train

import triptych
from triptych.analog import AnalogLinear

pytestmark = pytest.mark.parity
CASES = grid.cases()
STEPS = grid.CALIBRATION + 2


@pytest.fixture(scope="module")
def worst() -> Iterator[dict[str, Worst]]:
    """The largest deviations of each backend, printed at the end (`pytest -s`)."""
    table: dict[str, Worst] = {}
    yield table
    for backend, found in table.items():
        print(f"\n{backend}: {found.compared} numbers compared")
        for name, share in sorted(found.shares.items()):
            print(
                f"  {name:24} apart by at most {found.deviations[name]:.2g}, {100 * share:.1f} % of what is tolerated"
            )


def run(case: Case, backend: str, worst: dict[str, Worst]) -> None:
    arguments = {"in_features": case.inputs, "out_features": grid.OUTPUTS, "bias": case["bias"]}
    theirs, ours = twins(AnalogLinear, arguments, case.config, seed=case.number)
    before = triptych.report()

    def draw(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(case.shape, generator=generator)

    with triptych.use(backend):
        train(theirs, ours, draw, case.number, STEPS, worst.setdefault(backend, Worst()))
    assert backends_that_ran(before) == {backend}
    assert ran(before, "analog_linear", "forward", backend)
    assert ran(before, "analog_linear", "backward", backend)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch(case: Case, worst: dict[str, Worst]) -> None:
    run(case, "torch", worst)


@pytest.mark.parametrize("case", CASES[::8], ids=str)
def test_cuda(case: Case, worst: dict[str, Worst]) -> None:
    """Its C++ kernels for the CPU."""
    run(case, "cuda", worst)


@pytest.mark.parametrize("case", CASES[4::16], ids=str)
def test_triton(case: Case, worst: dict[str, Worst]) -> None:
    """In Triton's interpreter."""
    run(case, "triton", worst)


def test_every_pair_of_settings_is_compared() -> None:
    assert len(CASES) == grid.COUNT
    have = set()
    for case in CASES:
        values = dict(zip(grid.FACTORS, case.values, strict=True))
        have |= {(a, b) for a in values.items() for b in values.items()}
    assert set(grid.pairs()) <= have
