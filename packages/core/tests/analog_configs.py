"""Parts of configurations for tests of analog layers, and what puts them together."""

from __future__ import annotations

from typing import Any

from triptych.analog import AnalogConfig

RANGE = {"pre_post.input_range.enable": True, "pre_post.input_range.init_from_data": 2}
CONVERTERS = {**RANGE, "forward.inp_res": 254, "forward.out_res": 254, "forward.out_bound": 3}
TILES = {"mapping.max_input_size": 5}
LEARNED_CLIP = {"clip.type": "LearnablePerChannel"}
NOISE = {"modifier.noise_type": "AddNormalPerChannel", "modifier.std_dev": 0.1}
QUANTIZED = {"modifier.quantization_type": "DiscretizePerChannel", "modifier.res": 30}


def config(*parts: dict[str, Any]) -> AnalogConfig:
    """The defaults with these settings, by path."""
    return AnalogConfig().replaced({path: value for part in parts for path, value in part.items()})
