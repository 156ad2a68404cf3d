"""What the tests of torch.compile share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from subjects import assert_close, step
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def nothing_is_compiled_before_or_after() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def trained(model: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """The loss and the gradients of one step with fixed noise."""
    model.zero_grad()
    torch.manual_seed(3)
    found = {"loss": step(function, x)}
    return found | {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value, name)
