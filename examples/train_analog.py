"""Train a byte model for analog crossbars, and see what noise and drift leave of it.

    python examples/train_analog.py --plot analog.svg                under two minutes on two cores
    python examples/train_analog.py --noise 0.1 --seed 1             other noise, other weights and text
    TRIPTYCH_BACKEND=torch python examples/train_analog.py           the same on one named backend

The model and the data are those of train_text.py. It is trained digitally. From there one copy is converted and trained
hardware-aware: inputs and outputs of 8 bits, learned input ranges, noise on the weights in every forward pass, weights
clipped after every step. Its twin is trained digitally for as many steps on the same text. Then both are put on the
same crossbars, whose cells are noisy and drift, and the table shows what is left of each, in bits a byte of held-out
text. The draws are chips: for each, the noise of every cell is drawn once and stays.

The head stays digital. Tied, its weight is the embedding's: a table to look up, which is not to be clipped or noisy.

Exit codes: 0 done; 1 training failed (a loss that is not finite raises FloatingPointError); 2 wrong use.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import train_text
from byte_model import ByteModel
from memory_cells import FIRST_READ, Change, drift, noise, programmed
from rich.console import Console
from rich.table import Table
from text_data import windows
from torch import Tensor
from train_text import History
from trainer import Trainer

import triptych
from triptych import analog
from triptych.analog import WeightClipType, WeightNoiseInjectionType

DIGITAL = "head"
"""What stays digital."""
CALIBRATION_BATCHES = 16
STRENGTHS = (0.0, 0.5, 1.0, 1.5, 2.0)
"""Of the noise in evaluation, relative to that of training."""
TIMES = {"20 s": FIRST_READ, "1 hour": 3600.0, "1 day": 86400.0, "1 month": 2.6e6, "1 year": 3.15e7, "10 years": 3.15e8}
PLOTS = (".png", ".svg")


@dataclass(frozen=True, kw_only=True)
class Settings(train_text.Settings):
    """One run, as the command line gave it."""

    analog_steps: int
    noise: float
    tile: int
    draws: int
    plot: Path | None


# --- training ---------------------------------------------------------------------------------------------------------


def configuration(settings: Settings) -> analog.AnalogConfig:
    """A setting in real use for language models but for three numbers: more noise, which a small model bears, smaller
    tiles, and a calibration that is over in a tenth of the run."""
    return analog.AnalogConfig(
        forward=analog.IOParameters(inp_res=254, out_res=254, out_bound=14),
        modifier=analog.WeightModifierParameter(
            std_dev=settings.noise, noise_type=WeightNoiseInjectionType.ADD_NORMAL_PER_CHANNEL
        ),
        clip=analog.WeightClipParameter(sigma=2.5, type=WeightClipType.LAYER_GAUSSIAN_PER_CHANNEL),
        mapping=analog.MappingParameter(max_input_size=settings.tile),
        pre_post=analog.PrePostProcessingParameter(
            analog.InputRangeParameter(enable=True, init_from_data=max(1, settings.analog_steps // 10), decay=0.01)
        ),
    )


def train(settings: Settings, train_data: Tensor, held_out_data: Tensor, console: Console) -> Iterator[Trained]:
    """The network before it was converted, its digital twin and the analog one, as each is done."""
    network = train_text.build_model(settings, train_data.device)

    def run(title: str, network: ByteModel, settings: Settings) -> Trained:
        history = History([], [])
        print(f"{title}:", flush=True)
        with train_text.progress(settings.steps, console, title) as shown:
            train_text.train(Trainer(network, settings.compile), settings, train_data, held_out_data, history, shown)
        return Trained(title, network.eval(), history)

    yield run("digital", network, settings)
    later = replace(settings, steps=settings.analog_steps, seed=settings.seed + 1)
    yield run("digital twin", copy.deepcopy(network).train(), later)
    analog_network = analog.convert_to_analog(network, configuration(later), exclude=DIGITAL).train()
    trained = run("hardware-aware", analog_network, later)
    analog.clip_weights(analog_network)  # after the last step there was no forward pass that would have
    yield trained


@dataclass(frozen=True)
class Trained:
    """A network, in evaluation mode, and how it came about."""

    title: str
    network: ByteModel
    history: History


# --- on crossbars -----------------------------------------------------------------------------------------------------


def on_crossbars(network: ByteModel, settings: Settings, train_data: Tensor) -> ByteModel:
    """A digital network on the crossbars that the other was trained for, its input ranges taken from training text."""
    mapped = analog.convert_to_analog(network, configuration(settings), exclude=DIGITAL)
    generator = torch.Generator().manual_seed(0)
    batches = (windows(train_data, settings.batch, settings.length, generator)[0] for _ in range(CALIBRATION_BATCHES))
    analog.calibrate_input_ranges(mapped, "MovingQuantile", batches, quantile=0.999)
    return mapped


@dataclass(frozen=True)
class Row:
    """One state of the cells: the losses of each network on each of the chips drawn, in bits a byte."""

    kind: str
    label: str
    amount: float
    digital: list[float]
    analog: list[float]


def conditions(settings: Settings) -> Iterator[tuple[str, str, float, list[Change]]]:
    """What the cells go through: kind, label, amount, changes."""
    for factor in STRENGTHS:
        strength = factor * settings.noise
        yield "noise", f"noise {strength:.3g}", strength, [noise(strength)] if factor else []
    for label, seconds in TIMES.items():
        yield "drift", f"noise {settings.noise:.3g}, {label}", seconds, [noise(settings.noise), drift(seconds)]


def compare(settings: Settings, digital: ByteModel, trained: ByteModel, data: Tensor, console: Console) -> list[Row]:
    """The losses of two networks on crossbars, under every condition. The draws are the same chips for both."""
    rows = []
    trainers = [Trainer(network) for network in (digital, trained)]
    for kind, label, amount, changes in conditions(settings):
        losses: tuple[list[float], list[float]] = ([], [])
        for draw in range(settings.draws if changes else 1):
            for trainer, found in zip(trainers, losses, strict=True):
                with programmed(trainer.network, changes, draw):
                    found.append(train_text.evaluate(trainer, data, settings, label))
        rows.append(Row(kind, label, amount, *losses))
    return rows


# --- what the user sees -----------------------------------------------------------------------------------------------


def summarise(trained: list[Trained], rows: list[Row], console: Console) -> None:
    """Print the losses, the comparison, and which backends ran."""
    for each in trained:
        step, loss = each.history.held_out[-1]
        speed = f"{each.history.tokens_per_second:,.0f} tokens/s"
        print(f"{each.title:15} held-out loss {loss:.3f} bits/byte after {step} steps, {speed}")
    draws = max(len(row.digital) for row in rows)
    print(f"On crossbars, held-out loss in bits/byte, mean and standard deviation of {draws} draws:")
    table = Table("cells", "trained digitally", "hardware-aware", "gain")
    for row in rows:
        gain = statistics.fmean(row.digital) - statistics.fmean(row.analog)
        table.add_row(row.label, shown(row.digital), shown(row.analog), f"{gain:+.3f}")
    console.print(table)
    train_text.summarise_backends(console, {"": triptych.report().rows})


def shown(losses: list[float]) -> str:
    """Mean and, of several, standard deviation."""
    mean = f"{statistics.fmean(losses):.3f}"
    return f"{mean} ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else mean


def record(settings: Settings, trained: list[Trained], rows: list[Row]) -> dict[str, Any]:
    """The numbers, for a JSON file."""
    return {
        "settings": asdict(settings),
        "config": configuration(settings).to_dict(),
        "histories": {each.title: asdict(each.history) for each in trained},
        "rows": [asdict(row) for row in rows],
        "unit": "bits per byte",
    }


def draw_plot(rows: list[Row], digital_loss: float, file: Path) -> None:
    """Both networks' losses against noise and drift, with standard deviations as bars. PNG or SVG, by the suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {"noise": "noise of the weights, relative to the largest", "drift": "time since programming, s"}
    axes = figure.subplots(1, len(titles))
    for axis, (kind, title) in zip(axes, titles.items(), strict=True):
        chosen = [row for row in rows if row.kind == kind]
        for name, label in (("digital", "trained digitally"), ("analog", "trained hardware-aware")):
            losses = [getattr(row, name) for row in chosen]
            bars = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in losses]
            means = [statistics.fmean(each) for each in losses]
            axis.errorbar([row.amount for row in chosen], means, bars, marker="o", capsize=3, label=label)
        axis.axhline(digital_loss, color="gray", linestyle=":", label="trained digitally, no crossbars")
        axis.set_xlabel(title)
    axes[1].set_xscale("log")
    axes[0].set_ylabel("held-out loss, bits/byte")
    axes[0].legend()
    figure.savefig(file)


