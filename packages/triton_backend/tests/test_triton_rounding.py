"""bfloat16 in Triton's interpreter rounds as hardware does, so that interpreted results say something about it."""

import os
import subprocess
import sys

SCRIPT = """
import torch
from triptych_triton.ops import add_rms_norm, rms_norm

# Ties, both ways; the last bit above and below a tie; a carry into the exponent; subnormals; the largest.
bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x3FFFFFFF, 0x00012345, 0x00008000, 0x7F7F7FFF]
sums = torch.tensor([*bits, *(b - 2**31 for b in bits)], dtype=torch.int32).view(torch.float32)
high = sums.to(torch.bfloat16)
low = (sums - high.float()).to(torch.bfloat16)
expected = (high.float() + low.float()).to(torch.bfloat16)
_, h, _ = add_rms_norm.forward(high, low, None, 1e-6, 0.0, "after_weight")
assert torch.equal(h.view(torch.int16), expected.view(torch.int16)), (h, expected)

# One row whose rstd is 1, so that y is the weight, rounded.
x = torch.ones(1, len(sums), dtype=torch.bfloat16)
sums[0] = torch.finfo(torch.float32).max  # to infinity
y, _ = rms_norm.forward(x, sums, 0.0, 0.0, "after_weight")
assert torch.equal(y[0].view(torch.int16), sums.to(torch.bfloat16).view(torch.int16)), y

x[0, 3] = torch.nan
y, _ = rms_norm.forward(x, None, 0.0, 0.0, "after_weight")
assert y.isnan().all()
"""


def test_interpreted_bfloat16_rounds_to_nearest_even() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
