"""A training job under DeepSpeed, twice: clipped by Triptych, and by hand after each step. Run by test_deepspeed.py.

python deepspeed_job.py STAGE DTYPE RANK WORLD FILE
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

STAGE, DTYPE, RANK, WORLD, FILE = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5]
os.environ.update(DS_ACCELERATOR="cpu", RANK=RANK, WORLD_SIZE=WORLD, LOCAL_RANK=RANK, LOCAL_SIZE=WORLD)

import deepspeed  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from triptych.analog import clipping  # noqa: E402
from triptych.analog.config import AnalogConfig, WeightClipParameter  # noqa: E402
from triptych.analog.enums import WeightClipType  # noqa: E402
from triptych.analog.linear import AnalogLinear  # noqa: E402

SIGMA = 1.5
KINDS = (WeightClipType.LAYER_GAUSSIAN_PER_CHANNEL, WeightClipType.LAYER_GAUSSIAN, WeightClipType.LEARNABLE_PER_CHANNEL)
CONFIGS = [AnalogConfig(clip=WeightClipParameter(sigma=SIGMA, type=kind)) for kind in KINDS]
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_of(configs: list[AnalogConfig]) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [AnalogLinear(8, 8, rpu_config=config) for config in configs]
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(10)  # type: ignore[operator]
    return nn.Sequential(*layers)


def engine_of(model: nn.Module) -> Any:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": STAGE},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if DTYPE == "bfloat16":
        settings["bf16"] = {"enabled": True}
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def clip_by_hand(model: nn.Sequential) -> None:
    """The masters, and the weights as DeepSpeed copies them."""
    for layer, kind in zip(model, KINDS, strict=True):
        whole = kind is WeightClipType.LAYER_GAUSSIAN
        if kind is WeightClipType.LEARNABLE_PER_CHANNEL:
            continue
        master = safe_get_full_fp32_param(layer.weight)
        exact = master.double()
        bound = SIGMA * (exact.std() if whole else exact.std(1, keepdim=True))
        master.copy_(exact.clamp(-bound, bound))
        safe_set_full_fp32_param(layer.weight, master)
        with deepspeed.zero.GatheredParameters([layer.weight], modifier_rank=0, enabled=STAGE == 3):
            layer.weight.data.copy_(master)


def masters(model: nn.Module) -> list[Tensor]:
    return [safe_get_full_fp32_param(parameter) for parameter in model.parameters()]


def main() -> None:
    rendezvous = {"init_method": f"file://{FILE}", "rank": int(RANK), "world_size": int(WORLD)}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, **rendezvous)
    plain = [config if config.clip.type is KINDS[2] else AnalogConfig() for config in CONFIGS]
    ours, manual = model_of(CONFIGS), model_of(plain)
    engines = [engine_of(ours), engine_of(manual)]
    changed = 0
    for step in range(8):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + int(RANK))).to(TYPES[DTYPE])
        for engine in engines:
            engine.backward(engine(x).square().mean())
            engine.step()
        if step % 2 == 1:
            before = masters(manual)
            clip_by_hand(manual)
            changed += sum(not torch.equal(a, b) for a, b in zip(before, masters(manual), strict=True))
        for mine, theirs in zip(masters(ours), masters(manual), strict=True):
            # Eight roundings of a bound, through the four steps of AdamW that see it.
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        if STAGE < 3 and step % 2 == 1:
            for parameter, master in zip(ours.parameters(), masters(ours), strict=True):
                assert torch.equal(parameter, master.to(parameter.dtype)), "the weights are not the masters' copies"
    assert changed == 8, f"two layers should have been clipped in each of four steps: {changed}"
    clipping.clip_weights(ours)
    clip_by_hand(manual)
    for mine, theirs in zip(masters(ours), masters(manual), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    print("agreed", flush=True)


main()
