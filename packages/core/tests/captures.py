"""Captures for tests: one written by hand, and calls to be captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from triptych import capture, layers

ARGS = (1e-6, 0.0, "after_weight")


def captured(x: torch.Tensor, weight: torch.Tensor | None, folder: Path, **changes: Any) -> capture.Capture:
    names = ("x", "weight", "eps", "offset", "rounding")
    made = capture.Capture(
        **{
            "op": "rms_norm",
            "phase": "forward",
            "layer": "blocks.0",
            "call": 3,
            "backend": "torch",
            "policy": "auto",
            "arguments": tuple(zip(names, (x, weight, *ARGS), strict=True)),
            "versions": {"torch": torch.__version__},
            **changes,
        }
    )
    folder.mkdir(parents=True)
    capture.save(made, folder)
    return made


def step(name: str = "blocks.3.norm") -> torch.Tensor:
    layer = layers.RMSNorm(8)
    layer.layer_name = name
    x = torch.arange(24, dtype=torch.float32).view(3, 8).requires_grad_()
    layer(x).sum().backward()
    return x.detach()
