"""`use`: nests, restores, and is seen by its own thread or task; backward runs as its forward's block said."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from spies import call_and_count, ran

import triptych
from triptych import scope

X = torch.ones(2, 8)


def chosen() -> str:
    return triptych.explain("rms_norm", X, None, 1e-6, 0.0, "after_weight").chosen


def test_blocks_nest_and_restore_whatever_happens() -> None:
    before = chosen()
    with triptych.use("composite"):
        with pytest.raises(ZeroDivisionError), triptych.use("torch"):
            assert chosen() == "torch"
            raise ZeroDivisionError
        assert chosen() == "composite"
    assert chosen() == before


def test_it_decorates() -> None:
    @triptych.use("composite")
    def inside(depth: int) -> list[str]:
        return [chosen(), *(inside(depth - 1) if depth else [])]

    assert inside(2) == ["composite"] * 3
    with ThreadPoolExecutor(4) as pool:
        assert {each for found in pool.map(inside, [3] * 16) for each in found} == {"composite"}


def test_a_wrong_rule_is_an_error_at_once() -> None:
    with pytest.raises(triptych.PolicyError):
        triptych.use("trch")


def test_what_runs_after_its_call_has_returned_cannot_be_decorated() -> None:
    def generator():  # type: ignore[no-untyped-def]
        yield

    async def coroutine() -> None: ...

    class Model: ...

    for function in (generator, coroutine, Model):
        with pytest.raises(triptych.UsageError, match=f"cannot decorate .*{function.__name__}: .*Write `with"):
            triptych.use("composite")(function)


@pytest.mark.parametrize("rules", [None, 5, b"torch", ["torch"]])
def test_rules_are_a_string(rules: object) -> None:
    with pytest.raises(triptych.UsageError, match="takes rules as a string"):
        triptych.use(rules)  # type: ignore[arg-type]


def test_threads_and_tasks_do_not_see_each_others_blocks() -> None:
    before = chosen()
    seen: list[str] = []
    with triptych.use("composite"):
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
    assert seen == [before]

    async def task(backend: str) -> list[str]:
        with triptych.use(backend):
            first = chosen()
            await asyncio.sleep(0)
            return [first, chosen()]

    async def both() -> list[list[str]]:
        return await asyncio.gather(task("torch"), task("composite"))

    assert asyncio.run(both()) == [["torch"] * 2, ["composite"] * 2]


def test_one_block_object_may_be_entered_by_several_threads_at_once() -> None:
    block = triptych.use("composite")
    before = chosen()
    inside, go_on = threading.Barrier(2), threading.Event()
    seen: list[str] = []

    def work() -> None:
        with block:
            inside.wait(30)
            go_on.wait(30)
        seen.append(chosen())

    thread = threading.Thread(target=work)
    thread.start()
    with block:
        inside.wait(30)
        with block:
            assert chosen() == "composite"
        assert chosen() == "composite"
    assert chosen() == before
    go_on.set()
    thread.join()
    assert seen == [before]


def test_a_policy_of_the_process_reaches_other_threads() -> None:
    seen: list[str] = []
    before = chosen()
    with scope.process_policy("composite"):
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
    assert seen == ["composite"]
    assert chosen() == before


def test_backward_runs_as_forwards_block_said_after_it_has_ended() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with ran() as seen:
        with triptych.use("composite;rms_norm.backward=torch"):
            y = triptych.rms_norm(x)
        with triptych.use("composite"):
            y.sum().backward()
    assert seen == {("rms_norm", "forward", "composite"): 1, ("rms_norm", "backward", "torch"): 1}


def test_many_threads_lose_no_count() -> None:
    def work(_: int) -> None:
        with triptych.use("composite"):
            for _ in range(50):
                triptych.rms_norm(X)

    with ran() as seen, ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert seen == {("rms_norm", "forward", "composite"): 400}


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_children_count_their_own_calls(method: str) -> None:
    with triptych.use("composite"):
        triptych.rms_norm(X)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=call_and_count, args=(queue,))
    child.start()
    seen, pid = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert pid != os.getpid()
    assert seen == {("rms_norm", "forward", "composite"): 1}


def test_a_fork_while_another_thread_selects_does_not_hang() -> None:
    stop = threading.Event()

    def busy() -> None:
        size = 1
        while not stop.is_set():
            size = size % 4000 + 1
            triptych.rms_norm(torch.ones(1, size))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(10):
            pid = os.fork()
            if pid == 0:
                try:
                    triptych.rms_norm(torch.ones(3, 5))
                    triptych.report()
                    os._exit(0)
                finally:
                    os._exit(1)
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("text", ["first", "-1", "1.0", "\N{SUPERSCRIPT TWO}"])
def test_a_rank_that_is_no_number_is_an_error_before_anything_runs(
    fresh_scope: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("RANK", text)
    with ran() as seen, pytest.raises(triptych.EnvironmentVariableError) as raised:
        triptych.rms_norm(X)
    assert str(raised.value) == (
        f"RANK is {text!r}. It must be this process's number, 0 or greater, as torchrun sets it. "
        "Correct it, or unset it in a program of one process."
    )
    assert seen == {}


def test_rank_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, number in (("3", 3), ("0", 0), ("", 0)):
        monkeypatch.setenv("RANK", text)
        assert scope.rank() == number
    monkeypatch.delenv("RANK")
    assert scope.rank() == 0
