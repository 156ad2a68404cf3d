"""What compiling shows without a GPU: every kernel builds, fits, and builds once.

Each test body runs in a process of its own, where kernels are compiled whatever TRITON_INTERPRET says here.
"""

import os
import subprocess
import sys

import pytest


def compiled(body: str) -> str:
    """The output of `body` in a new process in which kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", body], env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("cc", [80, 90])
def test_every_kernel_compiles_and_fits(cc: int) -> None:
    """Also that none falls off the assembler's cliff, where a thread spills a kilobyte instead of some registers."""
    compiled(f"""
from triptych_triton.compile_check import compile_everything
variants = compile_everything({cc})
assert {{v.kernel for v in variants}} == {{
    "_forward_whole_rows", "_forward_wide_rows", "_walk_rows", "_dot_along_rows", "_add_partials",
    "_abs_max", "_moments", "_extremes", "_std", "_update_from_std", "_update_from_extremes",
    "_modify", "_clip_gradients", "_convert", "_multiply", "_tile_product", "_adc_steps",
    "_clamp_gradients", "_range_gradient", "_mask_clipped", "_sum_rows"}}
for v in variants:
    assert v.cc == {cc} and v.shared_bytes <= 232448, v
    # Two accumulators and the periphery of a tile do not fit the registers of the product with output noise; what
    # spills is read after a tile's last block, not in its loop.
    assert v.spilled_bytes is None or v.spilled_bytes <= (1536 if v.kernel == "_tile_product" else 512), v
""")


def test_a_small_shared_memory_is_not_refused() -> None:
    """sm_86 and sm_89 have 99 KB: fewer rows are fetched ahead there, and the same calls run."""
    compiled("""
import torch
from triptych_triton.compile_check import stand_in
from triptych_triton.ops import add_rms_norm
x = torch.empty(64, 16384)
with stand_in(86) as recorder:
    add_rms_norm.backward(x, x, x, x[0], torch.empty(64), 1e-6, 0.0, "after_weight", True, True)
assert recorder.launches == 2
assert max(v.shared_bytes for v in recorder.variants) <= 101376
""")


def test_what_varies_from_call_to_call_compiles_nothing_new() -> None:
    """Row counts, eps and offset are run-time arguments: 40 random calls compile what the first few did."""
    compiled("""
import random
import torch
from triptych_triton.compile_check import stand_in
from triptych_triton.ops import add_rms_norm, rms_norm

generator = random.Random(0)
weight = torch.empty(256)

def call(rows, eps, offset):
    x = torch.empty(rows, 256)
    _, rstd = rms_norm.forward(x, weight, eps, offset, "after_weight")
    rms_norm.backward(x, x, weight, rstd, eps, offset, "after_weight", True, True)
    add_rms_norm.forward(x, x, weight, eps, offset, "after_weight")
    add_rms_norm.backward(x, x, x, weight, rstd, eps, offset, "after_weight", True, True)

with stand_in(90) as recorder:
    for rows in (1, 7, 16, 1000, 4096):
        call(rows, 1e-6, 0.0)
    before = len(recorder.variants)
    for _ in range(40):
        call(generator.randrange(1, 50000), generator.random(), generator.choice((0.0, 1.0, generator.random())))
    assert recorder.launches >= 40 * 4
    assert len(recorder.variants) == before, recorder.variants[before]
assert before == 5, [v.kernel for v in recorder.variants]  # two forward, two backward, one sum of partial results
""")


def test_the_stand_in_leaves_the_driver_as_it_was() -> None:
    compiled("""
import triton
from triptych_triton.compile_check import stand_in
before = triton.runtime.driver._active
try:
    with stand_in(90):
        raise KeyError
except KeyError:
    pass
assert triton.runtime.driver._active is before
""")
