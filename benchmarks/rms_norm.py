"""rms_norm forward and backward, every backend beside F.rms_norm, in one run.

    python benchmarks/rms_norm.py [--device cpu|cuda] [--threads 2] [--compile] [--json FILE]

Correctness is checked first, against the float64 reference. The variants run in turn, round by round, on random data;
figures are medians of rounds.

CPU: milliseconds of forward plus backward, and how many times as fast as F.rms_norm in the same round. "fresh" lets
outputs be allocated as a program does and pays for their page faults; "kept" has glibc keep freed memory
(M_MMAP_THRESHOLD and M_TRIM_THRESHOLD raised), so that what is left is the kernels.

CUDA: "device" is the kernels' own time, summed by the profiler; "eager" is wall time by events around single calls
with the L2 cache flushed before each. Both as a fraction of this card's copy rate, measured in the same run: bytes
counted are 2 tensors for forward and 5 for a step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import triptych
from triptych import registry
from triptych.errors import TriptychError

CPU_SHAPES = ((4096, 4096),)
CUDA_SHAPES = ((32768, 1024), (32768, 4096), (16384, 8192), (8192, 16384), (4096, 32768), (4096, 65536))
EPS = 1e-6

Run = Callable[[], Any]


class Variant:
    """One implementation at one shape and dtype: forward and step (forward and backward) as functions of nothing."""

    def __init__(
        self, name: str, norm: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor
    ):
        self.name = name
        self.norm = norm
        self.x, self.w, self.dy = x, w, dy

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.norm(self.x, self.w)

    def step(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.norm(self.x, self.w), (self.x, self.w), self.dy)


def variants(rows: int, columns: int, dtype: torch.dtype, device: str, compiled: bool) -> list[Variant]:
    """F.rms_norm first, then every backend that runs this call."""
    torch.manual_seed(0)
    x = torch.randn(rows, columns, device=device).to(dtype).requires_grad_()
    w = torch.randn(columns, device=device).to(dtype).requires_grad_()
    dy = torch.randn(rows, columns, device=device).to(dtype)

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], w, EPS)

    found = [Variant("F.rms_norm", plain, x, w, dy)]
    if compiled:
        found.append(Variant("torch.compile", torch.compile(plain), x, w, dy))
    for name in registry.backends.names():
        if registry.backends.get(name).priority(device) is None:
            continue
        if name == "triton" and device == "cpu":
            continue  # the interpreter checks kernels; its speed says nothing

        def ours(x: torch.Tensor, w: torch.Tensor, policy: str = name) -> torch.Tensor:
            with triptych.use(policy):
                return triptych.rms_norm(x, w, eps=EPS)

        variant = Variant(name, ours, x, w, dy)
        try:
            variant.step()
        except TriptychError as cause:
            print(f"{name} does not run {rows}x{columns} {dtype}: {str(cause).splitlines()[0]}")
            continue
        found.append(variant)
    return found


def check(variant: Variant) -> None:
    """Compare a few rows with the reference, within the bound that the suite uses."""
    spec = registry.ops.get("rms_norm")
    rows = slice(0, 4)
    x, w, dy = variant.x.detach(), variant.w.detach(), variant.dy
    y = variant.forward()[rows].double()
    args = (x[rows], w, EPS, 0.0, "after_weight")
    reference, rstd = spec.forward.reference(*args)
    assert bool(((y - reference).abs() <= spec.forward.bound(*args)[0]).all()), f"{variant.name}: y is wrong"
    dx = variant.step()[0][rows].double()
    back = (dy[rows], x[rows], w, rstd, EPS, 0.0, "after_weight", True, True)
    assert spec.backward is not None
    # F.rms_norm's composite rounds in between: it is the unit of time here, not what is judged.
    slack = 8.0 if variant.name in ("F.rms_norm", "torch.compile") else 1.0
    limit = slack * spec.backward.bound(*back)[0]
    assert bool(((dx - spec.backward.reference(*back)[0]).abs() <= limit).all()), f"{variant.name}: dx is wrong"


# --- CPU ------------------------------------------------------------------------------------------------------------


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks of any size (M_TRIM_THRESHOLD -1, M_MMAP_THRESHOLD -3) up to 1 GiB."""
    libc = ctypes.CDLL(None)
    for parameter in (-1, -3):
        libc.mallopt(parameter, 1 << 30)


