"""Train an analog byte model under Hugging Face Accelerate: data parallel, or with DeepSpeed's ZeRO-2.

    accelerate launch --config_file examples/configs/accelerate_ddp.yaml examples/train_accelerate.py
    accelerate launch --config_file examples/configs/accelerate_deepspeed_zero2.yaml examples/train_accelerate.py

Needs `pip install accelerate`, for the second also `pip install deepspeed`. The model and the text are those of
train_text.py; its linear layers but for the head are put on analog crossbars: inputs and outputs of 8 bits, learned
input ranges, noise on the weights, weights clipped after every step. Ranges are calibrated before the model is wrapped,
from the same text on every rank; after that each rank draws noise of its own.

Exit codes: 0 done; 1 training failed (a loss that is not finite raises FloatingPointError); 2 wrong use.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import train_text
from accelerate import Accelerator  # type: ignore[import-not-found, unused-ignore]
from byte_model import ByteModel
from parallel import DataParallel, rows_by_ranks, settle, unequal
from rich.console import Console
from text_data import windows
from torch import Tensor
from train_text import History, Settings
from trainer import LARGEST_NORM, bits, schedule

from triptych import analog
from triptych.analog import WeightClipType, WeightNoiseInjectionType

CALIBRATION_BATCHES = 16
CONFIG = analog.AnalogConfig(
    forward=analog.IOParameters(inp_res=254, out_res=254, out_bound=14),
    modifier=analog.WeightModifierParameter(std_dev=0.03, noise_type=WeightNoiseInjectionType.ADD_NORMAL_PER_CHANNEL),
    clip=analog.WeightClipParameter(sigma=2.5, type=WeightClipType.LAYER_GAUSSIAN_PER_CHANNEL),
    mapping=analog.MappingParameter(max_input_size=128),
    pre_post=analog.PrePostProcessingParameter(
        analog.InputRangeParameter(enable=True, init_from_data=CALIBRATION_BATCHES, decay=0.01)
    ),
)


class Accelerated(DataParallel):
    """Trains a network that Accelerate wraps.

    Under DeepSpeed `accelerator.backward` clips the gradients and takes the step too, and what `update` calls for that
    does nothing. So the learning rate of a step is set after the one before.
    """

    def __init__(self, network: ByteModel, settings: Settings, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        if (plugin := accelerator.state.deepspeed_plugin) is not None:  # it would ask a data loader; there is none
            part = settings.batch // dist.get_world_size()
            plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = part
        adamw = torch.optim.AdamW(network.parameters(), lr=settings.lr, betas=(0.9, 0.95))
        self.rates = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: schedule(step + 1, settings.steps))
        self.network, self.adamw = accelerator.prepare(network, adamw)
        self.model = self.network

    def backward(self, tokens: Tensor, targets: Tensor, where: str) -> float:
        self.adamw.zero_grad()
        loss = self.loss(tokens, targets)
        value = bits(self.of_the_whole_batch(loss), where)
        self.accelerator.backward(loss)
        return value

    def update(self, lr: float) -> None:
        self.accelerator.clip_grad_norm_(self.network.parameters(), LARGEST_NORM)
        self.adamw.step()
        self.rates.step()


def build_model(settings: Settings, train_data: Tensor) -> ByteModel:
    """The model on crossbars, the same on every rank, input ranges calibrated on training text."""
    digital = train_text.build_model(settings, train_data.device)
    network = analog.convert_to_analog(digital, CONFIG, exclude="head")
    generator = torch.Generator().manual_seed(0)
    size, length = settings.batch, settings.length
    batches = (windows(train_data, size, length, generator)[0] for _ in range(CALIBRATION_BATCHES))
    analog.calibrate_input_ranges(network, "MovingQuantile", batches, quantile=0.999)
    return network


def parse(arguments: list[str] | None) -> Settings:
    """The settings; wrong ones end the program with exit code 2 and a sentence."""
    parser = train_text.options("Train an analog byte model under Hugging Face Accelerate.")
    parser.set_defaults(dim=64, length=64)
    settings = Settings(**vars(parser.parse_args(arguments)))
    found = train_text.mistakes(settings)
    if not dist.is_initialized():
        found.append(
            "Accelerate has started one process and no process group. Start this by accelerate launch, with a "
            "configuration of examples/configs; without GPUs set ACCELERATE_USE_CPU=true, or for DeepSpeed "
            "DS_ACCELERATOR=cpu."
        )
    elif not found:
        found = unequal(dist.get_world_size(), "--batch", settings.batch)
    if found:
        parser.error(" ".join(found))
    return settings


def main(arguments: list[str] | None = None) -> int:
    accelerator = Accelerator()
    settings = parse(arguments)
    try:
        train_data, held_out_data = train_text.load(settings, accelerator.device)
    except (OSError, ValueError) as cause:
        print(f"train_accelerate.py: error: {cause}", file=sys.stderr)
        return 2
    trainer = Accelerated(build_model(settings, train_data), settings, accelerator)
    torch.manual_seed(settings.seed + dist.get_rank())  # of the noise
    history = History([], [])
    first = dist.get_rank() == 0
    console = Console(quiet=not first)
    with train_text.progress(settings.steps, console) as shown:
        train_text.train(trainer, settings, train_data, held_out_data, history, shown)
    rows = rows_by_ranks()
    if first:
        train_text.write(settings, history)
        train_text.summarise(history, console, rows)
        print(f"wrapped in      {type(trainer.network).__name__}, on {dist.get_world_size()} ranks")
    settle()
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
