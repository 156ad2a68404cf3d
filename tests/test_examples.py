"""The examples do what they say: the training scripts train, compare and report."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import triptych
import triptych.analog
from triptych.testing.running import counts

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ("--steps", "4", "--batch", "2", "--length", "16", "--dim", "16", "--heads", "2", "--device", "cpu")
TEXT = b"the quick brown fox jumps over the lazy dog. " * 200


def ran_during(work: Callable[[], object]) -> dict[tuple[str, str, str], int]:
    """How many calls ran, by (op, phase, backend)."""
    before = counts()
    work()
    return dict(counts() - before)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("train_text")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_bytes(TEXT)
    return file


# --- train_text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["composite", "torch"])
def test_training_lowers_the_loss_on_the_backend_asked_for(
    script: Any, tmp_path: Path, backend: str, capsys: Any
) -> None:
    out = tmp_path / "history.json"
    arguments = ["--steps", "30", "--batch", "4", "--length", "64", "--dim", "64", "--device", "cpu", "--out", str(out)]
    with triptych.use(backend):
        ran = ran_during(lambda: script.main(arguments))
    forwards = 30 + script.HELD_OUT_BATCHES
    assert ran == {
        ("rms_norm", "forward", backend): 3 * forwards,
        ("rms_norm", "backward", backend): 3 * 30,
        ("add_rms_norm", "forward", backend): 2 * forwards,
        ("add_rms_norm", "backward", backend): 2 * 30,
    }
    history = json.loads(out.read_text())["history"]
    assert len(history["train"]) == 30
    assert history["train"][0] > 7
    assert max(history["train"][-3:]) < 6
    assert [step for step, _ in history["held_out"]] == [30]
    assert history["held_out"][0][1] < 6
    shown = capsys.readouterr().out
    assert "step 30/30" in shown
    assert "held-out loss" in shown
    assert "tokens/s" in shown
    assert backend in shown


def test_a_seed_repeats_the_run_and_another_does_not(script: Any, text: Path, tmp_path: Path) -> None:
    losses = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        script.main([*SMALL, "--data", str(text), "--seed", str(seed), "--out", str(tmp_path / name)])
        losses.append(json.loads((tmp_path / name).read_text())["history"]["train"])
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


@pytest.mark.parametrize("options", [("--dtype", "bfloat16"), ("--head", "untied"), ("--eval-every", "2")])
def test_options_run(script: Any, text: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    out = tmp_path / "history.json"
    script.main([*SMALL, "--data", str(text), "--steps", "20", "--lr", "0.02", *options, "--out", str(out)])
    history = json.loads(out.read_text())["history"]
    assert history["train"][-1] < history["train"][0] - 1
    assert len(history["held_out"]) == (10 if "--eval-every" in options else 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_model_trains_like_an_eager_one(script: Any, text: Path, tmp_path: Path) -> None:
    losses = []
    for name, options in (("eager", ()), ("compiled", ("--compile",))):
        out = tmp_path / name
        with triptych.use("torch"):
            ran = ran_during(lambda: script.main([*SMALL, "--data", str(text), *options, "--out", str(out)]))  # noqa: B023
        assert ran["rms_norm", "backward", "torch"] == 12
        losses.append(json.loads(out.read_text())["history"]["train"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_layers_are_named_by_their_place(script: Any) -> None:
    model = script.build_model(script.parse(list(SMALL)), torch.device("cpu"))
    names = [module.layer_name for module in model.modules() if hasattr(module, "layer_name")]
    norms = [f"blocks.{block}.{norm}" for block in (0, 1) for norm in ("attention_norm", "ffn_norm")]
    assert names == [*norms, "final_norm"]


def test_a_loss_that_is_not_finite_names_the_step_and_keeps_the_history(
    script: Any, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "history.json"
    with pytest.raises(FloatingPointError, match=r"the loss is (nan|inf) at step \d\.") as caught:
        script.main([*SMALL, "--data", str(text), "--lr", "1e30", "--out", str(out)])
    steps = len(json.loads(out.read_text())["history"]["train"])
    assert steps >= 1
    assert f"at step {steps + 1}." in str(caught.value)


def test_a_folder_is_read_in_the_order_of_its_names(script: Any, tmp_path: Path) -> None:
    for name, content in (("b", b"2"), ("a", b"1"), ("c/d", b"3"), (".hidden", b"x"), ("binary", b"x\0"), ("z", b"")):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    assert script.read_text(tmp_path) == b"123"


def test_the_standard_library_is_long_enough_and_capped(script: Any) -> None:
    text = script.read_text(None)
    assert 1 << 20 < len(text) <= sys.modules["text_data"].MAX_DATA
    assert text == script.read_text(None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "0"), "--steps is 0. It must be at least 1."),
        (("--dim", "30", "--heads", "4"), "dim must be an even multiple of heads, such as 24."),
        (("--dim", "12", "--heads", "4"), "dim must be an even multiple of heads, such as 8."),
        (("--lr", "nan"), "--lr is nan. It must be a finite number above 0."),
        (("--eval-every", "-1"), "--eval-every is -1. It must be a number of steps, or 0."),
        (("--out", "/no/such/folder/out.json"), "--out /no/such/folder/out.json: it cannot be written"),
        (("--data", "/no/such/text"), "--data /no/such/text: there is no such file or folder."),
        (("--data", "{empty}"), "holds no text. Name a text file"),
        (("--data", "{short}"), "the text has 100 bytes; --length 16 needs at least 180."),
        (("--dtype", "float8"), "invalid choice"),
    ],
)
def test_wrong_use_is_told_before_anything_runs(
    script: Any, tmp_path: Path, capsys: Any, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"x" * 100)
    options = tuple(part.format(empty=tmp_path / "empty", short=tmp_path / "short") for part in options)

    def work() -> None:
        with pytest.raises(SystemExit, match=r"^2$"):
            sys.exit(script.main([*SMALL, *options]))

    assert ran_during(work) == {}
    assert message in capsys.readouterr().err


def test_cuda_without_a_device_is_told(script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        script.main([*SMALL, "--device", "cuda"])
    assert "finds no CUDA device. Use --device cpu or auto." in capsys.readouterr().err


# --- train_analog -------------------------------------------------------------------------------------------------------

ANALOG = ("--steps", "3", "--analog-steps", "4", "--batch", "2", "--length", "16", "--dim", "16", "--layers", "1",
          "--heads", "2", "--tile", "16", "--draws", "2", "--device", "cpu")  # fmt: skip


@pytest.fixture
def analog_script(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """train_analog, evaluating on one batch."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(script, "HELD_OUT_BATCHES", 1)
    return importlib.import_module("train_analog")


