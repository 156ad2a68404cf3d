"""Processes that run the same function side by side, as ranks of one process group, and stay for the next test.

    results = ranks(job, "triton", steps=3)      # job(rank: Rank, "triton", steps=3) on each; results by rank

`job` is a function at the top of a test file; its arguments and results travel by pickle. What fails on one rank fails
the call, with that rank's traceback; ranks that wait for it in a collective are ended. Starting a group takes seconds,
a call milliseconds: a test session has one group of each size and transport.

This file is also the program of a rank.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from types import ModuleType
from typing import Any

START, CALL, GRACE = 120.0, 180.0, 15.0
"""Seconds for a group to start, for one call, and for the other ranks once one has failed."""

Counts = Counter[tuple[str, str, str]]
"""Calls by (op, phase, backend)."""


@dataclass(frozen=True)
class Rank:
    """Who runs a job.

    Attributes:
        number, world: which rank, of how many.
        device: "cpu" or "cuda:N", set as the current device.
    """

    number: int
    world: int
    device: str


class RanksFailed(AssertionError):
    """A job failed on some rank; the text holds what each of these had to say."""


class Ranks:
    """A group of `world` processes.

    Args:
        world: how many.
        transport: of the process group: "gloo" or "nccl".
        device: "cpu"; "cuda" gives each rank its own GPU, or the one there is to all of them.

    Attributes:
        counts: what ran on all ranks together in the calls so far.
    """

    def __init__(self, world: int, transport: str, device: str) -> None:
        self.counts: Counts = Counter()
        self._world, self._arguments = world, (str(world), transport, device)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []

    def __call__(self, job: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `job(rank, *args, **kwargs)` on every rank and return its results, by rank."""
        if not self._pipes:
            self._start()
        file = Path(job.__code__.co_filename)
        for pipe in self._pipes:
            pipe.send((str(file), job.__name__, args, kwargs))
        return self._gathered()

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._pipes, self._processes = [], []

    def _start(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="triptych-ranks-"))
        key = secrets.token_bytes(16)
        with Listener(str(folder / "socket"), "AF_UNIX", backlog=self._world, authkey=key) as listener:
            environment = {**os.environ, "TRIPTYCH_RANKS_KEY": key.hex()}
            environment.pop("PYTEST_CURRENT_TEST", None)
            program = [sys.executable, __file__, str(folder)]
            renamed = {"RANKS_KEY": environment.pop("TRIPTYCH_RANKS_KEY")}  # TRIPTYCH_ is for Triptych's own switches
            for number in range(self._world):
                command = [*program, str(number), *self._arguments]
                self._processes.append(subprocess.Popen(command, env={**environment, **renamed}))
            pipes = [listener.accept() for _ in range(self._world)]
        self._pipes = [pipe for _, pipe in sorted(((pipe.recv(), pipe) for pipe in pipes), key=lambda pair: pair[0])]

    def _gathered(self) -> list[Any]:
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        deadline = time.monotonic() + CALL
        while len(results) + len(failed) < self._world:
            open_pipes = [pipe for n, pipe in enumerate(self._pipes) if n not in results and n not in failed]
            ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                waiting = [n for n in range(self._world) if n not in results and n not in failed]
                for number in waiting:
                    failed[number] = "  it did not answer in time" if not failed else "  it waited for the others"
                break
            for pipe in ready:
                number = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    error, result, counts = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self._processes[number].wait(5)
                    failed[number] = f"  it died: status {self._processes[number].returncode}"
                else:
                    self.counts.update(counts)
                    if error:
                        failed[number] = error
                    else:
                        results[number] = result
                if number in failed:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failed:
            self.close()
            raise RanksFailed("\n".join(f"rank {number}:\n{text}" for number, text in sorted(failed.items())))
        return [results[number] for number in range(self._world)]


# --- a rank -----------------------------------------------------------------------------------------------------------


def serve(folder: Path, rank: Rank, transport: str) -> None:
    """Run jobs until the connection closes."""
    pipe = Client(str(folder / "socket"), "AF_UNIX", authkey=bytes.fromhex(os.environ.pop("RANKS_KEY")))
    import torch
    import torch.distributed as dist

    import triptych

    torch.set_num_threads(1)
    if rank.device != "cpu":
        torch.cuda.set_device(rank.device)
    store = f"file://{folder / 'store'}"
    dist.init_process_group(transport, init_method=store, rank=rank.number, world_size=rank.world)
    pipe.send(rank.number)
    files: dict[str, ModuleType] = {}
    seen: Counts = Counter()
    while True:
        try:
            file, name, args, kwargs = pipe.recv()
        except EOFError:
            return
        error, result = "", None
        torch.manual_seed(0)
        try:
            result = getattr(_module(files, file), name)(rank, *args, **kwargs)
            dist.barrier()
        except BaseException:
            error = traceback.format_exc()
        torch.compiler.reset()
        total = Counter({(row.op, row.phase, row.backend): row.calls for row in triptych.report().rows})
        pipe.send((error, result, total - seen))
        seen = total


def _module(files: dict[str, ModuleType], file: str) -> ModuleType:
    """The module that a test file is, read once."""
    if file not in files:
        sys.path.insert(0, str(Path(file).parent))
        specification = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert specification is not None and specification.loader is not None
        module = files[file] = importlib.util.module_from_spec(specification)
        sys.modules.setdefault(Path(file).stem, module)
        specification.loader.exec_module(module)
    return files[file]


def main(folder: str, number: str, world: str, transport: str, device: str) -> None:
    if device == "cuda":
        import torch

        device = f"cuda:{int(number) % torch.cuda.device_count()}"
    serve(Path(folder), Rank(int(number), int(world), device), transport)


if __name__ == "__main__":
    main(*sys.argv[1:])
