"""The configurations that are compared: every pair of settings, and random combinations beyond.

Left out: what the reference refuses (a DAC, an ADC or output noise without an input range, a learned clip with one step
a tile, groups, padding modes), and what is different on purpose (test_differences.py).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from triptych.analog import (
    AnalogConfig,
    InputRangeParameter,
    IOParameters,
    MappingParameter,
    PrePostProcessingParameter,
    WeightClipParameter,
    WeightModifierParameter,
)

RANGES: dict[str, dict[str, Any]] = {
    "off": {},
    "learned": {"enable": True},
    "learned,decay": {"enable": True, "decay": 0.1, "input_min_percentage": 0.7},
    "static": {"enable": True, "learn_input_range": False},
    "fixed": {"enable": True, "init_from_data": 0},
    "dynamic": {"enable": True, "dynamic": True},
    "fast": {"enable": True, "fast_mode": True, "act_range_momentum": 0.9},
    "fast,extremes": {"enable": True, "fast_mode": True, "act_range_momentum": -1},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "range": tuple(RANGES),
    "inp_res": (-1, 254, 1 / 254, 30),
    "out": ("none", "bound", "bound,254", "bound,1/30"),
    "out_noise": ("none", "tensor", "channel"),
    "quantization": ("None", "Discretize", "DiscretizePerChannel"),
    "res": (254, 1 / 14),
    "noise": ("None", "AddNormal", "AddNormalPerChannel"),
    "clip": ("None", "LayerGaussian", "LayerGaussianPerChannel", "LearnablePerChannel"),
    "tiles": ("one", "even", "uneven"),
    "bias": (True, False),
    "dims": (1, 2, 3),
}
INPUTS = {"one": (13, -1), "even": (24, 8), "uneven": (23, 9)}
SHAPES: dict[int, tuple[int, ...]] = {1: (), 2: (5,), 3: (2, 3)}
OUTPUTS = 6
CALIBRATION = 3
COUNT = 480


@dataclass(frozen=True)
class Case:
    """One combination, and its number, from which its random numbers follow."""

    number: int
    values: tuple[Any, ...]

    def __getitem__(self, factor: str) -> Any:
        return self.values[list(FACTORS).index(factor)]

    def __str__(self) -> str:
        return f"{self.number}-" + "-".join(str(round(v, 4) if isinstance(v, float) else v) for v in self.values)

    @property
    def inputs(self) -> int:
        return INPUTS[self["tiles"]][0]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*SHAPES[self["dims"]], self.inputs)

    @property
    def config(self) -> AnalogConfig:
        range_ = {"init_value": 1.3, "init_from_data": CALIBRATION, "init_std_alpha": 1.4, **RANGES[self["range"]]}
        out_res = {"none": -1, "bound": -1, "bound,254": 254, "bound,1/30": 1 / 30}[self["out"]]
        quantization = self["quantization"]
        return AnalogConfig(
            forward=IOParameters(
                inp_res=self["inp_res"],
                out_noise=0.0 if self["out_noise"] == "none" else 0.05,
                out_noise_per_channel=self["out_noise"] == "channel",
                out_bound=0.0 if self["out"] == "none" else 1.1,
                out_res=out_res,
            ),
            clip=WeightClipParameter(sigma=1.5, type=self["clip"]),
            modifier=WeightModifierParameter(
                std_dev=0.1 if self["noise"] != "None" else 0.0,
                res=self["res"] if quantization != "None" else 0,
                noise_type=self["noise"],
                quantization_type=quantization,
            ),
            mapping=MappingParameter(max_input_size=INPUTS[self["tiles"]][1]),
            pre_post=PrePostProcessingParameter(InputRangeParameter(**range_)),
        )


def possible(values: dict[str, Any]) -> bool:
    """Whether the reference accepts a combination (of some or all factors)."""
    if values.get("range") == "off" and (
        values.get("inp_res", -1) > 0
        or values.get("out", "none") != "none"
        or values.get("out_noise", "none") != "none"
    ):
        return False
    if values.get("res", 254) != 254 and values.get("quantization", "Discretize") == "None":
        return False  # the same as res 254
    return not (values.get("clip") == "LearnablePerChannel" and values.get("quantization") == "Discretize")


def pairs() -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every pair of values of two factors that can go together."""
    for one, two in itertools.combinations(FACTORS, 2):
        for a, b in itertools.product(FACTORS[one], FACTORS[two]):
            if possible({one: a, two: b}):
                yield (one, a), (two, b)


def cases() -> list[Case]:
    """COUNT combinations: first those that cover every pair, then random ones."""
    dice = random.Random(2611)
    missing = set(pairs())
    found: dict[tuple[Any, ...], None] = {}
    while len(found) < COUNT:
        drawn = [{name: dice.choice(options) for name, options in FACTORS.items()} for _ in range(40)]
        drawn = [values for values in drawn if possible(values) and tuple(values.values()) not in found]
        covered = [missing & set(itertools.combinations(values.items(), 2)) for values in drawn]
        best = max(range(len(drawn)), key=lambda index: len(covered[index])) if missing else 0
        missing -= covered[best]
        found[tuple(drawn[best].values())] = None
    assert not missing, f"pairs that no case has: {missing}"
    return [Case(number, values) for number, values in enumerate(found)]
