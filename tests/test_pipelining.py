"""A model that is cut into pipeline stages keeps its norms as opaque operators and trains as before.

One process and no network: the stages run one after the other.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline

import triptych
from triptych.layers import AddRMSNorm, RMSNorm
from triptych.testing import ran


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps=1e-6)
        self.linear = nn.Linear(width, width)
        self.add_norm = AddRMSNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.add_norm(self.linear(self.norm(x)), x)
        out: Tensor = y + h
        return out


class Model(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def triptych_nodes(stage: nn.Module) -> list[str]:
    """The names of Triptych's operators in the graphs of a stage and of the modules inside it, in order."""
    graphs = [
        graph for module in stage.modules() if isinstance(graph := getattr(module, "graph", None), torch.fx.Graph)
    ]
    targets = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return [str(target) for target in targets if str(target).startswith("triptych.")]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # PyTorch's own, while it copies what it traced
@pytest.mark.parametrize(("forward", "backward"), [("torch", "torch"), ("composite", "torch"), ("torch", "composite")])
def test_stages_hold_the_norms_whole_and_give_the_gradients_of_the_unsplit_model(forward: str, backward: str) -> None:
    torch.manual_seed(0)
    model = Model(16, blocks=3)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 5, 16)
    pipe = pipeline(copy.deepcopy(model), (x,), split_spec={f"blocks.{at}": SplitPoint.BEGINNING for at in (1, 2)})
    stages = [pipe.get_stage_module(number) for number in range(pipe.num_stages)]
    assert [triptych_nodes(stage) for stage in stages] == [
        ["triptych.rms_norm.default", "triptych.add_rms_norm.default"]
    ] * 3

    policy = f"{forward};rms_norm.backward={backward};add_rms_norm.backward={backward}"
    counts = {
        (op, phase, backend): 3
        for op in ("rms_norm", "add_rms_norm")
        for phase, backend in (("forward", forward), ("backward", backward))
    }
    with triptych.use(policy), ran(counts):
        start = x.clone().requires_grad_()
        expected = model(start)
        expected.square().sum().backward()
    with triptych.use(policy), ran(counts):
        entry = x.clone().requires_grad_()
        values: Tensor = entry
        for stage in stages:
            values = stage(values)
        values.square().sum().backward()

    assert torch.equal(values, expected)
    assert entry.grad is not None
    assert start.grad is not None
    assert torch.equal(entry.grad, start.grad)
    gradients = {name: each.grad for stage in stages for name, each in stage.named_parameters()}
    wanted = {name: each.grad for name, each in model.named_parameters()}
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient is not None
        found = gradients[name]
        assert found is not None
        assert torch.equal(found, gradient), name
