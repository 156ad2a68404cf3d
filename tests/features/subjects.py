"""What the feature tests put through PyTorch: small models around each op, and what they must come out equal to.

A subject is a residual block, [B, S, WIDTH] to the same. `ops` are the operators that one training step of it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import triptych
from triptych.analog import AnalogConfig, AnalogLinear
from triptych.layers import AddRMSNorm, RMSNorm

BACKENDS = ("composite", "torch", "triton", "cuda")
WIDTH = 32
"""Two analog tiles of 16; even in eights, so that packed bits divide over ranks."""


class Norm(nn.Module):
    """x + W norm(x)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps=1e-6)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.linear(self.norm(x))
        return out


class AddNorm(nn.Module):
    """y + h of the fused residual addition and norm."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = AddRMSNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.norm(self.linear(x), x)
        out: Tensor = y + h
        return out


class Analog(nn.Module):
    """An MLP of two analog layers, as the feed-forward part of a block."""

    def __init__(self, config: AnalogConfig, width: int = WIDTH) -> None:
        super().__init__()
        self.up = AnalogLinear(width, 2 * width, rpu_config=config)
        self.down = AnalogLinear(2 * width, width, rpu_config=config)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


CONVERTERS = {
    "forward.inp_res": 254,
    "forward.out_res": 254,
    "forward.out_bound": 8,
    "pre_post.input_range.enable": True,
    "mapping.max_input_size": 16,
}
CALIBRATED = {"pre_post.input_range.init_from_data": 2}
UNCALIBRATED = {"pre_post.input_range.init_from_data": 0}
NOISE = {"forward.out_noise": 0.01, "modifier.noise_type": "AddNormal", "modifier.std_dev": 0.03}
WEIGHTS = {"modifier.quantization_type": "DiscretizePerChannel", "modifier.res": 254}
GAUSSIAN = {"clip.type": "LayerGaussian", "clip.sigma": 2.5}


def config(*parts: dict[str, object]) -> AnalogConfig:
    """The defaults with these settings, by path."""
    return AnalogConfig().replaced({path: value for part in parts for path, value in part.items()})


@dataclass(frozen=True)
class Subject:
    """A model and the ops that it is about.

    Attributes:
        make: a new block of a width, on the CPU, in float32; parameters as the layers initialise them.
        ops: the operators that one training step runs.
        random: whether its forward draws noise.
    """

    make: Callable[[], nn.Module]
    ops: tuple[str, ...]
    random: bool = False


SUBJECTS: dict[str, Subject] = {
    "rms_norm": Subject(Norm, ("rms_norm",)),
    "add_rms_norm": Subject(AddNorm, ("add_rms_norm",)),
    "analog": Subject(
        lambda: Analog(config(CONVERTERS, UNCALIBRATED)),
        ("tile_abs_max", "analog_linear"),
    ),
    "analog_calibrating": Subject(
        lambda: Analog(config(CONVERTERS, CALIBRATED, WEIGHTS)),
        ("input_range_update", "analog_weight", "analog_linear"),
    ),
    "analog_noise": Subject(
        lambda: Analog(config(CONVERTERS, UNCALIBRATED, WEIGHTS, NOISE)), ("analog_weight", "analog_linear"), True
    ),
    "analog_clipped": Subject(
        lambda: Analog(config(CONVERTERS, UNCALIBRATED, GAUSSIAN)),
        ("tile_abs_max", "analog_linear"),
    ),
}
DETERMINISTIC = tuple(name for name, subject in SUBJECTS.items() if not subject.random)


def build(name: str, device: str = "cpu", blocks: int = 2) -> nn.Sequential:
    """`blocks` blocks of a subject, of fixed random weights, on a device, layers named."""
    with torch.random.fork_rng():  # of every device: manual_seed sets them all
        torch.manual_seed(1)
        model = nn.Sequential(*(SUBJECTS[name].make() for _ in range(blocks)))
        for path, parameter in model.named_parameters():
            if path.endswith("norm.weight"):
                nn.init.normal_(parameter, 1.0, 0.1)
    triptych.name_layers(model)
    return model.to(device)


def batch(device: str = "cpu", rows: int = 4, length: int = 6, number: int = 0) -> Tensor:
    """[rows, length, WIDTH], the same on every rank; `number` makes another one."""
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(rows, length, WIDTH, generator=generator).to(device)


def step(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Forward, loss, backward; the loss, detached."""
    loss = model(x).square().mean()
    torch.autograd.backward(loss)
    return loss.detach()


def counts() -> Counter[tuple[str, str, str]]:
    """Calls so far in this process, by (op, phase, backend)."""
    return Counter({(row.op, row.phase, row.backend): row.calls for row in triptych.report().rows})


@contextmanager
def ran_on(backend: str, name: str) -> Iterator[None]:
    """Assert that the block runs every op of a subject, on `backend`, and nothing on another one."""
    before = counts()
    yield
    found = counts() - before
    ops, backends = {op for op, _, _ in found}, {each for _, _, each in found}
    missing = set(SUBJECTS[name].ops) - ops
    assert not missing and backends == {backend}, f"expected {SUBJECTS[name].ops} on {backend}; ran {dict(found)}"


def assert_close(found: Tensor, expected: Tensor, what: str = "", factor: float = 1.0) -> None:
    """Assert that two results of one computation in another order of summation agree.

    Sums over at most a few hundred terms, in two layers: a few hundred roundings of float32 relative to the largest
    term. Taken over the whole tensor, since terms cancel. NaN never passes.
    """
    assert found.shape == expected.shape, f"{what}: {list(found.shape)}, expected {list(expected.shape)}"
    error = (found.double() - expected.double()).abs().max()
    bound = factor * 512 * torch.finfo(torch.float32).eps * expected.double().abs().max().clamp_min(1e-6)
    assert bool(error <= bound), f"{what}: off by {error:.3g}, bound {bound:.3g}"
