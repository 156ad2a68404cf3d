"""The parts at run time: ahead-of-time binaries, refusals, remembered failures, `auto`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from triptych.call import Call, TensorMeta
from triptych.errors import BuildError
from triptych_cuda import parts
from triptych_cuda.backend import backend
from triptych_cuda.native import binaries, toolchain
from triptych_cuda.native.binaries import Place
from triptych_cuda.native.builder import CompileError
from triptych_cuda.native.recipe import file_name, fingerprint
from triptych_cuda.native.toolchain import Missing, Torch


def call(device: str, dtype: torch.dtype = torch.float32) -> Call:
    meta = TensorMeta((4, 8), (8, 1), dtype, torch.device(device))
    return Call("rms_norm", "forward", (("x", meta), ("weight", None)), (("eps", 1e-6),))


def torch_here() -> Torch:
    found = toolchain.torch_build()
    assert not isinstance(found, Missing)
    return found


def packed(folder: Path, expected: str) -> Path:
    """A folder as setup.py leaves it, with an empty file for the binary."""
    binary = folder / "_cpu.so"
    binary.write_bytes(b"")
    entry = {"file": binary.name, "fingerprint": expected, "torch": "2.11.0", "cuda": None, "python": "cpython-312"}
    (folder / "manifest.json").write_text(json.dumps({"schema": 1, "parts": {"cpu": entry}}), encoding="utf-8")
    return binary


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def test_a_source_that_vanishes_while_it_is_read_is_a_reason_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def vanished(part: str) -> Place:
        raise FileNotFoundError(2, "No such file or directory", "kernels.cpp")

    part = parts.Part("cpu")
    with monkeypatch.context() as patched:
        patched.setattr(parts, "find", vanished)
        (reason,) = part.reasons_unavailable()
        assert "kernels.cpp" in reason
        assert not part.is_built()
        with pytest.raises(BuildError, match=r"kernels\.cpp"):
            part.module()
    assert part.place() == binaries.find("cpu")


# --- ahead of time ---------------------------------------------------------------------------------------------------


def test_a_fitting_binary_in_the_package_is_taken_without_a_compiler(tmp_path: Path, no_compiler: None) -> None:
    binary = packed(tmp_path, fingerprint("cpu", torch_here()))
    place = binaries.find("cpu", ahead=tmp_path, root=tmp_path / "cache")
    assert (place.binary, place.origin, place.reasons) == (binary, "ahead of time", ())


def test_a_binary_for_another_torch_is_passed_over_and_said_so(tmp_path: Path) -> None:
    packed(tmp_path, "0" * 16)
    place = binaries.find("cpu", ahead=tmp_path, root=tmp_path / "cache")
    assert place.binary is None
    assert "was built for torch 2.11.0" in place.notes[0]
    assert place.reasons or place.recipe is not None


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 1, "parts": {}}'])
def test_a_manifest_that_means_nothing_counts_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text, encoding="utf-8")
    assert binaries.find("cpu", ahead=tmp_path, root=tmp_path / "cache").binary is None


def test_without_a_compiler_a_cached_build_by_another_one_serves(tmp_path: Path, no_compiler: None) -> None:
    folder = tmp_path / f"cpu-{fingerprint('cpu', torch_here())}-12345678"
    folder.mkdir()
    binary = folder / file_name("cpu")
    binary.write_bytes(b"")
    assert binaries.find("cpu", ahead=tmp_path / "none", root=tmp_path).binary == binary


# --- what a part says ------------------------------------------------------------------------------------------------


def part_at(place: Place) -> parts.Part:
    part = parts.Part(place.part)
    part._place = place
    return part


def test_a_part_that_cannot_be_built_refuses_with_the_reasons(no_compiler: None, tmp_path: Path) -> None:
    part = part_at(binaries.find("cpu", ahead=tmp_path, root=tmp_path))
    (reason,) = part.reasons_unavailable()
    assert "There is no C++ compiler" in reason
    assert not part.is_built()
    with pytest.raises(BuildError, match=r"cpu part of triptych-cuda is not available. There is no C\+\+ compiler"):
        part.module()


def test_a_failed_build_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fail(place: Place) -> Path:
        tries.append(place)
        raise CompileError("it does not compile")

    monkeypatch.setattr(parts, "make", fail)
    part = part_at(Place("cpu", None, "", None, None, ()))
    for _ in range(2):
        with pytest.raises(BuildError, match="it does not compile"):
            part.module()
    assert part.reasons_unavailable() == ["it does not compile"]
    assert len(tries) == 1


def test_a_binary_that_does_not_load_is_an_error_that_names_it(tmp_path: Path) -> None:
    binary = tmp_path / file_name("cpu")
    binary.write_bytes(b"not a shared object")
    part = part_at(Place("cpu", binary, "cache", None, None, ()))
    with pytest.raises(BuildError, match=r"cannot be loaded: .*Delete"):
        part.module()


def test_the_two_parts_do_not_depend_on_each_other() -> None:
    """A broken CUDA part must leave the CPU part working, in a process that has loaded neither."""
    if parts.CPU.reasons_unavailable():
        pytest.skip(" ".join(parts.CPU.reasons_unavailable()))
    code = (
        "import torch; from triptych_cuda import parts; parts.CUDA._failure = 'broken'; "
        "from triptych_cuda.ops import rms_norm; "
        "print(rms_norm.forward(torch.ones(2, 4), None, 0.0, 0.0, 'after_weight')[0].sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "8.0", done.stderr


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_device_without_kernels_is_refused() -> None:
    (reason,) = backend.reasons_against(call("xpu"))
    assert reason == (
        "the tensors are on xpu; triptych-cuda has kernels for cpu and cuda devices. Use 'torch' for this device."
    )


def test_an_unsupported_dtype_is_refused() -> None:
    assert "a tensor has dtype torch.int32" in backend.reasons_against(call("cpu", torch.int32))[0]


def test_a_cuda_call_is_refused_where_there_is_no_cuda() -> None:
    if torch.version.cuda is not None:
        pytest.skip("torch is built with CUDA here")
    (reason,) = backend.reasons_against(call("cuda"))
    assert "is built without CUDA" in reason
    assert "Install a CUDA build of torch" in reason


def test_auto_does_not_start_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts.BY_DEVICE, "cpu", part_at(Place("cpu", None, "", None, None, ())))
    (reason,) = backend.reasons_against_auto(call("cpu"))
    assert reason.startswith("the cpu part is not built yet")
    assert "python -m triptych_cuda build cpu" in reason
    monkeypatch.setitem(parts.BY_DEVICE, "cpu", part_at(Place("cpu", Path("/built.so"), "cache", None, None, ())))
    assert backend.reasons_against_auto(call("cpu")) == []


def test_the_backend_lists_its_ops_without_loading_torch() -> None:
    code = (
        "import sys, importlib.util, pkgutil; import triptych_cuda; import triptych_cuda.native.recipe; "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "False", done.stderr
    analog = ("analog_linear", "analog_weight", "input_range_update", "tile_abs_max", "tile_std")
    assert backend.ops() == tuple(sorted(("add_rms_norm", "rms_norm", *analog)))
    assert backend.priority("cuda") == 30
    assert backend.priority("cpu") == 20
    assert backend.priority("xpu") is None


def test_a_reader_that_goes_away_and_a_full_disk_are_said_shortly() -> None:
    command = [sys.executable, "-m", "triptych_cuda", "status"]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    error = "the output cannot be written: No space left on device. Make room, or send it elsewhere."
    assert (done.returncode, done.stderr) == (2, f"triptych_cuda: {error}\n")


@pytest.mark.parametrize(("arguments", "code"), [(["status"], {0, 1}), (["build", "gpu"], {2}), ([], {2})])
def test_the_command_line(arguments: list[str], code: set[int]) -> None:
    command = [sys.executable, "-m", "triptych_cuda", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in code, done.stderr
    if arguments == ["status"]:
        assert "cpu: " in done.stdout
        assert "cuda: " in done.stdout


BROKEN_COMPILER = """
import logging, torch, triptych
logging.disable(logging.CRITICAL)
x = torch.ones(2, 8)
for policy in ("cuda,torch", "cuda"):
    for size in (8, 9):
        try:
            with triptych.use(policy):
                triptych.rms_norm(torch.ones(2, size))
        except triptych.Refused as error:
            print("refused:", "error: planted" in str(error))
print([(row.phase, row.backend, row.calls) for row in triptych.report().rows])
"""


def test_a_build_that_fails_is_a_reason_and_nothing_counts_as_run(tmp_path: Path) -> None:
    """A compiler that answers for its version and fails on every source."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-c*) echo "error: planted" >&2; exit 1;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "TRIPTYCH_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", BROKEN_COMPILER], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["refused: True", "refused: True", "[('forward', 'torch', 2)]"]
