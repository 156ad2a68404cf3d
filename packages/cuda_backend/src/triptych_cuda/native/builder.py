"""Running a recipe: one builder at a time, all or nothing, errors kept.

A build happens in a folder of its own beside the final one and appears under its final name by one rename, so a killed
builder leaves nothing that could be taken for a result. A lock on a file, which the system releases when its holder
dies, makes a second process wait and then find the result.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from triptych_cuda.native import progress
from triptych_cuda.native.recipe import Recipe

MANIFEST = "manifest.json"
LONGEST_EXCERPT = 12


class CompileError(RuntimeError):
    """ninja or a compiler failed. The text holds the command, the first errors and the path of the whole log."""


def cache_root() -> Path:
    """Where builds are kept: $TRIPTYCH_CACHE, else triptych/ in the user's cache folder."""
    named = os.environ.get("TRIPTYCH_CACHE")
    if named:
        return Path(named).expanduser() / "cuda_backend"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "triptych" / "cuda_backend"


def folder_of(recipe: Recipe, root: Path) -> Path:
    """The folder in which a finished build of `recipe` lies under the cache `root`."""
    return root / f"{recipe.part}-{recipe.key}"


def build(recipe: Recipe, ninja: str, root: Path) -> Path:
    """Build `recipe` unless it has been built, and return the path of the extension module.

    Args:
        recipe: what to build.
        ninja: path of the ninja program.
        root: the cache, created if need be.

    Raises:
        CompileError: a command failed; nothing is left but the log.
        OSError: the cache cannot be written.
    """
    folder = folder_of(recipe, root)
    target = folder / recipe.target
    if target.is_file():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with _alone(root / f"{folder.name}.lock", recipe.part):
        if target.is_file():
            return target
        for stale in root.glob(f"{folder.name}.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        scratch = root / f"{folder.name}.tmp-{os.getpid()}"
        scratch.mkdir()
        try:
            _compile(recipe, ninja, scratch, root / f"{folder.name}.failed.log")
            for step in recipe.steps:
                (scratch / step.object).unlink()
            manifest = {"schema": 1, "part": recipe.part, "fingerprint": recipe.fingerprint, "file": recipe.target}
            (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _compile(recipe: Recipe, ninja: str, scratch: Path, failure_log: Path) -> None:
    started = time.monotonic()
    (scratch / "build.ninja").write_text(recipe.ninja(), encoding="utf-8")
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    log = scratch / "build.log"
    title = f"building the {recipe.part} part of triptych-cuda"
    with (
        progress.shown(title) as update,
        log.open("w", encoding="utf-8") as record,
        subprocess.Popen(
            [ninja, "-C", str(scratch)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            env=environment,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                record.write(line)
                status = progress.parse(line)
                if status is not None:
                    update(*status)
        except BaseException:
            process.terminate()
            raise
    code = process.returncode
    if code != 0:
        shutil.copyfile(log, failure_log)
        raise CompileError(_failure_text(recipe, log.read_text(encoding="utf-8"), failure_log))
    failure_log.unlink(missing_ok=True)
    progress.say(f"built the {recipe.part} part of triptych-cuda in {time.monotonic() - started:.0f} s")


def _failure_text(recipe: Recipe, log: str, path: Path) -> str:
    lines = log.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("FAILED:")), 0)
    command = lines[start + 1] if start + 1 < len(lines) else ""
    rest = [line for line in lines[start + 2 :] if progress.parse(line) is None]
    errors = [line for line in rest if "error" in line.lower() or "undefined" in line.lower()] or rest
    shown = "\n".join(f"    {line}" for line in errors[:LONGEST_EXCERPT])
    return (
        f"The {recipe.part} part of triptych-cuda could not be compiled.\n"
        f"  command: {command}\n"
        f"  first errors:\n{shown}\n"
        f"  whole log: {path}\n"
        f"  Mend the compiler (CXX chooses another, CUDA_HOME another CUDA toolkit), or use another backend."
    )


@contextlib.contextmanager
def _alone(path: Path, part: str) -> Iterator[None]:
    """Hold the lock on `path`, waiting for whoever holds it; the file stays, since removing it would be a race."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say(f"another process is building the {part} part of triptych-cuda; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
