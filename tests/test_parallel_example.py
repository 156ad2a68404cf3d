"""train_text.py --parallel: several ranks, under torchrun, train as one process does."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import triptych

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS, EVALUATIONS, MICROBATCHES = 6, 8, 4
SMALL = ("--steps", str(STEPS), "--batch", "8", "--length", "16", "--dim", "32", "--heads", "2")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.two_gpus])]


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("train_text")


@pytest.fixture(scope="module")
def parallel(script: Any) -> Any:
    return importlib.import_module("parallel")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    return file


def torchrun(*arguments: str, ranks: int = 2, **environment: str) -> tuple[int, str]:
    """Run train_text.py on ranks; the exit code, and what it printed, errors included."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")  # a port that is free
    command = [*launcher, *rendezvous, str(EXAMPLES / "train_text.py"), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        try:
            printed, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.terminate()  # then it ends its ranks; killed, it would leave them
            raise
    return process.returncode, printed


def losses(file: Path) -> list[float]:
    """Those of all steps, and at the end that of held-out text."""
    history = json.loads(file.read_text())["history"]
    assert len(history["train"]) == STEPS
    return [*history["train"], *(loss for _, loss in history["held_out"])]


def deviation(found: list[float], expected: list[float]) -> float:
    """The largest of one curve from the other, relative."""
    return max(abs(a - b) / b for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def alone(script: Any, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By head and device: the losses of a run in one process, and how far roundings move them.

    Ranks add the same numbers up in another order. What that may do is measured: each weight at the start one unit in
    the last place up or down, at random, moves every sum of the run by about one rounding.
    """
    known: dict[tuple[str, str], tuple[list[float], float]] = {}
    folder = tmp_path_factory.mktemp("alone")

    def measured(head: str, device: str) -> tuple[list[float], float]:
        if (head, device) not in known:
            curves = []
            for nudge in range(4):
                with pytest.MonkeyPatch.context() as patch:
                    if nudge:
                        patch.setattr(script, "build_model", nudged(script.build_model, nudge))
                    out = folder / f"{nudge}.json"
                    with triptych.use("composite"):
                        arguments = ("--data", str(text), "--head", head, "--device", device, "--out", str(out))
                        script.main([*SMALL, *arguments])
                curves.append(losses(out))
            moved = max(deviation(curve, curves[0]) for curve in curves[1:])
            assert moved < 1e-5, "the run is too unstable to be compared"
            known[head, device] = curves[0], moved
        return known[head, device]

    return measured


def nudged(build: Any, seed: int) -> Any:
    def build_nudged(*arguments: Any) -> Any:
        model = build(*arguments)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                up = torch.rand(weight.shape, generator=generator).to(weight.device) < 0.5
                weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf)))
        return model

    return build_nudged


def calls(printed: str) -> Counter[tuple[str, str, str, str]]:
    """The table of what ran: calls by op, phase, backend and ranks."""
    rows = re.findall(r"│ (\w+) +│ (\w+) +│ (\w+) +│ (\d+) +│ ([\d, -]+?) +│", printed)
    return Counter({(op, phase, backend, ranks): int(n) for op, phase, backend, n, ranks in rows})


def expected_calls(norms: dict[str, tuple[int, int]], backend: str, microbatches: int) -> Counter[Any]:
    """By ranks: how many rms_norms and add_rms_norms a forward pass has there."""
    found: Counter[Any] = Counter()
    for ranks, (alone, added) in norms.items():
        for op, number in (("rms_norm", alone), ("add_rms_norm", added)):
            found[op, "forward", backend, ranks] = number * microbatches * (STEPS + EVALUATIONS)
            found[op, "backward", backend, ranks] = number * microbatches * STEPS
    return found


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("mode", "options", "backend"),
    [
        ("ddp", (), "torch"),
        ("fsdp", (), "composite"),
        ("tp", (), "torch"),
        ("pp", ("--schedule", "1f1b"), "composite"),
        ("pp", ("--schedule", "gpipe"), "torch"),
    ],
)
def test_the_losses_are_those_of_one_process(
    alone: Any, text: Path, tmp_path: Path, mode: str, options: tuple[str, ...], backend: str, device: str
) -> None:
    out = tmp_path / "out.json"
    head = "untied" if mode == "pp" else "tied"
    shared = (*SMALL, "--data", str(text), "--head", head, "--device", device, "--out", str(out))
    code, printed = torchrun("--parallel", mode, *options, *shared, TRIPTYCH_BACKEND=backend)
    assert code == 0, printed
    expected, moved = alone(head, device)
    # What a nudge does is done again by each of the few sums of a step that ranks share; the losses are float32 too.
    assert deviation(losses(out), expected) <= 8 * max(moved, torch.finfo(torch.float32).eps)
    norms = {"0": (1, 1), "1": (2, 1)} if mode == "pp" else {"0-1": (3, 2)}
    assert calls(printed) == expected_calls(norms, backend, MICROBATCHES if mode == "pp" else 1)
    assert printed.count("held-out loss") == 1, "one rank prints"
    for step in range(1, STEPS + 1):
        assert printed.count(f"step {step}/{STEPS}") == 1


@pytest.mark.slow
def test_a_loss_that_is_not_finite_fails_the_run(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = (*SMALL, "--data", str(text), "--device", "cpu", "--lr", "1e30", "--out", str(out))
    code, printed = torchrun("--parallel", "fsdp", *options, TRIPTYCH_BACKEND="torch")
    assert code == 1
    assert re.search(r"\[rank[01]\]: FloatingPointError: the loss is (nan|inf) at step [2-6]", printed), printed
    assert "held-out loss" not in printed


@pytest.mark.slow
def test_ranks_that_cannot_share_the_batch_are_told(text: Path) -> None:
    code, printed = torchrun("--parallel", "ddp", *SMALL, "--batch", "7", "--data", str(text), "--device", "cpu")
    assert code == 1
    assert "--parallel ddp: --batch is 7. It must be a multiple of 2, the number of ranks, such as 6, 8." in printed
    assert "step 1/" not in printed


def test_a_run_in_one_process_imports_nothing_that_it_does_not_need(text: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import train_text; train_text.main(sys.argv[1:])\n"
        "late = ('parallel', 'torch._dynamo', 'torch.distributed.tensor', 'torch.distributed.fsdp')\n"
        "print(*(name for name in late if name in sys.modules), file=sys.stderr)"
    )
    arguments = (*SMALL, "--steps", "1", "--data", str(text), "--device", "cpu")
    environment = {**os.environ, "TRIPTYCH_BACKEND": "torch"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stderr.split() == []
    assert re.search(r"rms_norm +│ backward │ torch", done.stdout)


# --- wrong use --------------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the environment as a launcher of so many ranks would."""

    def launch(ranks: int) -> None:
        found = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": 1}
        for name, value in {**found, "MASTER_ADDR": "localhost"}.items():
            monkeypatch.setenv(name, str(value))

    return launch


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (2, "ddp --batch 7", "--batch is 7. It must be a multiple of 2, the number of ranks, such as 6, 8."),
        (4, "fsdp --batch 2", "--batch is 2. It must be a multiple of 4, the number of ranks, such as 4."),
        (2, "tp --heads 1", "--heads is 1. It must be a multiple of 2, the number of ranks, such as 2."),
        (2, "tp --length 33", "--length is 33. It must be a multiple of 2, the number of ranks, such as 32, 34."),
        (3, "tp --heads 3 --dim 48 --length 33", "3 ranks cannot share out 256 bytes and a feed-forward 128 wide"),
        (2, "tp --compile", "the model cannot be compiled in this mode. Leave --compile out."),
        (3, "pp --head untied", "--layers is 2. It must be at least 3: each rank holds whole blocks."),
        (2, "pp", "each would train its own copy. Use --head untied."),
        (2, "pp --head untied --microbatches 3", "must be a multiple of 3, the number of microbatches, such as 6, 9."),
        (2, "pp --head untied --microbatches 1", "--microbatches is 1. It must be at least 2, the number of ranks."),
        (2, "pp --head untied --microbatches 0", "--microbatches is 0. It must be at least 2, the number of ranks."),
        (2, "pp --head untied --compile", "traced in this mode and cannot be compiled. Leave --compile out."),
    ],
)
def test_what_ranks_cannot_do_is_told(
    script: Any, launched: Any, capsys: Any, ranks: int, options: str, message: str
) -> None:
    launched(ranks)
    with pytest.raises(SystemExit, match=r"^2$"):
        script.parse([*SMALL, "--device", "cpu", "--parallel", *options.split()])
    assert message in capsys.readouterr().err


def test_a_process_that_no_launcher_started_is_told(script: Any, parallel: Any, capsys: Any, launched: Any) -> None:
    launched(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK")
        patch.delenv("MASTER_PORT")
        with pytest.raises(SystemExit, match=r"^2$"):
            script.parse([*SMALL, "--device", "cpu", "--parallel", "tp"])
    shown = capsys.readouterr().err
    assert "--parallel tp: the environment lacks RANK, MASTER_PORT: this process was not started as a rank." in shown
    assert "torchrun --nproc-per-node 2 examples/train_text.py --parallel tp" in shown


def test_too_few_gpus_are_told(parallel: Any, script: Any, launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = script.parse([*SMALL, "--device", "cpu"])
    launched(2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (mistake,) = parallel.mistakes(dataclasses.replace(settings, parallel="ddp"), "cuda")
    assert mistake == (
        "--parallel ddp: this machine has 2 ranks and 1 CUDA devices; each rank needs its own. "
        "Start at most 1 ranks on it, or use --device cpu."
    )


# --- parts ------------------------------------------------------------------------------------------------------------


def test_ranks_are_told_as_spans(parallel: Any) -> None:
    assert parallel.spans([0]) == "0"
    assert parallel.spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_fused_rows_are_shared_out_part_by_part(parallel: Any) -> None:
    linear = torch.nn.Linear(1, 12, bias=False)
    linear.weight.data = torch.arange(12.0)[:, None]
    parallel.share_rows_out(linear, 3, 2)  # three parts of four rows; two ranks
    assert linear.weight.flatten().tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