# --- the command line -------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> Settings:
    """The settings; wrong ones end the program with exit code 2 and a sentence."""
    parser = options()
    settings = Settings(**vars(parser.parse_args(arguments)))
    if found := mistakes(settings):
        parser.error(" ".join(found))
    return settings


def options() -> argparse.ArgumentParser:
    """Those of train_text.py, with defaults for a smaller model, and a few more."""
    parser = train_text.options("Train a byte model for analog crossbars, and see what noise and drift leave of it.")
    parser.set_defaults(steps=400, dim=64, length=64)
    add = parser.add_argument
    add("--analog-steps", type=int, default=1500, help="steps of the two later trainings")
    add("--noise", type=float, default=0.15, help="of the weights in training, relative to the largest of an output")
    add("--tile", type=int, default=128, help="the most inputs of a tile")
    add("--draws", type=int, default=5, help="chips that each state of the cells is drawn for")
    add("--plot", type=Path, help="a .png or .svg file that receives the comparison")
    return parser


def mistakes(settings: Settings) -> list[str]:
    """What is wrong with the settings, a sentence each."""
    found = train_text.mistakes(settings)
    least = {"analog_steps": 1, "tile": 1, "draws": 2}
    for name, minimum in least.items():
        value = getattr(settings, name)
        if value < minimum:
            found.append(f"--{name.replace('_', '-')} is {value}. It must be at least {minimum}.")
    if not 0 < settings.noise < 1:
        found.append(f"--noise is {settings.noise}. It must be a number above 0 and below 1, such as 0.15.")
    if settings.dtype != "float32":
        found.append(
            f"--dtype is {settings.dtype}. It must be float32: the optimizer keeps a float32 copy of 16-bit weights, "
            f"which weight clipping would not reach."
        )
    if settings.plot is not None:
        found += plot_mistakes(settings.plot)
    return found


