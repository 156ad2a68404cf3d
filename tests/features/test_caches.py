"""torch.compile's caches on disk are shared by processes: what an implementation was must never be served after it.

Each run is a process of its own with the same TORCHINDUCTOR_CACHE_DIR. It trains one step of a function around an op,
and says what it computed and whether AOTAutograd's cache had the graph.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import triptych_torch

pytestmark = pytest.mark.feature("torch.compile, caches on disk")

OP = '''
"""scaled: y = factor * x, a cube and more in its versions. One output, one gradient."""
import torch
from triptych.call import TensorMeta
from triptych.dispatch import define
from triptych.opspec import OpSpec, Phase

FACTOR = {factor}
WIDER = {wider}

def rows(x):
    return (*x.shape[:-1], x.shape[-1] * WIDER)

def fake(x):
    return (torch.empty(rows(x), dtype=x.dtype, device=x.device),)

def fake_backward(dy, kept, need):
    width = kept.shape[-1] // ({wider} if "{saved}" == "y" else 1)
    return (torch.empty((*kept.shape[:-1], width), dtype=kept.dtype, device=kept.device),)

def forward(x):
    return (torch.cat([FACTOR * x * x] * WIDER, -1),)

def backward(dy, kept, need):
    dy = dy.unflatten(-1, (WIDER, -1)).sum(-2)
    if "{saved}" == "y":
        return (dy * 2 * (kept[..., : kept.shape[-1] // WIDER] * FACTOR).sqrt(),)
    return (dy * 2 * FACTOR * kept,)

def phase(tensors, scalars, outputs, run, fake):
    return Phase(tensors, scalars, outputs, reference=run, composite=run, fake=fake, bound=run)

SPEC = OpSpec(
    name="scaled", summary="y = factor * x * x",
    forward=phase(("x",), (), ("y",), forward, fake),
    backward=phase(("dy", "{saved}"), (("need_dx", bool),), ("dx",), backward, fake_backward),
    check=lambda x: None, typical=lambda shape, dtype, device: (TensorMeta.contiguous(shape, dtype, device),),
    samples=lambda: iter(()), differentiable=("y",), saved=("{saved}",), gradients=(("x",),),
)
call = define(SPEC).call
'''

MAIN = """
import contextlib, json, sys
import torch
import triptych
from triptych import registry
from torch._dynamo.utils import counters

op, mode = sys.argv[1:]
x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], requires_grad=True)
stack = contextlib.ExitStack()
if op == "scaled":
    import changing
    stack.enter_context(registry.ops.added("scaled", changing.SPEC))
    function, policy = (lambda x: changing.call("", x)), "composite"
else:
    function, policy = (lambda x: triptych.rms_norm(x, eps=0.0)), "torch"
with triptych.use(policy, compile=mode):
    y = torch.compile(lambda x: torch.mm(z := function(x), z.T), fullgraph=True)(x)
    y.sum().backward()
