"""What dispatch costs: triptych.rms_norm above the same backend function inside a bare autograd function.

    python benchmarks/dispatch.py [--json FILE]

The kernel does nothing but allocate its outputs, so that what is left is host time. The variants run in turn, many
rounds; figures are medians of rounds and the difference is taken round by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import triptych
from triptych import registry
from triptych.backend import Backend
from triptych.opspec import PhaseFunction

ROUNDS, CALLS = 60, 2000


def forward(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, rounding: str) -> tuple[Any, ...]:
    return torch.empty_like(x), torch.empty(x.shape[:-1])


def backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    return torch.empty_like(x), torch.empty_like(weight)


class Empty(Backend):
    """A backend whose kernels only allocate."""

    def ops(self) -> tuple[str, ...]:
        return ("rms_norm",)

    def implementation(self, op: str, phase: str) -> PhaseFunction:
        return forward if phase == "forward" else backward


class Bare(torch.autograd.Function):
    """The least that Python can do around the same kernels."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y, rstd = forward(x, weight, eps, 0.0, "after_weight")
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dw = backward(dy, x, weight, rstd, 1e-6, 0.0, "after_weight", True, True)
        return dx, dw, None


def microseconds(function: Callable[[], object]) -> float:
    """Mean processor time of one call over one round: what other programs take in between does not count."""
    start = time.thread_time()
    for _ in range(CALLS):
        function()
    return (time.thread_time() - start) / CALLS * 1e6


def measure() -> list[dict[str, float | str]]:
    """One row a comparison: the bare function, the public one, and the difference."""
    x, w = torch.randn(4, 32, requires_grad=True), torch.randn(32, requires_grad=True)
    dy = torch.ones(4, 32)

    def without_grad() -> object:
        with torch.no_grad():
            return triptych.rms_norm(x, w, eps=1e-6)

    def without_grad_bare() -> object:
        with torch.no_grad():
            return forward(x, w, 1e-6, 0.0, "after_weight")

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "forward, no gradient": (without_grad_bare, without_grad),
        "forward, gradient": (lambda: Bare.apply(x, w, 1e-6), lambda: triptych.rms_norm(x, w, eps=1e-6)),
        "forward and backward": (
            lambda: torch.autograd.grad(Bare.apply(x, w, 1e-6), (x, w), dy),
            lambda: torch.autograd.grad(triptych.rms_norm(x, w, eps=1e-6), (x, w), dy),
        ),
        "through the operator": (
            lambda: Bare.apply(x, w, 1e-6),
            lambda: torch.ops.triptych.rms_norm(x, w, 1e-6, 0.0, "after_weight", ""),
        ),
    }
    rows: list[dict[str, float | str]] = []
    for name, (bare, ours) in pairs.items():
        for function in (bare, ours):
            microseconds(function)
        rounds = [(microseconds(bare), microseconds(ours)) for _ in range(ROUNDS)]
        rows.append(
            {
                "case": name,
                "bare_us": statistics.median(each for each, _ in rounds),
                "triptych_us": statistics.median(each for _, each in rounds),
                "difference_us": statistics.median(each - base for base, each in rounds),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows to FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with registry.backends.added("empty", Empty("empty")), triptych.use("empty"):
        rows = measure()
        assert {row.backend for row in triptych.report().rows} == {"empty"}
    print(f"torch {torch.__version__}, medians of {ROUNDS} rounds of {CALLS} calls, microseconds a call")
    print(f"{'case':24s} {'bare':>8s} {'triptych':>9s} {'difference':>11s}")
    for row in rows:
        print(f"{row['case']:24s} {row['bare_us']:8.2f} {row['triptych_us']:9.2f} {row['difference_us']:11.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
