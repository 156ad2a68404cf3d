"""Building: hashes, one builder at a time, nothing half built, failures that say what to do."""

from __future__ import annotations

import dataclasses
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from triptych_cuda.native import builder, progress, recipe, toolchain
from triptych_cuda.native.recipe import Recipe, Step
from triptych_cuda.native.toolchain import Missing, Tool, Torch

TORCH = Torch("2.13.0+cu130", "13.0", Path("/opt/torch"), True)
COMPILER = Tool("/usr/bin/g++", "g++ 13.2")
NVCC = Tool("/usr/local/cuda/bin/nvcc", "release 13.0, V13.0.88")
SOURCE_ROOT = Path(recipe.__file__).parents[2]


def program(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def small_recipe(folder: Path, body: str) -> Recipe:
    """A recipe whose compiler is a shell script; `$out` is what it has to make."""
    source = folder / "source.cpp"
    source.write_text("", encoding="utf-8")
    compiler = program(folder / "compiler", 'for word; do out="$word"; done\n' + body)
    link = program(folder / "linker", 'echo linked > "_cpu' + recipe.EXTENSION + '"')
    return Recipe("cpu", "f" * 16, "f" * 16 + "-0", (Step(source, "one.o", (compiler,)),), (link,), ())


def ninja() -> str:
    found = toolchain.ninja()
    if isinstance(found, Missing):
        pytest.skip(found.reason)
    return found.path


# --- what names a build ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", recipe.PARTS)
def test_the_fingerprint_follows_torch_and_its_abi(part: str) -> None:
    changed = [
        TORCH,
        dataclasses.replace(TORCH, version="2.13.1+cu130"),
        dataclasses.replace(TORCH, cuda="13.1"),
        dataclasses.replace(TORCH, cxx11_abi=False),
    ]
    assert len({recipe.fingerprint(part, torch) for torch in changed}) == len(changed)
    moved = dataclasses.replace(TORCH, root=Path("/elsewhere"))
    assert recipe.fingerprint(part, moved) == recipe.fingerprint(part, TORCH)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("KERNEL_FLAGS", {"cpu", "cuda"}),
        ("BINDING_FLAGS", {"cpu", "cuda"}),
        ("LINK_FLAGS", {"cpu", "cuda"}),
        ("DEVICE_FLAGS", {"cuda"}),
        ("ARCHITECTURES", {"cuda"}),
    ],
)
def test_the_fingerprint_follows_flags(name: str, parts: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = {part: recipe.fingerprint(part, TORCH) for part in recipe.PARTS}
    monkeypatch.setattr(recipe, name, (*getattr(recipe, name), "-DANOTHER"))
    assert {part for part in recipe.PARTS if recipe.fingerprint(part, TORCH) != before[part]} == parts


def test_the_fingerprint_follows_sources_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").mkdir()
    names = ("cpu/kernels.h", "cpu/kernels.cpp", *recipe.FOLDERS["cpu"][1:])
    for name in names:
        (tmp_path / name).write_text("", encoding="utf-8")
    monkeypatch.setattr(recipe, "CSRC", tmp_path)
    seen = {recipe.fingerprint("cpu", TORCH)}
    for name in names:
        (tmp_path / name).write_text(f"// {name}", encoding="utf-8")
        seen.add(recipe.fingerprint("cpu", TORCH))
    assert len(seen) == len(names) + 1


def test_the_key_follows_the_compilers_and_the_fingerprint_does_not() -> None:
    first = recipe.recipe("cuda", TORCH, COMPILER, NVCC)
    other = recipe.recipe("cuda", TORCH, dataclasses.replace(COMPILER, version="g++ 14"), NVCC)
    third = recipe.recipe("cuda", TORCH, COMPILER, dataclasses.replace(NVCC, version="release 13.1"))
    assert len({first.key, other.key, third.key}) == 3
    assert first.fingerprint == other.fingerprint == third.fingerprint


def test_device_code_is_built_for_both_architectures_and_ptx_and_without_torch() -> None:
    made = recipe.recipe("cuda", TORCH, COMPILER, NVCC)
    device = [step for step in made.steps if step.source.suffix == ".cu"]
    assert device
    for step in device:
        command = " ".join(step.command)
        assert "sm_80" in command
        assert "sm_90" in command
        assert "code=compute_90" in command
        assert "torch" not in command


def test_nothing_is_linked_against_an_openmp_or_cuda_library_of_its_own() -> None:
    for part in recipe.PARTS:
        made = recipe.recipe(part, TORCH, COMPILER, NVCC)
        assert not [word for word in (*made.link, *made.libraries) if "omp" in word or "cudart" in word]


# --- building --------------------------------------------------------------------------------------------------------


def test_a_build_leaves_the_target_a_manifest_and_no_objects(tmp_path: Path) -> None:
    made = small_recipe(tmp_path, 'echo > "$out"')
    target = builder.build(made, ninja(), tmp_path / "cache")
    assert target.read_text(encoding="utf-8") == "linked\n"
    assert {path.name for path in target.parent.iterdir()} == {
        made.target,
        "manifest.json",
        "build.ninja",
        "build.log",
        ".ninja_log",
    } - {name for name in (".ninja_log",) if not (target.parent / name).exists()}
    assert builder.build(made, "/no/ninja/needed", tmp_path / "cache") == target


BUILD_IN_A_PROCESS = """
import sys
from pathlib import Path
sys.path.insert(0, {source!r})
from triptych_cuda.native import builder
from triptych_cuda.native.recipe import Recipe, Step
folder = Path({folder!r})
made = Recipe("cpu", "f" * 16, "f" * 16 + "-0", (Step(folder / "source.cpp", "one.o", (str(folder / "compiler"),)),),
              (str(folder / "linker"),), ())
print(builder.build(made, {ninja!r}, folder / "cache"))
"""


def start_build(folder: Path) -> subprocess.Popen[str]:
    code = BUILD_IN_A_PROCESS.format(source=str(SOURCE_ROOT), folder=str(folder), ninja=ninja())
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    small_recipe(tmp_path, f'echo compiled >> {tmp_path}/count; sleep 1; echo > "$out"')
    processes = [start_build(tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert (tmp_path / "count").read_text(encoding="utf-8") == "compiled\n"
    assert sum("waiting for it" in error for _, error in outputs) == 1


def test_a_killed_builder_leaves_nothing_that_counts(tmp_path: Path) -> None:
    made = small_recipe(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 60")
    process = start_build(tmp_path)
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    os.kill(int((tmp_path / "pid").read_text(encoding="utf-8")), signal.SIGKILL)
    assert not builder.folder_of(made, tmp_path / "cache").exists()
    small_recipe(tmp_path, 'echo > "$out"')
    assert builder.build(made, ninja(), tmp_path / "cache").is_file()
    assert not list((tmp_path / "cache").glob("*.tmp-*"))


def test_a_failed_build_shows_the_command_the_error_and_the_log(tmp_path: Path) -> None:
    made = small_recipe(tmp_path, 'echo "in file x:"; echo "source.cpp:3: error: no such thing" >&2; exit 1')
    with pytest.raises(builder.CompileError) as caught:
        builder.build(made, ninja(), tmp_path / "cache")
    text = str(caught.value)
    log = tmp_path / "cache" / f"cpu-{made.key}.failed.log"
    assert f"command: {tmp_path}/compiler" in text
    assert "source.cpp:3: error: no such thing" in text
    assert f"whole log: {log}" in text
    assert "in file x:" in log.read_text(encoding="utf-8")
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {log.name, f"cpu-{made.key}.lock"}


def test_a_failed_log_goes_when_the_build_succeeds(tmp_path: Path) -> None:
    with pytest.raises(builder.CompileError):
        builder.build(small_recipe(tmp_path, "exit 1"), ninja(), tmp_path / "cache")
    builder.build(small_recipe(tmp_path, 'echo > "$out"'), ninja(), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.failed.log"))


def test_paths_with_blanks_and_dollars_survive(tmp_path: Path) -> None:
    odd = tmp_path / "a b$c:d"
    odd.mkdir()
    made = small_recipe(odd, 'echo > "$out"')
    assert builder.build(made, ninja(), odd / "cache").is_file()


def test_progress_lines_are_recognised() -> None:
    assert progress.parse("[3/7] compiling x.o") == (3, 7, "compiling x.o")
    assert progress.parse("FAILED: x.o") is None


# --- the tools -------------------------------------------------------------------------------------------------------


def test_a_missing_compiler_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = toolchain.compiler()
    assert isinstance(found, Missing)
    assert "CXX names 'no-such-compiler'" in found.reason
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = toolchain.compiler()
    assert isinstance(found, Missing)
    assert "none of c++, g++ and clang++ is on PATH" in found.reason
    assert "Install g++" in found.reason


def test_what_a_compiler_says_is_read_whatever_the_locale_is(tmp_path: Path) -> None:
    script = tmp_path / "c++"
    script.write_bytes(b"#!/bin/sh\nprintf 'compil\\303\\251 \\377 1.0\\n'\n")
    script.chmod(0o755)
    program = "from triptych_cuda.native import toolchain; print(ascii(toolchain.compiler()))"
    env = {**os.environ, "CXX": str(script), "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert r"version='compil\xe9 \ufffd 1.0'" in done.stdout


def test_a_missing_nvcc_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = toolchain.nvcc()
    assert isinstance(found, Missing)
    assert "set CUDA_HOME" in found.reason


@pytest.mark.parametrize(
    ("torch", "nvcc", "text"),
    [
        (dataclasses.replace(TORCH, cuda=None), NVCC, "is built without CUDA"),
        (dataclasses.replace(TORCH, cuda="12.8"), NVCC, "Set CUDA_HOME to a CUDA 12 toolkit"),
        (TORCH, Missing("There is no nvcc."), "There is no nvcc."),
    ],
)
def test_what_keeps_the_cuda_part_from_being_built(torch: Torch, nvcc: Tool | Missing, text: str) -> None:
    (reason,) = toolchain.cuda_reasons(torch, nvcc)
    assert text in reason
    assert toolchain.cuda_reasons(TORCH, NVCC) == []


def test_the_cache_can_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", "/somewhere")
    assert builder.cache_root() == Path("/somewhere/cuda_backend")
    monkeypatch.delenv("TRIPTYCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert builder.cache_root() == Path("/xdg/triptych/cuda_backend")
