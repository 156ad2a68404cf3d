"""What compiling the analog kernels shows without a GPU: they fit, and no setting and no batch compiles another one.

Each test body runs in a process of its own, where kernels are compiled whatever TRITON_INTERPRET says here.
"""

import os
import subprocess
import sys

import pytest

LAYERS = {
    "even_learned": 'n=256, channels=128, tiles=2, mode="learned", dtype=torch.bfloat16',
    "uneven_dynamic": 'n=250, channels=60, tiles=3, mode="dynamic", dtype=torch.float16',
    "one_tile_fast": 'n=64, channels=33, tiles=1, mode="fast", dtype=torch.float32',
}

TRAIN = """
import random
from collections import Counter
import torch
from triptych_triton.compile_check import stand_in
from triptych_triton.ops import analog_linear, analog_weight, input_range_update, tile_abs_max, tile_std

generator = random.Random(0)
draw, pick = generator.uniform, generator.choice


class Layer:
    def __init__(self, n, channels, tiles, mode, dtype):
        self.n, self.tiles, self.mode, self.dtype = n, tiles, mode, dtype
        self.weight = torch.empty(channels, n, dtype=dtype)
        self.bias = torch.empty(channels, dtype=dtype)
        self.clip = torch.ones(tiles, channels)
        self.input_range = None if mode == "dynamic" else torch.empty(tiles)
        self.seed = torch.zeros(1, dtype=torch.int64)
        self.count = torch.zeros(tiles, dtype=torch.int64)
        self.extreme = torch.zeros(tiles)

    def step(self, rows):
        x = torch.empty(rows, self.n, dtype=self.dtype)
        flag = lambda: generator.random() < 0.5
        tile_abs_max.forward(self.weight, self.tiles)
        tile_std.forward(x, self.tiles)
        if self.input_range is not None:
            rest = (self.tiles, pick(("std", "extremes")), generator.randrange(0, 10**6), draw(0, 5), pick((-1.0, draw(0, 1))))
            input_range_update.forward(x, self.input_range, self.count, self.extreme, self.extreme, *rest)
        # A layer's clip is there or not; here both kinds take turns.
        clip = pick((None, self.clip))
        noise = pick(("none", "per_tensor", "per_channel"))
        scalars = (self.tiles, pick(("none", "per_channel") if clip is not None else ("none", "per_tensor", "per_channel")),
                   pick((draw(0.001, 1), draw(1, 1000), 254.0)), noise, draw(0, 0.1))
        weight, wmax = analog_weight.forward(self.weight, clip, self.seed, *scalars)
        analog_weight.backward(weight, self.weight, clip, *scalars, flag(), flag())
        res = lambda: pick((-1.0, 1.0, 254.0, draw(0.001, 1), draw(1, 1000)))
        out_bound = pick((0.0, 1.0, draw(1, 20)))
        scalars = (self.tiles, self.mode, res(), pick((0.0, 1.0, draw(0, 0.1))), flag(), out_bound,
                   res() if out_bound else -1.0, flag(), pick((0.0, draw(0, 0.1))), draw(0, 1))
        y, bits = analog_linear.forward(x, weight, self.bias, self.input_range, wmax, self.seed, *scalars)
        analog_linear.backward(y, x, weight, self.bias, self.input_range, bits, *scalars, flag(), flag(), flag(), flag())
"""


def compiled(body: str) -> str:
    """The output of `body` in a new process in which kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", body], env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_thousand_settings_compile_at_most_four_variants_of_a_kernel(layer: str) -> None:
    """Noise strengths, resolutions, bounds, grains, wanted gradients and token counts, drawn anew every step."""
    compiled(f"""{TRAIN}
layer = Layer({layer})
with stand_in(90) as recorder:
    for _ in range(1000):
        layer.step(pick((1, 16, generator.randrange(1, 2000))))
variants = Counter(variant.kernel for variant in recorder.variants)
assert recorder.launches > 10_000
assert len(variants) >= 10, variants
assert max(variants.values()) <= 4, variants
print(sum(variants.values()), variants)
""")


def test_what_counts_variants_counts_them() -> None:
    """A step's settings as compile-time constants would be counted: so is a layer of another size."""
    compiled("""
import torch
from triptych_triton.compile_check import stand_in
from triptych_triton.ops import tile_abs_max
with stand_in(90) as recorder:
    for n in (64, 128, 256, 512, 1024):
        tile_abs_max.forward(torch.empty(4, n), 1)
assert len(recorder.variants) == 5
""")


def test_a_small_shared_memory_is_not_refused() -> None:
    """sm_86 and sm_89 have 99 KB: fewer blocks are fetched ahead there, and the same calls run."""
    compiled("""
import torch
from triptych_triton.compile_check import stand_in
from triptych_triton.ops import analog_linear
x, weight = torch.empty(256, 256, dtype=torch.bfloat16), torch.empty(256, 256, dtype=torch.bfloat16)
scalars = (2, "learned", 254.0, 0.1, False, 14.0, 254.0, True, 0.01, 0.95)
with stand_in(86) as recorder:
    analog_linear.forward(x, weight, None, torch.empty(2), torch.empty(2, 256), torch.zeros(1, dtype=torch.int64), *scalars)
assert "_tile_product" in {v.kernel for v in recorder.variants}
assert max(v.shared_bytes for v in recorder.variants) <= 101376
""")
