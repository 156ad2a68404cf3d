"""Weight clipping under Hugging Face's Trainer and accelerate, which make and wrap their optimisers themselves."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triptych.analog import clipping
from triptych.analog.config import AnalogConfig, WeightClipParameter
from triptych.analog.enums import WeightClipType
from triptych.analog.linear import AnalogLinear

missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}; run `nox -s trainer`"),
    pytest.mark.filterwarnings("default"),  # their own deprecations are theirs
]
SIGMA = 1.5
ROWS = AnalogConfig(clip=WeightClipParameter(sigma=SIGMA, type=WeightClipType.LAYER_GAUSSIAN_PER_CHANNEL))


class Model(nn.Module):
    """Takes and returns what Trainer wants of a model."""

    def __init__(self, config: AnalogConfig) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = AnalogLinear(8, 8, bias=False, rpu_config=config)
        with torch.no_grad():
            self.layer.weight.mul_(4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        return {"loss": (y - labels).square().mean(), "logits": y}


DATA = [{"x": torch.randn(8, generator=torch.Generator().manual_seed(i)), "labels": torch.ones(8)} for i in range(32)]


def arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 4,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
    }


def test_trainer_clips_once_a_step(tmp_path: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ours, manual = Model(ROWS), Model(AnalogConfig())
    changed = 0

    class ByHand(TrainerCallback):  # type: ignore[misc]
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            nonlocal changed
            with torch.no_grad():
                weight = manual.layer.weight
                bound = SIGMA * weight.std(1, keepdim=True)
                changed += bool((weight.abs() > bound).any())
                weight.clamp_(-bound, bound)

    Trainer(model=ours, args=TrainingArguments(**arguments(tmp_path)), train_dataset=DATA).train()
    by_hand = TrainingArguments(**arguments(tmp_path))
    Trainer(model=manual, args=by_hand, train_dataset=DATA, callbacks=[ByHand()]).train()
    assert changed == 4
    torch.testing.assert_close(ours.layer.weight, manual.layer.weight, rtol=1e-5, atol=1e-6)
    values = ours.layer.weight.detach().clone()
    ours.layer(torch.zeros(8))
    assert torch.equal(values, ours.layer.weight), "nothing is left to clip after training"


def test_accelerate_clips_at_the_end_of_an_accumulation() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model(ROWS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    twin = Model(AnalogConfig())
    second = torch.optim.AdamW(twin.parameters(), lr=0.05)
    for micro in range(8):
        batch = {name: value[None] for name, value in DATA[micro].items()}
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch)["loss"])
            wrapped.step()
            wrapped.zero_grad()
        (twin(**batch)["loss"] / 2).backward()
        if micro % 2:
            second.step()
            second.zero_grad()
            twin.layer._config = ROWS
            clipping.clip_weights(twin)
            twin.layer._config = AnalogConfig()
        torch.testing.assert_close(model.layer.weight, twin.layer.weight, rtol=1e-5, atol=1e-6)
