"""Train a small Llama-style byte model on real text, with Triptych's norms.

    python examples/train_text.py                                    300 steps on the standard library's sources
    python examples/train_text.py --data book.txt --steps 1000       any file or folder of text
    TRIPTYCH_BACKEND=torch python examples/train_text.py             the same on one named backend
    torchrun --nproc-per-node 2 examples/train_text.py --parallel ddp       the same on two ranks; see parallel.py

At the end it prints the losses in bits a byte, the speed, and which backends ran. The layers that a policy or a
bisect can name are `blocks.<i>.attention_norm` and `final_norm` (rms_norm) and `blocks.<i>.ffn_norm` (add_rms_norm).

Exit codes: 0 done; 1 training failed (a loss that is not finite raises FloatingPointError); 2 wrong use.

Shapes: B = batch, S = length.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from byte_model import ByteModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from text_data import read_text, split, windows
from torch import Tensor, nn
from trainer import Trainer, schedule

import triptych
from triptych.report import Row

if TYPE_CHECKING:
    from parallel import Ranks

HELD_OUT_BATCHES = 8
PARALLEL = ("none", "ddp", "fsdp", "tp", "pp")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run, as the command line gave it."""

    data: Path | None
    steps: int
    batch: int
    length: int
    dim: int
    layers: int
    heads: int
    head: str
    lr: float
    seed: int
    device: str
    dtype: str
    compile: bool
    eval_every: int
    out: Path | None
    parallel: str = "none"
    schedule: str = "1f1b"
    microbatches: int = 4


class Alone:
    """Where a run takes place: in this process. parallel.Ranks is the other place.

    Attributes:
        device: of the data and the model.
        talks: whether this process prints and writes files.
    """

    talks = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = torch.device(device_type(settings))

    def trainer(self, network: nn.Module) -> Trainer:
        """What trains a network here."""
        return Trainer(network, self.settings.compile)

    def rows(self) -> dict[str, Sequence[Row]]:
        """What ran, by the ranks that it ran on."""
        return {"": triptych.report().rows}


def device_type(settings: Settings) -> str:
    """cpu or cuda."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    return found if settings.device == "auto" else settings.device


def load(settings: Settings, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes, on a device or that of the settings; raises what `read_text` and `split` do."""
    device = device or torch.device(device_type(settings))
    train_data, held_out_data = split(read_text(settings.data), settings.length)
    return train_data.to(device), held_out_data.to(device)


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass
class History:
    """What a run measured; losses in bits a byte."""

    train: list[float]
    held_out: list[tuple[int, float]]
    tokens_per_second: float = 0.0


Shown = Callable[[int, float, float], None]
"""Called after each step with its number (from 1), its loss and the tokens/s so far."""


def train(
    trainer: Trainer, settings: Settings, train_data: Tensor, held_out_data: Tensor, history: History, shown: Shown
) -> None:
    """Train a model, filling `history` as it goes.

    Raises:
        FloatingPointError: a loss is not finite.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    seconds = 0.0
    for step in range(1, settings.steps + 1):
        start = time.perf_counter()
        tokens, targets = windows(train_data, settings.batch, settings.length, generator)
        value = trainer.backward(tokens, targets, f"step {step}")
        trainer.update(settings.lr * schedule(step, settings.steps))
        seconds += time.perf_counter() - start
        history.train.append(value)
        history.tokens_per_second = step * settings.batch * settings.length / seconds
        shown(step, value, history.tokens_per_second)
        if step == settings.steps or (settings.eval_every and step % settings.eval_every == 0):
            trainer.network.eval()
            history.held_out.append((step, evaluate(trainer, held_out_data, settings, f"step {step}")))
            trainer.network.train()


def build_model(settings: Settings, device: torch.device) -> ByteModel:
    """The model on its device, layers named. The norms' weights stay in float32 beside 16-bit activations."""
    torch.manual_seed(settings.seed)
    model = ByteModel(settings.dim, settings.layers, settings.heads, settings.length, settings.head)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data = weight.data.to(DTYPES[settings.dtype])
    triptych.name_layers(model)
    return model.to(device)


def evaluate(trainer: Trainer, data: Tensor, settings: Settings, where: str) -> float:
    """The loss on the same few held-out batches every time, in bits a byte."""
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(HELD_OUT_BATCHES):
        tokens, targets = windows(data, settings.batch, settings.length, generator)
        total += trainer.evaluate(tokens, targets, f"{where}, on held-out text")
    return total / HELD_OUT_BATCHES


# --- what the user sees -----------------------------------------------------------------------------------------------


@contextmanager
def progress(steps: int, console: Console, title: str = "training") -> Iterator[Shown]:
    """A progress bar on a terminal, else a line for the first step, the last, and about ten between."""
    if console.quiet:
        yield lambda step, loss, speed: None
        return
    if not console.is_terminal:
        every = max(1, steps // 10)

        def line(step: int, loss: float, speed: float) -> None:
            if step in (1, steps) or step % every == 0:
                print(f"step {step}/{steps}  loss {loss:.3f} bits/byte  {speed:,.0f} tokens/s", flush=True)

        yield line
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=steps)
        yield lambda step, loss, speed: bar.update(
            task, completed=step, description=f"loss {loss:.3f} bits/byte  {speed:,.0f} tokens/s"
        )