@pytest.mark.parametrize("backend", ["composite", "torch"])
def test_the_analog_comparison_is_printed_drawn_and_written(
    analog_script: Any, text: Path, tmp_path: Path, backend: str, capsys: Any
) -> None:
    out, plot = tmp_path / "numbers.json", tmp_path / "plot.svg"
    with triptych.use(backend):
        ran = ran_during(
            lambda: analog_script.main([*ANALOG, "--data", str(text), "--out", str(out), "--plot", str(plot)])
        )
    assert {name for _, _, name in ran} == {backend}
    assert ran["analog_linear", "backward", backend] == 4 * 4  # four layers, four steps
    assert ran["analog_weight", "forward", backend] > 2 * 4 * 4
    written = json.loads(out.read_text())
    assert {title: len(each["train"]) for title, each in written["histories"].items()} == {
        "digital": 3,
        "digital twin": 4,
        "hardware-aware": 4,
    }
    assert triptych.analog.AnalogConfig.from_dict(written["config"]).forward.out_res == 254
    rows = written["rows"]
    assert [row["kind"] for row in rows] == ["noise"] * len(analog_script.STRENGTHS) + ["drift"] * len(
        analog_script.TIMES
    )
    for row in rows:
        draws = 1 if row["amount"] == 0 else 2
        for losses in (row["digital"], row["analog"]):
            assert len(losses) == draws
            assert all(0 < loss < 10 for loss in losses)
    assert "<svg" in plot.read_text()
    shown = capsys.readouterr().out
    assert "trained digitally" in shown
    assert "noise 0.3" in shown
    assert "10 years" in shown
    assert shown.count(" ± ") == 2 * (len(rows) - 1)
    assert f"plot            {plot}" in shown


def test_an_analog_seed_repeats_the_comparison(analog_script: Any, text: Path, tmp_path: Path) -> None:
    rows = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        analog_script.main([*ANALOG, "--data", str(text), "--seed", str(seed), "--out", str(tmp_path / name)])
        rows.append(json.loads((tmp_path / name).read_text())["rows"])
    assert rows[0] == rows[1]
    assert rows[0] != rows[2]


