"""AnalogLinear beside nn.Linear, every backend, in one run: forward, training step, extra memory.

    python benchmarks/analog_linear.py [--device cpu|cuda] [--threads 2] [--dtype float32] [--rounds 15] [--json FILE]

The unit is nn.Linear in the same run: a figure of 1.2 means 1.2 times its time, or its peak of extra memory (CUDA). The
variants run in turn, round by round, on random data; times are medians of rounds, by events on CUDA with the L2 cache
flushed, by the clock on the CPU. Outputs are checked first: all backends against `composite`, which the conformance
suite checks against the float64 reference. Where aihwkit-lightning is installed, its PyTorch mode runs beside them.

A step is forward and backward to x and to every Parameter, with calibration over. Host time is part of it.
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
from torch import nn

import triptych
from triptych import registry
from triptych.analog import AnalogConfig, AnalogLinear
from triptych.errors import TriptychError

RANGE: dict[str, Any] = {
    "pre_post.input_range.enable": True,
    "forward.inp_res": 254,
    "pre_post.input_range.decay": 0.01,
}
NOISE: dict[str, Any] = {"modifier.noise_type": "AddNormalPerChannel", "modifier.std_dev": 0.03}
ADC: dict[str, Any] = {"forward.out_bound": 14, "forward.out_res": 254}
LEVELS: dict[str, Any] = {"modifier.quantization_type": "DiscretizePerChannel", "modifier.res": 254}
TILES: dict[str, Any] = {"mapping.max_input_size": 512}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "ir": RANGE,
    "ir + noise": RANGE | NOISE,
    "ir + noise + levels + adc": RANGE | NOISE | LEVELS | ADC,
    "ir + noise + adc, tiles of 512": RANGE | NOISE | ADC | TILES,
    "ir + noise, tiles of 512": RANGE | NOISE | TILES,
}
SHAPES = {
    "cpu": ((1024, 1024, 1024),),
    "cuda": ((4096, 4096, 4096), (8192, 4096, 14336)),
}
"""Tokens, inputs, outputs."""


class Variant:
    """One layer on one backend, with its input and its gradient."""

    def __init__(self, name: str, layer: nn.Module, x: torch.Tensor, dy: torch.Tensor, policy: str = "") -> None:
        self.name, self.layer, self.x, self.dy, self.policy = name, layer, x, dy, policy
        self.inputs = [x, *(each for each in layer.parameters() if each.requires_grad)]

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self._call()

    def step(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self._call(), self.inputs, self.dy)

    def _call(self) -> torch.Tensor:
        if not self.policy:
            y: torch.Tensor = self.layer(self.x)
            return y
        with triptych.use(self.policy):
            y = self.layer(self.x)
        return y


def variants(shape: tuple[int, int, int], settings: dict[str, Any], dtype: torch.dtype, device: str) -> list[Variant]:
    """nn.Linear first, then the layer on every backend that runs it, then the peer."""
    tokens, inputs, outputs = shape
    torch.manual_seed(0)
    x = torch.randn(tokens, inputs, device=device).to(dtype).requires_grad_()
    dy = torch.randn(tokens, outputs, device=device).to(dtype)
    digital = nn.Linear(inputs, outputs, device=device, dtype=dtype)
    config = AnalogConfig().replaced({**settings, "pre_post.input_range.init_from_data": 0})
    found = [Variant("nn.Linear", digital, x, dy)]
    for name in registry.backends.names():
        if registry.backends.get(name).priority(device) is None or (name == "triton" and device == "cpu"):
            continue  # Triton's interpreter checks kernels; its speed says nothing
        variant = Variant(name, AnalogLinear.from_digital(digital, config), x, dy, name)
        try:
            variant.step()
        except TriptychError as cause:
            print(f"{name} does not run {shape} in {dtype}: {str(cause).splitlines()[0]}")
            continue
        found.append(variant)
    peer = peer_layer(digital, settings)
    return found if peer is None else [*found, Variant("aihwkit-lightning", peer, x, dy)]


def peer_layer(digital: nn.Linear, settings: dict[str, Any]) -> nn.Module | None:
    """The same layer of aihwkit-lightning, where that is installed."""
    try:
        from aihwkit_lightning.nn import AnalogLinear as Theirs
        from aihwkit_lightning.simulator.configs import TorchInferenceRPUConfig
    except ImportError:
        return None
    config = TorchInferenceRPUConfig()
    for path, value in {**settings, "pre_post.input_range.init_from_data": 0}.items():
        *groups, name = path.split(".")
        group: Any = config
        for each in groups:
            group = getattr(group, each)
        kind = type(getattr(group, name))
        setattr(group, name, kind(value) if isinstance(value, str) else value)
    layer: nn.Module = Theirs.from_digital(digital, config)
    return layer


def check(found: list[Variant], dtype: torch.dtype) -> None:
    """Compare every backend's evaluation with composite's: all but rounding, and a level here and there, is equal."""
    by_name = {variant.name: variant for variant in found}
    if "composite" not in by_name:
        return
    for variant in found:
        variant.layer.eval()
    wanted = by_name["composite"].forward().double()
    for variant in found[1:]:
        off = (variant.forward().double() - wanted).abs()
        assert bool((off.mean() <= 20 * torch.finfo(dtype).eps * wanted.abs().mean()).all()), f"{variant.name} is wrong"
    for variant in found:
        variant.layer.train()


# --- measuring ------------------------------------------------------------------------------------------------------


def rounds_ms(runs: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, list[float]]:
    """Milliseconds of each, round by round, in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda") if device == "cuda" else None
    for number in range(rounds + 2):
        for name, run in runs.items():
            if flush is None:
                start = time.perf_counter()
                run()
                span = (time.perf_counter() - start) * 1e3
            else:
                flush.zero_()
                first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                first.record()
                run()
                last.record()
                last.synchronize()
                span = first.elapsed_time(last)
            if number >= 2:  # the first ones warm up
                times[name].append(span)
    return times


def extra_memory(run: Callable[[], Any]) -> int:
    """The peak of what a call allocates on the GPU beside what there was."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def rows(shape: tuple[int, int, int], name: str, dtype: torch.dtype, device: str, rounds: int) -> list[dict[str, Any]]:
    """One row a variant, in units of nn.Linear."""
    found = variants(shape, CONFIGURATIONS[name], dtype, device)
    check(found, dtype)
    measured = {
        phase: rounds_ms({each.name: getattr(each, phase) for each in found}, rounds, device)
        for phase in ("forward", "step")
    }
    unit = extra_memory(found[0].step) if device == "cuda" else 0
    table = []
    for variant in found:
        row: dict[str, Any] = {"shape": "x".join(map(str, shape)), "configuration": name, "variant": variant.name}
        for phase, times in measured.items():
            pairs = zip(times[variant.name], times["nn.Linear"], strict=True)
            row[phase] = statistics.median(own / base for own, base in pairs)
        row["step_ms"] = statistics.median(measured["step"][variant.name])
        if device == "cuda":
            row["memory"] = extra_memory(variant.step) / unit
        table.append(row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32, bfloat16 on CUDA"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the rows to FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    print(f"torch {torch.__version__}, {options.device}, {dtype}; figures are multiples of nn.Linear's")
    table: list[dict[str, Any]] = []
    for shape in SHAPES[options.device]:
        for name in CONFIGURATIONS:
            new = rows(shape, name, dtype, options.device, options.rounds)
            for row in new:
                texts = (f"{value:9.2f}" if isinstance(value, float) else f"{value:31s}" for value in row.values())
                print("  ".join(texts), flush=True)
            table += new
    if options.json:
        options.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
