"""What the kernels of this package ask of a call, as sentences."""

import torch

from triptych.call import Call, TensorMeta
from triptych_triton.rounding import INTERPRETED

_OLDEST_CC = (8, 0)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Tensors of the analog ops that hold no data: seeds, counters, bits.
_INTEGERS = ("seed", "count", "clipped")


def reasons_against_norm(call: Call) -> list[str]:
    """Reasons against one phase of a norm; rows of any length, any strides and empty tensors are accepted."""
    x = call.tensor("x") if call.phase == "forward" or call.op == "rms_norm" else call.tensor("h")
    assert x is not None
    return _reasons_against_device(x.device) + _reasons_against_dtypes((("x", x), ("weight", call.tensor("weight"))))


def reasons_against_analog(call: Call) -> list[str]:
    """Reasons against one phase of an analog op; any split into tiles, any strides and empty tensors are accepted."""
    data = tuple((name, meta) for name, meta in call.tensors if name not in _INTEGERS)
    return _reasons_against_device(call.device) + _reasons_against_dtypes(data)


def _reasons_against_dtypes(tensors: tuple[tuple[str, TensorMeta | None], ...]) -> list[str]:
    known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
    return [
        f"{name} is {str(meta.dtype).removeprefix('torch.')}; the kernels take {known}. "
        f"Convert {name}, or use 'torch' for this op."
        for name, meta in tensors
        if meta is not None and meta.dtype not in _DTYPES
    ]


def _reasons_against_device(device: torch.device) -> list[str]:
    if INTERPRETED and device.type in ("cpu", "cuda"):
        return []
    if device.type != "cuda":
        return [
            f"The tensors are on {device}; Triton kernels run on CUDA devices, and on the CPU only in Triton's "
            "interpreter. Move the tensors to a GPU, start the process with TRITON_INTERPRET=1, or use 'torch'."
        ]
    cc = torch.cuda.get_device_capability(device)
    if cc < _OLDEST_CC:
        return [
            f"{device} has compute capability {cc[0]}.{cc[1]}; the kernels need 8.0 or later (bfloat16 arithmetic). "
            "Use 'torch' on this device."
        ]
    return []
