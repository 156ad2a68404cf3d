"""The device code compiles for both architectures without torch and without a GPU, and says what it costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych_cuda.native import device_code, toolchain
from triptych_cuda.native.recipe import device_sources
from triptych_cuda.native.toolchain import Missing

# Bytes a thread. Three kernels off the hot paths, at their bound of registers, spill 6, 16 and 72 bytes with CUDA 13.0; a
# dozen words a row stay in the L1 cache. More than that is a kernel that no longer fits its registers.
MOST_SPILLED = 80

REPORT = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3addPf' for 'sm_90'
ptxas info    : Function properties for _Z3addPf
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes stack, 128 bytes smem, 380 bytes cmem[0]
ptxas info    : Compiling entry function '_Z3subPf' for 'sm_90'
ptxas info    : Function properties for _Z3subPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers
"""


def test_the_report_is_read() -> None:
    first, second = device_code.parse_report("add.cu", "sm_90", REPORT)
    assert (first.name, first.registers, first.stack, first.spill_stores, first.spill_loads, first.shared) == (
        *("_Z3addPf", 40),
        *(16, 8, 4, 128),
    )
    assert (second.name, second.registers, second.stack, second.shared) == ("_Z3subPf", 12, 0, 0)


def test_a_source_that_does_not_compile_is_an_error_with_the_command(tmp_path: Path) -> None:
    if isinstance(found := toolchain.nvcc(), Missing):
        pytest.skip(found.reason)
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void f() { nonsense; }", encoding="utf-8")
    with pytest.raises(device_code.DeviceCompileError, match=r"nvcc .*broken.cu[\s\S]*nonsense"):
        device_code.compile_device_code(["sm_90"], [source])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("source", device_sources(), ids=lambda path: path.stem)
def test_device_code_compiles_without_torch_or_a_gpu(source: Path, architecture: str) -> None:
    if isinstance(found := toolchain.nvcc(), Missing):
        pytest.skip(found.reason)
    kernels = device_code.compile_device_code([architecture], [source])
    assert all(0 < kernel.registers <= 255 for kernel in kernels)
    if source.stem.startswith(("forward", "backward", "analog")):
        assert kernels, f"{source.name} holds no kernel"
    spilled = [kernel for kernel in kernels if max(kernel.spill_stores, kernel.spill_loads) > MOST_SPILLED]
    assert not spilled, f"registers spill to memory: {spilled}"