def summarise(history: History, console: Console, rows: dict[str, Sequence[Row]]) -> None:
    """Print the losses, the speed, and which backends ran."""
    recent = history.train[-max(1, len(history.train) // 10) :]
    print(f"train loss      {sum(recent) / len(recent):.3f} bits/byte (mean of the last {len(recent)} steps)")
    print(f"held-out loss   {', '.join(f'{loss:.3f} at step {step}' for step, loss in history.held_out)} (bits/byte)")
    print(f"speed           {history.tokens_per_second:,.0f} tokens/s")
    summarise_backends(console, rows)


def summarise_backends(console: Console, rows: dict[str, Sequence[Row]]) -> None:
    """Print which backends ran, by ranks, and under which policy."""
    report = triptych.report()
    print(f"policy          {report.policy}")
    several = any(rows)
    table = Table("op", "phase", "backend", *(("calls of each", "ranks") if several else ("calls",)))
    for ranks, ran in rows.items():
        for row in ran:
            table.add_row(row.op, row.phase, row.backend, str(row.calls), *((ranks,) if several else ()))
    console.print(table)
    for note in report.notes:
        print(note)


# --- the command line -------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> Settings:
    """The settings; wrong ones end the program with exit code 2 and a sentence."""
    parser = options("Train a small Llama-style byte model on real text.")
    add = parser.add_argument
    add("--parallel", choices=PARALLEL, default="none", help="how several ranks share the work, under torchrun")
    add("--schedule", choices=("gpipe", "1f1b"), default="1f1b", help="of the microbatches of --parallel pp")
    add("--microbatches", type=int, default=4, help="parts of a batch in --parallel pp")
    settings = Settings(**vars(parser.parse_args(arguments)))
    found = mistakes(settings)
    if not found and settings.parallel != "none":
        import parallel

        found = parallel.mistakes(settings, device_type(settings))
    if found:
        parser.error(" ".join(found))
    return settings


def options(description: str) -> argparse.ArgumentParser:
    """The command line: an option for each field of Settings."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="a file or folder of text; default: Python's standard library")
    add("--steps", type=int, default=300, help="optimizer steps; one calls 2 * layers + 1 ops, forward and backward")
    add("--batch", type=int, default=8, help="sequences a step")
    add("--length", type=int, default=128, help="bytes a sequence")
    add("--dim", type=int, default=128, help="width of the model")
    add("--layers", type=int, default=2, help="blocks")
    add("--heads", type=int, default=4, help="attention heads; dim / heads must be even")
    add("--head", choices=("tied", "untied"), default="tied", help="whether the output shares the embedding's weight")
    add("--lr", type=float, default=5e-3, help="peak learning rate")
    add("--seed", type=int, default=0, help="of the weights and the order of the text")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes a GPU where there is one")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="of weights and activations")
    add("--compile", action="store_true", help="run the model through torch.compile")
    add("--eval-every", type=int, default=0, help="steps between evaluations; 0: only at the end")
    add("--out", type=Path, help="a JSON file that receives the loss history")
    return parser


def mistakes(settings: Settings) -> list[str]:
    """What is wrong with the settings, a sentence each."""
    found = [
        f"--{name} is {getattr(settings, name)}. It must be at least 1."
        for name in ("steps", "batch", "length", "dim", "layers", "heads")
        if getattr(settings, name) < 1
    ]
    if not found and (settings.dim % settings.heads or settings.dim // settings.heads % 2):
        found.append(
            f"--dim is {settings.dim} and --heads is {settings.heads}. dim must be an even multiple of heads, "
            f"such as {2 * settings.heads * max(1, settings.dim // (2 * settings.heads))}."
        )
    if not 0 < settings.lr < float("inf"):
        found.append(f"--lr is {settings.lr}. It must be a finite number above 0.")
    if settings.eval_every < 0:
        found.append(f"--eval-every is {settings.eval_every}. It must be a number of steps, or 0.")
    if settings.device == "cuda" and not torch.cuda.is_available():
        found.append("--device is cuda, but this PyTorch finds no CUDA device. Use --device cpu or auto.")
    return found + unwritable("--out", settings.out)


def unwritable(option: str, file: Path | None) -> list[str]:
    """What keeps a file from being written, if anything does."""
    if file is not None:
        try:
            file.open("a").close()
        except OSError as cause:
            return [f"{option} {file}: it cannot be written ({cause.strerror}). Name another file."]
    return []


def write(settings: Settings, history: History) -> None:
    """The settings and what the run measured, into the file that the settings name, if any."""
    if settings.out is not None:
        record = {"settings": asdict(settings), "history": asdict(history), "unit": "bits per byte"}
        settings.out.write_text(json.dumps(record, default=str, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    settings = parse(arguments)
    if settings.parallel == "none":
        return run(settings, Alone(settings))
    import parallel  # not before it is asked for: torch.distributed and the compiler take seconds to import

    with parallel.joined(settings, device_type(settings)) as ranks:
        return run(settings, ranks)


def run(settings: Settings, place: Alone | Ranks) -> int:
    """Train, write the history, print the summary; the exit code."""
    console = Console(quiet=not place.talks)
    try:
        train_data, held_out_data = load(settings, place.device)
    except (OSError, ValueError) as cause:
        print(f"train_text.py: error: {cause}", file=sys.stderr)
        return 2
    history = History([], [])
    try:
        with progress(settings.steps, console) as shown:
            trainer = place.trainer(build_model(settings, place.device))
            train(trainer, settings, train_data, held_out_data, history, shown)
    finally:
        if place.talks:
            write(settings, history)
    rows = place.rows()
    if place.talks:
        summarise(history, console, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
