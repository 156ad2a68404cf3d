"""float32 products stay float32 where the process allows less, and the process keeps its setting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from triptych_torch.ops._products import _full_float32, product

SETTING: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def bfloat16_is_allowed() -> Iterator[None]:
    before = SETTING.fp32_precision
    SETTING.fp32_precision = "bf16"
    yield
    SETTING.fp32_precision = before


def test_products_are_not_shortened() -> None:
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    exact = a.double() @ b.double()
    assert (product(a, b, torch.float32) - exact).abs().max() < 1e-4
    assert SETTING.fp32_precision == "bf16"


def test_a_thread_that_leaves_does_not_shorten_the_products_of_another() -> None:
    a = torch.ones(2, 2)
    one, other = _full_float32(a), _full_float32(a)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert SETTING.fp32_precision == "ieee"
    other.__exit__(None, None, None)
    assert SETTING.fp32_precision == "bf16"