def test_a_plot_may_be_a_png(analog_script: Any, tmp_path: Path) -> None:
    rows = [
        analog_script.Row(kind, "", amount, [2.0 + amount, 2.5], [1.5, 2.0])
        for kind, amount in (("noise", 0.0), ("noise", 0.1), ("drift", 20.0), ("drift", 3600.0))
    ]
    analog_script.draw_plot(rows, 1.0, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_weights_are_clipped_after_the_steps_of_an_optimizer_of_its_own(
    analog_script: Any, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triptych.analog, "clip_weights", lambda model: None)  # the layers have done it by themselves
    settings = analog_script.parse([*ANALOG, "--analog-steps", "30", "--lr", "0.05", "--data", str(text)])
    data = sys.modules["train_text"].load(settings)
    *_, digital, trained = analog_script.train(settings, *data, analog_script.Console())
    peaks = []
    for network in (digital.network, trained.network):
        weight = network.blocks[0].ffn.down.weight.detach()
        peaks.append((weight.abs().amax(1) / weight.std(1)).max().item())
    assert peaks[0] > 3
    assert peaks[1] < 2.7  # over 2.5: clipping makes the deviation smaller, and there was one more step


def test_the_head_stays_digital_and_tied(analog_script: Any) -> None:
    settings = analog_script.parse(list(ANALOG))
    model = sys.modules["train_text"].build_model(settings, torch.device("cpu"))
    mapped = triptych.analog.convert_to_analog(
        model, analog_script.configuration(settings), exclude=analog_script.DIGITAL
    )
    names = [name for name, _ in triptych.analog.named_analog_layers(mapped)]
    assert names == [f"blocks.0.{name}" for name in ("attention.qkv", "attention.out", "ffn.gate_up", "ffn.down")]
    assert mapped.head.weight is mapped.embedding.weight


def test_cells_are_noisy_and_drift_and_give_the_weights_back(analog_script: Any) -> None:
    cells = sys.modules["memory_cells"]
    settings = analog_script.parse([*ANALOG, "--dim", "128", "--tile", "100"])
    model = sys.modules["train_text"].build_model(settings, torch.device("cpu"))
    mapped = triptych.analog.convert_to_analog(model, analog_script.configuration(settings), exclude="head")
    layer = mapped.blocks[0].attention.qkv
    assert layer.in_sizes == (64, 64)
    ideal = layer.weight.detach().clone()

    def after(*changes: Any, draw: int = 0) -> torch.Tensor:
        with cells.programmed(mapped, changes, draw):
            return layer.weight.detach().clone()

    noisy = after(cells.noise(0.1))
    for tile in (slice(0, 64), slice(64, 128)):
        relative = (noisy - ideal)[:, tile] / ideal[:, tile].abs().amax(1, keepdim=True)
        assert relative.std().item() == pytest.approx(0.1, rel=0.05)
    assert torch.equal(noisy, after(cells.noise(0.1)))
    assert not torch.equal(noisy, after(cells.noise(0.1), draw=1))
    assert torch.allclose(after(cells.drift(20.0)), ideal, rtol=1e-5, atol=0)
    year, hour = after(cells.drift(3.15e7)), after(cells.drift(3600.0))
    assert year.abs().sum().item() == pytest.approx(ideal.abs().sum().item(), rel=1e-5)
    assert (year - ideal).norm() > 2 * (hour - ideal).norm() > 0
    assert torch.equal(year.sign(), ideal.sign())
    assert torch.equal(layer.weight, ideal)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "0"), "--steps is 0. It must be at least 1."),
        (("--analog-steps", "0"), "--analog-steps is 0. It must be at least 1."),
        (("--tile", "0"), "--tile is 0. It must be at least 1."),
        (("--draws", "1"), "--draws is 1. It must be at least 2."),
        (("--noise", "nan"), "--noise is nan. It must be a number above 0 and below 1, such as 0.15."),
        (("--noise", "0"), "--noise is 0.0. It must be a number above 0 and below 1, such as 0.15."),
        (("--dtype", "bfloat16"), "--dtype is bfloat16. It must be float32: the optimizer keeps a float32 copy"),
        (("--plot", "a.pdf"), "--plot a.pdf: the suffix is '.pdf'. It must be .png or .svg."),
        (("--plot", "/no/such/folder/a.png"), "--plot /no/such/folder/a.png: it cannot be written"),
        (("--data", "/no/such/text"), "train_analog.py: error: --data /no/such/text: there is no such file or folder."),
    ],
)
def test_wrong_use_of_the_analog_example_is_told_before_anything_runs(
    analog_script: Any, capsys: Any, options: tuple[str, ...], message: str
) -> None:
    def work() -> None:
        with pytest.raises(SystemExit, match=r"^2$"):
            sys.exit(analog_script.main([*ANALOG, *options]))

    assert ran_during(work) == {}
    assert message in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_told(analog_script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        analog_script.main([*ANALOG, "--plot", "a.svg"])
    expected = "--plot needs matplotlib, which is not installed. Run pip install matplotlib, or leave --plot out."
    assert expected in capsys.readouterr().err