def cpu_rows(dtype: torch.dtype, memory: str, rounds: int) -> list[dict[str, Any]]:
    table = []
    for rows, columns in CPU_SHAPES:
        found = variants(rows, columns, dtype, "cpu", compiled=False)
        for variant in found:
            check(variant)
        times: dict[str, list[float]] = {variant.name: [] for variant in found}
        for _ in range(rounds):
            for variant in found:
                start = time.perf_counter()
                variant.step()
                times[variant.name].append((time.perf_counter() - start) * 1e3)
        unit = times["F.rms_norm"]
        for name, each in times.items():
            ratio = statistics.median(base / own for base, own in zip(unit, each, strict=True))
            table.append(
                {
                    "shape": f"{rows}x{columns}",
                    "dtype": str(dtype).removeprefix("torch."),
                    "memory": memory,
                    "variant": name,
                    "step_ms": statistics.median(each),
                    "times_as_fast": ratio,
                }
            )
    return table


# --- CUDA -----------------------------------------------------------------------------------------------------------


def events_ms(run: Run, rounds: int, flush: torch.Tensor) -> float:
    """Median wall time of single calls by events, the L2 cache flushed before each."""
    spans = []
    for _ in range(rounds):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in spans)


def device_ms(run: Run, calls: int, flush: torch.Tensor) -> float:
    """The kernels' own time of one call, summed by the profiler, without the flush."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            flush.zero_()
            run()
        torch.cuda.synchronize()
    total = sum(
        event.device_time_total
        for event in profiler.key_averages()
        if "FillFunctor" not in event.key and "Memset" not in event.key
    )
    return total / calls / 1e3


def copy_rate() -> float:
    """Bytes read plus written in a millisecond by a 1 GiB device-to-device copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        target.copy_(source)
    return 2 * source.numel() / events_ms(lambda: target.copy_(source), 20, flush)


def cuda_rows(dtype: torch.dtype, compiled: bool, rounds: int) -> list[dict[str, Any]]:
    rate = copy_rate()
    print(f"copy rate {rate / 1e6:.0f} GB/s on {torch.cuda.get_device_name()}")
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    table = []
    for rows, columns in CUDA_SHAPES:
        tensor = rows * columns * dtype.itemsize
        found = variants(rows, columns, dtype, "cuda", compiled)
        for variant in found:
            check(variant)
        for variant in found:
            for _ in range(3):
                variant.step()
            row: dict[str, Any] = {"shape": f"{rows}x{columns}", "dtype": str(dtype).removeprefix("torch.")}
            row["variant"] = variant.name
            for phase, run, tensors in (("forward", variant.forward, 2), ("step", variant.step, 5)):
                row[f"device_{phase}"] = tensors * tensor / rate / device_ms(run, 10, flush)
                row[f"eager_{phase}"] = tensors * tensor / rate / events_ms(run, rounds, flush)
            table.append(row)
    return table


def show(table: list[dict[str, Any]]) -> None:
    names = list(table[0])
    print("  ".join(f"{name:>14s}" for name in names))
    for row in table:
        print("  ".join(f"{row[n]:14.3f}" if isinstance(row[n], float) else f"{row[n]:>14s}" for n in names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="also measure torch.compile of F.rms_norm (CUDA)")
    parser.add_argument("--json", type=Path, help="write the rows to FILE")
    options = parser.parse_args()
    if options.device == "cuda":
        table = cuda_rows(torch.bfloat16, options.compile, options.rounds)
    else:
        torch.set_num_threads(options.threads)
        dtypes = (torch.float32, torch.bfloat16)
        table = [row for dtype in dtypes for row in cpu_rows(dtype, "fresh", options.rounds)]
        keep_freed_memory()
        table += [row for dtype in dtypes for row in cpu_rows(dtype, "kept", options.rounds)]
    print(f"torch {torch.__version__}, {options.device}")
    show(table)
    if options.json:
        options.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
