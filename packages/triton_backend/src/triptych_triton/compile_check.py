"""Compiling every kernel of this package for a GPU that is not there.

    python -m triptych_triton.compile_check            # sm_80 and sm_90; a table on standard output

`stand_in(cc)` gives Triton a driver for a device of that compute capability: calls of the ops on CPU tensors then go
through the real host code, compile for real, and launch nothing (outputs keep whatever memory held). What was
compiled is recorded: registers and spills by the assembler's account, shared memory by the compiler's. A kernel that
asks for more shared memory than the device has raises, as it would there.

Not for a process whose kernels are interpreted (TRITON_INTERPRET=1): nothing is compiled there.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from triptych_triton.ops import (
    add_rms_norm,
    analog_linear,
    analog_weight,
    input_range_update,
    rms_norm,
    tile_abs_max,
    tile_std,
)
from triptych_triton.rounding import INTERPRETED

CCS = (80, 90)

# Bytes of shared memory a program may have, and SMs, of the largest devices of each compute capability.
_SHARED_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448}
_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Variant:
    """One compiled kernel.

    Attributes:
        kernel: its name. cc: the compute capability, 90 for sm_90.
        signature: types of the arguments by name; "constexpr" for constants.
        warps, shared_bytes: of one program.
        registers, spilled_bytes: of one thread; None where Triton ships no disassembler to ask.
    """

    kernel: str
    cc: int
    signature: dict[str, str]
    warps: int
    shared_bytes: int
    registers: int | None
    spilled_bytes: int | None


@dataclass
class Recorder:
    """What happened under a stand-in driver: `variants` compiled (each once) and the number of `launches`."""

    cc: int
    variants: list[Variant] = field(default_factory=list)
    launches: int = 0


@contextmanager
def stand_in(cc: int) -> Iterator[Recorder]:
    """Make Triton compile for compute capability `cc` and launch nothing, until the block ends.

    Kernels that this process compiled for this `cc` before are not compiled, nor recorded, again.
    """
    if INTERPRETED:
        raise RuntimeError(
            "Kernels are interpreted in this process, so none can be compiled. "
            "Run the check in a process without TRITON_INTERPRET."
        )
    recorder = Recorder(cc)
    drivers = triton.runtime.driver
    before = drivers._active  # `active` would look for a real driver, and raise where there is none
    drivers.set_active(_driver(recorder))
    try:
        yield recorder
    finally:
        drivers._active = before


def compile_everything(cc: int) -> list[Variant]:
    """Compile the kernels for each way of calling them that changes their code; the variants, in order."""
    with stand_in(cc) as recorder:
        for n in (1, 64, 1000, 4096, 16384, 32768):
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                _call_norms(n, dtype, dtype, "after_weight")
            _call_norms(n, torch.bfloat16, torch.float32, "before_weight")
            _call_norms(n, torch.bfloat16, None, "after_weight")
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            _call_analog(1024, 4, "learned", dtype)
            _call_analog(1000, 3, "dynamic", dtype)
        _call_analog(1024, 1, "fast", torch.float16)
    return recorder.variants


def _call_norms(n: int, dtype: torch.dtype, weight_dtype: torch.dtype | None, rounding: str) -> None:
    x = torch.empty(64 * 5, n, dtype=dtype)
    weight = None if weight_dtype is None else torch.empty(n, dtype=weight_dtype)
    _, rstd = rms_norm.forward(x, weight, 1e-6, 0.0, rounding)
    rms_norm.backward(x, x, weight, rstd, 1e-6, 0.0, rounding, True, True)
    add_rms_norm.forward(x, x, weight, 1e-6, 0.0, rounding)
    add_rms_norm.backward(x, x, x, weight, rstd, 1e-6, 0.0, rounding, True, True)


def _call_analog(n: int, tiles: int, mode: str, dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, weight, bias = torch.empty(320, n, dtype=dtype), torch.empty(n, n, dtype=dtype), torch.empty(n, dtype=dtype)
    ranges, clip = torch.empty(tiles, dtype=wide), torch.empty(tiles, n, dtype=wide)
    count, seed = torch.zeros(tiles, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    tile_abs_max.forward(x, tiles)
    tile_std.forward(x, tiles)
    input_range_update.forward(x, ranges, count, None, None, tiles, "std", 9, 3.0, 0.9)
    input_range_update.forward(x, ranges, count, ranges, ranges, tiles, "extremes", 9, 3.0, 0.9)
    analog_weight.forward(weight, None, seed, tiles, "per_tensor", 254.0, "per_channel", 0.1)
    analog_weight.forward(weight, clip, None, tiles, "none", 0.0, "none", 0.0)
    analog_weight.backward(weight, weight, clip, tiles, "per_channel", 254.0, "none", 0.0, True, True)
    given = None if mode == "dynamic" else ranges
    for out_noise, out_bound in ((0.0, 0.0), (0.1, 0.0), (0.0, 14.0), (0.1, 14.0)):
        out_res = 254.0 if out_bound else -1.0
        scalars = (tiles, mode, 254.0, out_noise, False, out_bound, out_res, True, 0.01, 0.95)
        y, bits = analog_linear.forward(x, weight, bias, given, clip, seed, *scalars)
        analog_linear.backward(y, x, weight, bias, given, bits, *scalars, True, True, True, True)


def _driver(recorder: Recorder) -> Any:
    """The part of Triton's driver interface that compiling and launching use."""

    def record(source: Any, metadata: Any) -> Any:
        compiled.append((source, metadata))
        return launch

    def launch(*_: Any) -> None:
        recorder.launches += 1

    def load_binary(name: str, binary: bytes, shared: int, _device: int) -> tuple[object, None, int, int, int]:
        source, metadata = compiled.pop()
        registers, spilled = _resources(binary)
        signature = {name: str(kind) for name, kind in source.signature.items()}
        recorder.variants.append(
            Variant(source.name, recorder.cc, signature, metadata.num_warps, shared, registers, spilled)
        )
        return module, None, registers or 0, spilled or 0, 1024

    compiled: list[tuple[Any, Any]] = []
    module = object()  # anything but None, which Triton takes for a kernel that is still to be loaded
    properties = {"max_shared_mem": _SHARED_BYTES[recorder.cc], "multiprocessor_count": _MULTIPROCESSORS}
    return SimpleNamespace(
        # Kernels are cached by device index: a negative one keeps these apart from any real device's.
        get_current_device=lambda: -recorder.cc,
        get_current_stream=lambda _device: 0,
        get_current_target=lambda: GPUTarget("cuda", recorder.cc, 32),
        launcher_cls=record,
        utils=SimpleNamespace(load_binary=load_binary, get_device_properties=lambda _device: properties),
    )


def _resources(binary: bytes) -> tuple[int | None, int | None]:
    """Registers and bytes of spills and stack of a thread, read from a compiled kernel."""
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not disassembler.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(disassembler), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def main() -> None:
    for cc in CCS:
        variants = compile_everything(cc)
        print(f"sm_{cc}: {len(variants)} variants")
        for v in variants:
            print(
                f"  {v.kernel:22} {v.signature.get('x', v.signature.get('partial')):6} warps {v.warps:2}  "
                f"shared {v.shared_bytes:6}  registers {v.registers}  spilled {v.spilled_bytes}"
            )


if __name__ == "__main__":
    main()
