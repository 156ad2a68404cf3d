"""Parts of the analog kernels: random words, rounding, exact products. Interpreted, in processes of their own."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")


def interpreted(body: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", body], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_random_words_are_those_of_the_published_vectors() -> None:
    """Known answers of Philox 4x32-10 from the Random123 distribution."""
    with_file = """
import tempfile, importlib.util
source = '''
import triton
import triton.language as tl
from triptych_triton.philox import philox

@triton.jit
def words(counter, key, out):
    i = tl.arange(0, 1)
    c = tl.load(counter + i), tl.load(counter + 1 + i), tl.load(counter + 2 + i), tl.load(counter + 3 + i)
    k = tl.load(key + i), tl.load(key + 1 + i)
    r0, r1, r2, r3 = philox(c[0], c[1], c[2], c[3], k[0], k[1])
    tl.store(out + i, r0)
    tl.store(out + 1 + i, r1)
    tl.store(out + 2 + i, r2)
    tl.store(out + 3 + i, r3)
'''
with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
    file.write(source)
    file.flush()
    spec = importlib.util.spec_from_file_location("kernel_of_test", file.name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    import torch

    ones = 0xFFFFFFFF
    for counter, key, expected in (
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ones,) * 4, (ones,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        out = torch.zeros(4, dtype=torch.uint32)
        module.words[(1,)](torch.tensor(counter, dtype=torch.uint32), torch.tensor(key, dtype=torch.uint32), out)
        assert " ".join(f"{word:08x}" for word in out.tolist()) == expected
"""
    interpreted(with_file)


def test_noise_has_the_moments_of_a_normal_and_changes_with_the_seed() -> None:
    interpreted("""
import torch
from triptych_triton.ops import analog_weight
zeros = torch.zeros(300, 300)
zeros[:, 0] = 1.0  # so that the maximum of each channel is 1
def noise(seed):
    modified, _ = analog_weight.forward(zeros, None, torch.tensor([seed]), 1, "none", 0.0, "per_channel", 1.0)
    return modified - zeros
first, again, other = noise(7), noise(7), noise(8)
assert torch.equal(first, again) and not torch.equal(first, other)
assert abs(first.mean()) < 0.02 and abs(first.std() - 1) < 0.02 and first.abs().max() < 5.78
""")


def test_rounding_is_to_the_even_neighbour() -> None:
    """Steps of 1: weights on ties, both ways, and on whole numbers."""
    interpreted("""
import torch
from triptych_triton.ops import analog_weight
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5, 0.49, -0.51, 3.0, 0.0]], dtype=dtype)
    modified, wmax = analog_weight.forward(weight, None, None, 1, "per_tensor", 254.0, "none", 0.0)
    assert torch.equal(modified, torch.round(weight)), modified
    assert wmax.item() == 127
""")


def test_bits_of_the_adc_are_packed_lowest_first() -> None:
    """Outputs 0 to 39 against a bound of 20: the channels above it, and none beside them."""
    interpreted("""
import torch
from triptych_triton.ops import analog_linear
x, weight = torch.ones(2, 1), torch.arange(40.0).reshape(40, 1)
scalars = (1, "learned", -1.0, 0.0, False, 1.0, -1.0, False, 0.0, 1.0)
y, bits = analog_linear.forward(x, weight, None, torch.ones(1), torch.full((1, 40), 20.0), None, *scalars)
assert torch.equal(y, weight.t().clamp(max=20).expand(2, 40))
assert bits.tolist() == [[[0, 0, 0b11100000, 255, 255]] * 2]
g = torch.ones(2, 40)
_, dweight, _, _ = analog_linear.backward(g, x, weight, None, torch.ones(1), bits, *scalars, False, True, False, False)
assert dweight.flatten().tolist() == [2.0] * 21 + [0.0] * 19
""")


@pytest.mark.parametrize(("setting", "full"), [("none", True), ("ieee", True), ("tf32", False)])
def test_float32_products_leave_cublas_where_tf32_is_allowed(setting: str, full: bool) -> None:
    from triptych_triton import plain_product

    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = setting
    try:
        assert plain_product._float32_stays_full() == full
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