rows = {f"{row.op}.{row.phase} {row.backend}": row.calls for row in triptych.report().rows}
found = {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")}
print(json.dumps({"y": y.tolist(), "dx": x.grad.tolist(), "ran": rows, "inlined": triptych.report().inlined, **found}))
"""

RAN = {"scaled.forward composite": 1, "scaled.backward composite": 1}
NORM_RAN = {"rms_norm.forward torch": 1, "rms_norm.backward torch": 1}


class Folder:
    """A directory with a program, an op that changes, a copy of the torch backend, and the caches."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "main.py").write_text(MAIN)

    def declare(self, *, factor: float = 1.0, wider: int = 1, saved: str = "x") -> None:
        text = OP
        for name, value in (("factor", factor), ("wider", wider), ("saved", saved)):
            text = text.replace(f"{{{name}}}", str(value))
        (self.path / "changing.py").write_text(text)

    def copy_backend(self) -> Path:
        """A copy of the torch backend that this directory's programs run; returns its rms_norm."""
        (source,) = triptych_torch.__path__
        shutil.copytree(source, self.path / "triptych_torch", ignore=shutil.ignore_patterns("__pycache__"))
        return self.path / "triptych_torch" / "ops" / "rms_norm.py"

    def run(self, op: str = "scaled", mode: str = "opaque") -> dict[str, Any]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")}
        environment |= {
            "TORCHINDUCTOR_CACHE_DIR": str(self.path / "caches"),
            "PYTHONPATH": os.pathsep.join([str(self.path), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",  # an edit within one second would not be seen
        }
        command = [sys.executable, "main.py", op, mode]
        done = subprocess.run(command, cwd=self.path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        result = json.loads(done.stdout.splitlines()[-1])
        assert isinstance(result, dict) and result["bypass"] == 0
        return result


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def expected(factor: float = 1.0, wider: int = 1) -> dict[str, Any]:
    """y and dx of the op, worked out in whole numbers: z = factor x^2, y = wider z z^T."""
    rows = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    z = [[factor * value * value for value in row] for row in rows]
    y = [[wider * sum(a * b for a, b in zip(one, other, strict=True)) for other in z] for one in z]
    sums = [sum(column) for column in zip(*z, strict=True)]  # d(sum of y)/dz = 2 wider (column sums)
    dx = [[2 * wider * total * 2 * factor * value for total, value in zip(sums, row, strict=True)] for row in rows]
    return {"y": y, "dx": dx}


def test_a_changed_declaration_is_compiled_again(folder: Folder) -> None:
    """A derivative that saves something else, a fake kernel of another shape: each in turn, and back again."""
    versions: list[dict[str, Any]] = [{}, {"saved": "y"}, {"wider": 2}]
    for version in versions:
        folder.declare(**version)
        found = folder.run()
        assert {name: found[name] for name in ("y", "dx")} == expected(wider=version.get("wider", 1)), version
        assert (found["hit"], found["miss"], found["ran"]) == (0, 1, RAN), version
    folder.declare()
    found = folder.run()
    assert {name: found[name] for name in ("y", "dx")} == expected()
    assert (found["hit"], found["miss"], found["ran"]) == (1, 0, RAN)  # unchanged, it is served


def test_a_changed_implementation_behind_an_opaque_op_runs_from_the_cached_graph(folder: Folder) -> None:
    for factor, hits in ((1.0, 0), (3.0, 1)):
        folder.declare(factor=factor)
        found = folder.run()
        assert {name: found[name] for name in ("y", "dx")} == expected(factor)
        assert (found["hit"], found["ran"]) == (hits, RAN)


def test_a_changed_implementation_that_is_traced_through_is_compiled_again(
    folder: Folder, record_property: Callable[[str, object], None]
) -> None:
    """The backend's rms_norm, edited so that y is twice as large. What it calls is edited, not the phase itself."""
    file = folder.copy_backend()
    original = file.read_text()
    results = []
    for factor in (1.0, 1.0, 2.0):
        line = "return torch.float64 if dtype is torch.float64 else torch.float32"
        assert original.count(line) == 1 and original.count("rstd = torch.rsqrt(") == 1
        text = original.replace("rstd = torch.rsqrt(", "rstd = _factor() * torch.rsqrt(")
        file.write_text(f"{text}\n\ndef _factor() -> float:\n    return {factor}\n")
        results.append(folder.run("rms_norm", "inline"))
    results.append(folder.run("rms_norm", "opaque"))  # nor does one mode get what the other left
    first, again, other, opaque = results
    assert [(each["hit"], each["miss"]) for each in results] == [(0, 1), (1, 0), (0, 1), (0, 1)]
    assert all(each["ran"] == {} and each["inlined"] == ["rms_norm"] for each in results[:3])
    assert (opaque["ran"], opaque["inlined"], opaque["y"]) == (NORM_RAN, [], other["y"])
    record_property("inlined", ("rms_norm", "torch"))
    assert first["y"] == again["y"]
    assert other["y"] == [[4 * value for value in row] for row in first["y"]]  # y is z z^T
