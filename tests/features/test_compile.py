"""torch.compile around the ops: one graph, eager's gradients, other sizes and other backends without compiling again."""

from __future__ import annotations

import pytest
import torch
from compiling import assert_same, nothing_is_compiled_before_or_after, trained  # noqa: F401
from subjects import (
    BACKENDS,
    CONVERTERS,
    SUBJECTS,
    UNCALIBRATED,
    WIDTH,
    assert_close,
    batch,
    build,
    config,
    counts,
    ran_on,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters

import triptych
from triptych import scope
from triptych.analog import AnalogLinear
from triptych.layers import AddRMSNorm, RMSNorm
from triptych.testing.checks.tracing import CountingCompiler

HEADS = 2
RESIZED = [
    (name, backend)
    for name in SUBJECTS
    for backend in BACKENDS
    if backend != "triton" or name in ("rms_norm", "analog")
]
"""Without a GPU triton's kernels are interpreted: each of its analog models would take ten seconds."""


# --- every op on every backend ----------------------------------------------------------------------------------------


@pytest.mark.feature("torch.compile, static shapes")
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_training_step_equals_eager(name: str, backend: str, device: str) -> None:
    model, plain, x = build(name, device, blocks=1), build(name, device, blocks=1), batch(device)
    compiler = CountingCompiler("aot_eager")
    function = torch.compile(model, fullgraph=True, backend=compiler, dynamic=False)
    with scope.process_policy(backend), ran_on(backend, name):
        expected = trained(plain, plain, x)
    with scope.process_policy(backend), ran_on(backend, name):
        assert_same(trained(model, function, x), expected)
    assert compiler.graphs == 1


@pytest.mark.feature("torch.compile, dynamic shapes")
@pytest.mark.parametrize(("name", "backend"), RESIZED)
def test_other_sizes_compile_nothing_again(name: str, backend: str, device: str) -> None:
    model, plain = build(name, device, blocks=1), build(name, device, blocks=1)
    compiler = CountingCompiler("aot_eager")
    function = torch.compile(model, fullgraph=True, backend=compiler)
    with torch.no_grad(), scope.process_policy(backend):
        for number, (rows, length) in enumerate(((4, 6), (7, 5), (9, 3))):
            x = batch(device, rows, length, number)
            for dimension in (0, 1):
                torch._dynamo.mark_dynamic(x, dimension)  # type: ignore[no-untyped-call]
            with ran_on(backend, name):
                torch.manual_seed(3)
                found = function(x)
            torch.manual_seed(3)
            assert_close(found, plain(x))
    assert compiler.graphs == 1


@pytest.mark.feature("torch.compile, dynamic shapes")
@pytest.mark.parametrize("name", ["rms_norm", "analog"])
def test_everything_dynamic_compiles_nothing_again_after_the_first_call(name: str, device: str) -> None:
    """With dynamic=True torch makes an input of the layer's eps first, and traces once more when it meets the op."""
    model, plain = build(name, device, blocks=1), build(name, device, blocks=1)
    compiler = CountingCompiler("aot_eager")
    function = torch.compile(model, fullgraph=True, backend=compiler, dynamic=True)
    graphs = []
    for number, rows in enumerate((4, 7, 9)):
        x = batch(device, rows=rows, number=number)
        with scope.process_policy("torch"), ran_on("torch", name):
            found = trained(model, function, x)
        with scope.process_policy("torch"):
            assert_same(found, trained(plain, plain, x))
        graphs.append(compiler.graphs)
    assert graphs in ([1, 1, 1], [2, 2, 2])


# --- in a transformer block -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal attention and an analog MLP, with the residual additions inside the second norm and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(WIDTH, eps=1e-6)
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = AddRMSNorm(WIDTH, eps=1e-6)
        self.up = AnalogLinear(WIDTH, 2 * WIDTH, rpu_config=config(CONVERTERS, UNCALIBRATED))
        self.down = AnalogLinear(2 * WIDTH, WIDTH, rpu_config=config(CONVERTERS, UNCALIBRATED))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.projections(self.attention_norm(x)).view(rows, length, 3, HEADS, width // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y, h = self.mlp_norm(self.output(mixed.transpose(1, 2).reshape(x.shape)), x)
        out: Tensor = h + self.down(nn.functional.silu(self.up(y)))
        return out


OPS = {"rms_norm": 1, "add_rms_norm": 1, "tile_abs_max": 2, "analog_linear": 2}


def blocks(device: str) -> tuple[nn.Module, nn.Module]:
    """The same block twice, layers named."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model, plain = Block(), Block()
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        triptych.name_layers(each)
        each.to(device)
    return model, plain


def of_one_step(backend: str) -> dict[tuple[str, str, str], int]:
    """What one training step of a block runs."""
    expected = {(op, "forward", backend): calls for op, calls in OPS.items()}
    return expected | {(op, "backward", backend): calls for op, calls in OPS.items() if op != "tile_abs_max"}


@pytest.mark.feature("torch.compile, default mode")
def test_inductor_makes_one_graph_of_a_block_for_all_backends(device: str) -> None:
    """A policy switch, of a block of code or of the process, takes effect and compiles nothing again."""
    model, plain = blocks(device)
    compiler = CountingCompiler("inductor")
    function = torch.compile(model, fullgraph=True, backend=compiler)
    for number, backend in enumerate((*BACKENDS, *BACKENDS)):
        x = batch(device, number=number)
        # On a GPU, backward of a compiled graph runs on a thread of autograd's, which sees the policy of the process.
        switch = triptych.use if device == "cpu" and number < len(BACKENDS) else scope.process_policy
        with switch(backend):
            before = counts()
            found = trained(model, function, x)
            assert dict(counts() - before) == of_one_step(backend)
            assert_same(found, trained(plain, plain, x))
    assert compiler.graphs == 1


@pytest.mark.feature("torch.compile, reduce-overhead")
def test_reduce_overhead_replays_what_was_recorded(backend: str, device: str) -> None:
    """On a GPU the first step warms up, the second is recorded, and from then on a CUDA graph is replayed: no operator runs, and results follow the input all the same."""
    model, plain = blocks(device)
    function = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    counters.clear()
    with scope.process_policy(backend):
        for number in range(5 if device == "cuda" else 1):
            x = batch(device, number=number)
            torch.compiler.cudagraph_mark_step_begin()
            before = counts()
            found = trained(model, function, x)
            ran = dict(counts() - before)
            assert ran == ({} if device == "cuda" and number >= 2 else of_one_step(backend))
            assert_same(found, trained(plain, plain, x))
    assert (counters["inductor"]["cudagraph_skips"] == 0) is (device == "cuda")