def plot_mistakes(file: Path) -> list[str]:
    """What keeps a plot from being drawn."""
    if file.suffix not in PLOTS:
        return [f"--plot {file}: the suffix is {file.suffix!r}. It must be {' or '.join(PLOTS)}."]
    if importlib.util.find_spec("matplotlib") is None:
        return ["--plot needs matplotlib, which is not installed. Run pip install matplotlib, or leave --plot out."]
    return train_text.unwritable("--plot", file)


def main(arguments: list[str] | None = None) -> int:
    settings = parse(arguments)
    console = Console()
    try:
        train_data, held_out_data = train_text.load(settings)
    except (OSError, ValueError) as cause:
        print(f"train_analog.py: error: {cause}", file=sys.stderr)
        return 2
    trained: list[Trained] = []
    rows: list[Row] = []
    try:
        for each in train(settings, train_data, held_out_data, console):
            trained.append(each)
        digital = on_crossbars(trained[1].network, settings, train_data)
        rows = compare(settings, digital, trained[2].network, held_out_data, console)
    finally:
        if settings.out is not None:
            text = json.dumps(record(settings, trained, rows), default=str, indent=1)
            settings.out.write_text(text + "\n", encoding="utf-8")
    summarise(trained, rows, console)
    if settings.plot is not None:
        draw_plot(rows, trained[1].history.held_out[-1][1], settings.plot)
        print(f"plot            {settings.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
