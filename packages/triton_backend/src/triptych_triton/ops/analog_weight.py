"""analog_weight in Triton: weights as an analog crossbar holds them, clipped, discretised and with noise.

    weight, modified, dmodified, dweight [C, N]; tiles T; clip, wmax, dclip [T, C]

Matrices of any size, any number of tiles, any strides, empty tensors; float32, bfloat16, float16 and float64. Kernels:
tile_reduce, weight_pass and weight_gradient; the noise is that of philox.
"""

import torch

from triptych.call import Call
from triptych_triton.requirements import reasons_against_analog
from triptych_triton.weight_gradient import clip_gradients
from triptych_triton.weight_pass import modify_weight


def forward(
    weight: torch.Tensor,
    clip: torch.Tensor | None,
    seed: torch.Tensor | None,
    tiles: int,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """modified in weight's dtype, wmax in float32 (float64 for float64), row-major."""
    return modify_weight(weight, clip, seed, tiles, quantization, res, noise, std_dev)


def backward(
    dmodified: torch.Tensor,
    weight: torch.Tensor,
    clip: torch.Tensor | None,
    tiles: int,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
    need_dweight: bool,
    need_dclip: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dweight in weight's dtype, dclip in clip's; one that is not needed has shape [0]. Deterministic."""
    if clip is not None:
        return clip_gradients(dmodified, weight, clip, tiles, quantization, res, need_dweight, need_dclip)
    dweight = dmodified.clone(memory_format=torch.contiguous_format) if need_dweight else weight.new_empty(0)
    return dweight, weight.new_empty(0)


def reasons_against(call: Call) -> list[str]:
    return reasons_against_analog(call)
