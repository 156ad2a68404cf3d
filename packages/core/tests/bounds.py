"""Two implementations of an op agree when each output lies within twice the op's own bound: once for each of them."""

from __future__ import annotations

from typing import Any

import torch

from triptych import registry


def assert_agree(op: str, phase: str, args: tuple[Any, ...], **outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Assert that pairs of results of one phase, called with `args`, agree elementwise. Names are those of outputs."""
    spec = registry.ops.get(op).phase(phase)
    with torch.no_grad():
        bounds = dict(zip(spec.outputs, spec.bound(*args), strict=True))
        for name, (one, other) in outputs.items():
            assert one.shape == other.shape, name
            error, allowed = (one.double() - other.double()).abs(), 2 * bounds[name].reshape(one.shape)
            assert bool((error <= allowed).all()), f"{name}: {error.max():.3g}, of {allowed[error > allowed].min():.3g}"
