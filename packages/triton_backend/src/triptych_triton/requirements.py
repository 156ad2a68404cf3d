"""What the kernels of this package ask of a call, as sentences."""

import torch

from triptych.call import Call
from triptych_triton.rounding import INTERPRETED

_OLDEST_CC = (8, 0)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def reasons_against_norm(call: Call) -> list[str]:
    """Reasons against one phase of a norm; rows of any length, any strides and empty tensors are accepted."""
    x = call.tensor("x") if call.phase == "forward" or call.op == "rms_norm" else call.tensor("h")
    assert x is not None
    reasons = _reasons_against_device(x.device)
    weight = call.tensor("weight")
    for name, meta in (("x", x), ("weight", weight)):
        if meta is not None and meta.dtype not in _DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            reasons.append(
                f"{name} is {str(meta.dtype).removeprefix('torch.')}; the kernels take {known}. "
                f"Convert {name}, or use 'torch' for this op."
            )
    return reasons


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
