"""Fixtures of the feature tests, and the record of what they ran, from which docs/features.md is made.

A test marked `feature("name")` fills the cells of that row: those of the ops and backends that its process, and the
ranks that it used, really ran. With FEATURE_RESULTS=FILE in the environment one JSON line for each such test is
appended to the file.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import Ranks
from subjects import counts

PLACES = [
    pytest.param(("gloo", "cpu"), id="gloo"),
    pytest.param(("gloo", "cuda"), id="gloo-cuda", marks=pytest.mark.gpu),
    pytest.param(("nccl", "cuda"), id="nccl", marks=[pytest.mark.gpu, pytest.mark.two_gpus]),
]
_groups: dict[tuple[int, str, str], Ranks] = {}
_RAN = pytest.StashKey[Counter[tuple[str, str, str]]]()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test of one process runs."""
    return str(request.param)


@pytest.fixture(params=["composite", "torch", "triton", "cuda"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backend that a test runs on."""
    return str(request.param)


@pytest.fixture(params=[PLACES[0], PLACES[2]])
def two_ranks(request: pytest.FixtureRequest) -> Ranks:
    """Two processes of one group; see ranks.py."""
    return _group(2, *request.param)


@pytest.fixture(params=PLACES)
def sharing_ranks(request: pytest.FixtureRequest) -> Ranks:
    """Two processes that may share one GPU, for what needs only all-reduce, broadcast and all-gather of lists.

    Over gloo these work on a GPU's tensors; the other collectives end the process there.
    """
    return _group(2, *request.param)


@pytest.fixture(params=PLACES[:1])
def four_ranks(request: pytest.FixtureRequest) -> Ranks:
    """Four of them."""
    return _group(4, *request.param)


def _group(world: int, transport: str, device: str) -> Ranks:
    key = (world, transport, device)
    if key not in _groups:
        _groups[key] = Ranks(*key)
    return _groups[key]


@pytest.fixture(scope="session", autouse=True)
def groups_end_with_the_session() -> Iterator[None]:
    yield
    for group in _groups.values():
        group.close()


# --- the record -------------------------------------------------------------------------------------------------------


def _ran() -> Counter[tuple[str, str, str]]:
    return sum((group.counts for group in _groups.values()), counts())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = _ran()
    try:
        yield
    finally:
        item.stash[_RAN] = _ran() - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    file = os.environ.get("FEATURE_RESULTS")
    mark = item.get_closest_marker("feature")
    if file and mark is not None and call.when == "call" and _RAN in item.stash:
        cells = sorted({(op, backend) for op, _, backend in item.stash[_RAN]} | _inlined(item))
        line = {"feature": mark.args[0], "test": item.nodeid, "outcome": report.outcome, "ran": cells}
        with Path(file).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
    return report


def _inlined(item: pytest.Item) -> set[tuple[str, str]]:
    """What a test says ran where nothing counts it, as (op, backend): traced through, or in processes of its own."""
    return {value for key, value in item.user_properties if key == "inlined"}  # type: ignore[misc]
