"""An op that was not written here, with one output and one gradient: everything that the project's own ops get."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import triptych
from triptych import registry
from triptych.testing import CHECKS, Subject, first_failure, ran

FILE = Path(__file__).parents[1] / "examples" / "third_party_op.py"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    module = sys.modules.get("third_party_op")  # an op is defined once in a process
    if module is None:
        spec = importlib.util.spec_from_file_location("third_party_op", FILE)
        assert spec is not None and spec.loader is not None
        module = sys.modules["third_party_op"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    with registry.ops.added("scaled_square", module.SPEC):
        yield module


@pytest.mark.parametrize("check", CHECKS)
def test_the_suite_passes_on_it(example: ModuleType, check: str) -> None:
    failure = first_failure(Subject("composite", ops=("scaled_square",)), check)
    assert failure is None, failure.text


def test_every_way_in_gives_the_same(example: ModuleType) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    expected = 1.5 * x.detach() ** 2
    ways = {
        "function": lambda: example.scaled_square(x, 1.5),
        "operator": lambda: torch.ops.triptych.scaled_square(x, 1.5, ""),
        "compiled": lambda: torch.compile(example.scaled_square, backend="aot_eager", fullgraph=True)(x, 1.5),
    }
    for name, way in ways.items():
        with (
            triptych.use("composite"),
            ran({("scaled_square", phase, "composite"): 1 for phase in ("forward", "backward")}),
        ):
            y = way()
            (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(y, expected), name
        assert torch.equal(dx, 2 * 1.5 * x.detach()), name


def test_a_backend_that_lacks_it_refuses(example: ModuleType) -> None:
    with triptych.use("torch"), pytest.raises(triptych.Refused, match="it does not implement scaled_square"):
        example.scaled_square(torch.ones(2))
