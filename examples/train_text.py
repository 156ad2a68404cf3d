"""Train a small Llama-style byte model on real text, with Triptych's norms.

    python examples/train_text.py                                    300 steps on the standard library's sources
    python examples/train_text.py --data book.txt --steps 1000       any file or folder of text
    TRIPTYCH_BACKEND=torch python examples/train_text.py             the same on one named backend

At the end it prints the losses in bits a byte, the speed, and which backends ran. The layers that a policy or a
bisect can name are `blocks.<i>.attention_norm` and `final_norm` (rms_norm) and `blocks.<i>.ffn_norm` (add_rms_norm).

Exit codes: 0 done; 1 training failed (a loss that is not finite raises FloatingPointError); 2 wrong use.

Shapes: B = batch, S = length.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from byte_model import BYTES, ByteModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import triptych

MAX_DATA = 8 << 20
"""Bytes of text read at most: more than the default run sees, and read in well under a second."""
HELD_OUT_BATCHES = 8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
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


# --- the text ---------------------------------------------------------------------------------------------------------


def read_text(data: Path | None) -> bytes:
    """The first MAX_DATA bytes of a file, of a folder's text files in sorted order, or of the standard library.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: there is no text in it.
    """
    if data is None:
        source = f"the standard library in {sysconfig.get_paths()['stdlib']}"
        files = text_files(Path(sysconfig.get_paths()["stdlib"]), ".py")
    else:
        source = str(data)
        if not data.exists():
            raise FileNotFoundError(
                f"--data {data}: there is no such file or folder. Name one that exists, or leave it out."
            )
        files = iter((data,)) if data.is_file() else text_files(data, "")
    text = bytearray()
    for file in files:
        with file.open("rb") as stream:
            part = stream.read(MAX_DATA - len(text))
        if b"\0" not in part[:4096]:
            text += part
        if len(text) >= MAX_DATA:
            break
    if not text:
        raise ValueError(f"--data: {source} holds no text. Name a text file, or a folder with text files in it.")
    return bytes(text)


def text_files(folder: Path, suffix: str) -> Iterator[Path]:
    """Files below `folder` whose names end in `suffix`, in an order that depends on their names only."""
    skipped = {"__pycache__", "site-packages", "dist-packages"}
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            path = Path(root, name)
            if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                yield path


def load(settings: Settings) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes on the device that the settings name; raises what `read_text` and `split` do."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(found if settings.device == "auto" else settings.device)
    train_data, held_out_data = split(read_text(settings.data), settings.length)
    return train_data.to(device), held_out_data.to(device)


def split(text: bytes, length: int) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes, uint8: the last tenth is held out.

    Raises:
        ValueError: one of them is too short for a sequence and its next byte.
    """
    needed = 10 * (length + 2)
    if len(text) < needed:
        raise ValueError(
            f"--data: the text has {len(text)} bytes; --length {length} needs at least {needed}. "
            f"Give more text, or a --length of at most {max(len(text) // 10 - 2, 1)}."
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    held_out = len(text) // 10
    return data[:-held_out], data[-held_out:]


def windows(data: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random sequences and their next bytes, both [B, S] of int64 on the data's device."""
    starts = torch.randint(len(data) - length, (batch, 1), generator=generator)
    index = (starts + torch.arange(length + 1)).to(data.device)
    tokens = data[index].long()
    return tokens[:, :-1], tokens[:, 1:]


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
    network: nn.Module, settings: Settings, train_data: Tensor, held_out_data: Tensor, history: History, shown: Shown
) -> None:
    """Train a model, filling `history` as it goes.

    Raises:
        FloatingPointError: a loss is not finite.
    """
    model: Callable[[Tensor], Tensor] = torch.compile(network) if settings.compile else network
    optimizer = AdamW(list(network.parameters()))
    generator = torch.Generator().manual_seed(settings.seed)
    seconds = 0.0
    for step in range(1, settings.steps + 1):
        start = time.perf_counter()
        tokens, targets = windows(train_data, settings.batch, settings.length, generator)
        loss = cross_entropy(model(tokens), targets)
        value = bits(loss, f"step {step}")
        network.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step(settings.lr * schedule(step, settings.steps))
        seconds += time.perf_counter() - start
        history.train.append(value)
        history.tokens_per_second = step * settings.batch * settings.length / seconds
        shown(step, value, history.tokens_per_second)
        if step == settings.steps or (settings.eval_every and step % settings.eval_every == 0):
            network.eval()
            history.held_out.append((step, evaluate(model, held_out_data, settings, f"step {step}")))
            network.train()


def build_model(settings: Settings, device: torch.device) -> ByteModel:
    """The model on its device, layers named. The norms' weights stay in float32 beside 16-bit activations."""
    torch.manual_seed(settings.seed)
    model = ByteModel(settings.dim, settings.layers, settings.heads, settings.length, settings.head)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data = weight.data.to(DTYPES[settings.dtype])
    triptych.name_layers(model)
    return model.to(device)


class AdamW:
    """AdamW (Loshchilov and Hutter, 2019) with its state, and a copy of 16-bit weights, in float32.

    Written out because torch.optim imports the compiler, which takes as long as importing torch, and a bisect starts
    this program a dozen times.
    """

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights
        self.masters = [weight.detach().float() for weight in weights]
        self.means = [torch.zeros_like(master) for master in self.masters]
        self.squares = [torch.zeros_like(master) for master in self.masters]
        self.steps = 0

    @torch.no_grad()
    def step(self, lr: float, beta1: float = 0.9, beta2: float = 0.95, decay: float = 0.01, eps: float = 1e-8) -> None:
        self.steps += 1
        correction = math.sqrt(1 - beta2**self.steps)
        for weight, master, mean, square in zip(self.weights, self.masters, self.means, self.squares, strict=True):
            assert weight.grad is not None
            grad = weight.grad.float()
            mean.lerp_(grad, 1 - beta1)
            square.lerp_(grad * grad, 1 - beta2)
            master.mul_(1 - lr * decay)
            master.addcdiv_(mean, square.sqrt().div_(correction).add_(eps), value=-lr / (1 - beta1**self.steps))
            weight.copy_(master)


def schedule(step: int, steps: int) -> float:
    """The learning rate's factor: up over the first tenth, at most 20 steps, then along a cosine to a tenth."""
    warm_up = min(20, max(1, steps // 10))
    if step <= warm_up:
        return step / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all positions, in nats and float32."""
    return functional.cross_entropy(logits.float().view(-1, BYTES), targets.reshape(-1))


@torch.no_grad()
def evaluate(model: Callable[[Tensor], Tensor], data: Tensor, settings: Settings, where: str) -> float:
    """The loss on the same few held-out batches every time, in bits a byte."""
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(HELD_OUT_BATCHES):
        tokens, targets = windows(data, settings.batch, settings.length, generator)
        total += bits(cross_entropy(model(tokens), targets), f"{where}, on held-out text")
    return total / HELD_OUT_BATCHES


def bits(loss: Tensor, where: str) -> float:
    """The loss in bits a byte; FloatingPointError when it is not finite."""
    value = loss.item() / math.log(2)
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the loss is {value} at {where}. A kernel or the settings are at fault: swap the backend "
            f"(TRIPTYCH_BACKEND=torch) to tell which; if it stays, lower --lr."
        )
    return value


# --- what the user sees -----------------------------------------------------------------------------------------------


@contextmanager
def progress(steps: int, console: Console, title: str = "training") -> Iterator[Shown]:
    """A progress bar on a terminal, else a line for the first step, the last, and about ten between."""
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


def summarise(history: History, console: Console) -> None:
    """Print the losses, the speed, and which backends ran."""
    recent = history.train[-max(1, len(history.train) // 10) :]
    print(f"train loss      {sum(recent) / len(recent):.3f} bits/byte (mean of the last {len(recent)} steps)")
    print(f"held-out loss   {', '.join(f'{loss:.3f} at step {step}' for step, loss in history.held_out)} (bits/byte)")
    print(f"speed           {history.tokens_per_second:,.0f} tokens/s")
    summarise_backends(console)


def summarise_backends(console: Console) -> None:
    """Print which backends ran, and under which policy."""
    report = triptych.report()
    print(f"policy          {report.policy}")
    table = Table("op", "phase", "backend", "calls")
    for row in report.rows:
        table.add_row(row.op, row.phase, row.backend, str(row.calls))
    console.print(table)
    for note in report.notes:
        print(note)


# --- the command line -------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> Settings:
    """The settings; wrong ones end the program with exit code 2 and a sentence."""
    parser = options("Train a small Llama-style byte model on real text.")
    settings = Settings(**vars(parser.parse_args(arguments)))
    if found := mistakes(settings):
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


def main(arguments: list[str] | None = None) -> int:
    settings = parse(arguments)
    console = Console()
    try:
        train_data, held_out_data = load(settings)
    except (OSError, ValueError) as cause:
        print(f"train_text.py: error: {cause}", file=sys.stderr)
        return 2
    history = History([], [])
    try:
        with progress(settings.steps, console) as shown:
            train(build_model(settings, train_data.device), settings, train_data, held_out_data, history, shown)
    finally:
        if settings.out is not None:
            record = {"settings": asdict(settings), "history": asdict(history), "unit": "bits per byte"}
            settings.out.write_text(json.dumps(record, default=str, indent=1) + "\n", encoding="utf-8")
    summarise(history, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
