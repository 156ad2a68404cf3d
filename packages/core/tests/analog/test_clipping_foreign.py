"""Weight clipping under optimisers that torch.optim knows nothing of, and of weights that are sharded."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from clipped_layer import (
    LEARNED,
    PLAIN,
    ROWS,
    WHOLE,
    Clipped,
    assert_same,
    backward,
    by_hand,
    clipped,
    copy_new,
    pair,
    subtract,
    x_of,
)
from torch import nn

from triptych.analog import AnalogConfig

# --- written by hand --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", PLAIN)
@pytest.mark.parametrize("config", [WHOLE, ROWS, LEARNED], ids=["whole", "rows", "learned"])
def test_a_hand_written_optimizer_is_followed_by_the_next_training_forward(update: Any, config: AnalogConfig) -> None:
    ours, manual = pair(config)
    for step in range(4):
        for micro in range(2):
            for layer in (ours, manual):
                layer(x_of())  # a forward that nobody differentiates
                backward(layer, 10 * step + micro)
        for layer in (ours, manual):
            for p in layer.parameters():
                update(p, 0.02)
            layer.zero_grad()
        raw = ours.weight.clone()
        ours.eval()(x_of())
        assert torch.equal(ours.weight, raw), "evaluation must not change a parameter"
        ours.train()(x_of())
        by_hand(manual, config)
        assert_same(ours, manual)


def test_two_forwards_before_one_backward_after_a_hand_written_step() -> None:
    layer = Clipped()
    for _ in range(3):
        (layer(x_of()).sum() + layer(x_of(seed=2)).sum()).backward()
        layer.weight.data.sub_(layer.weight.grad)  # type: ignore[arg-type]
        layer.weight.grad = None


def test_a_graph_between_a_step_that_autograd_saw_and_its_clipping_raises() -> None:
    layer = Clipped()
    for _ in range(2):
        layer.zero_grad()
        (layer(x_of()).sum() + layer(x_of(seed=2)).sum()).backward()  # two forwards: the second finds nothing to do
        copy_new(layer.weight, 0.05)
        x = x_of().requires_grad_()
        y = layer.eval()(x)
        expected = clipped(layer.weight)
        layer.train()(x_of())
        torch.testing.assert_close(layer.weight.double(), expected, rtol=1e-6, atol=0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        y = layer.eval()(x)
        layer.train()(x_of())
        y.sum().backward()  # clipped before this forward, and not again
        torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(5, 8))


def test_clipping_after_a_step_through_data_invalidates_no_graph() -> None:
    layer = Clipped()
    backward(layer)
    y = layer(x_of())
    version = layer.weight._version
    subtract(layer.weight, 0.05)
    expected = clipped(layer.weight)
    layer(x_of())
    torch.testing.assert_close(layer.weight.double(), expected, rtol=1e-6, atol=0)
    assert layer.weight._version == version
    y.sum().backward()


def test_checkpointing_recomputes_what_forward_saw() -> None:
    layer = Clipped()
    for step in range(3):
        y = torch.utils.checkpoint.checkpoint(layer, x_of(seed=step), use_reentrant=False)
        values = layer.weight.clone()
        y.square().sum().backward()
        assert torch.equal(layer.weight, values)
        layer.weight.data.sub_(0.01 * layer.weight.grad)  # type: ignore[operator]
        layer.weight.grad = None


def test_megatrons_master_copy_is_clipped_with_the_weight() -> None:
    layer = Clipped(dtype=torch.bfloat16)
    main = layer.weight.detach().clone().float()
    layer.weight.main_param = main
    optimizer = torch.optim.AdamW([main], 0.05)
    twin = main.clone()
    second = torch.optim.AdamW([twin], 0.05)
    for step in range(3):
        backward(layer, step)
        main.grad = layer.weight.grad.float()  # type: ignore[union-attr]
        twin.grad = main.grad.clone()
        layer.weight.grad = None
        optimizer.step()
        second.step()
        twin.copy_(clipped(twin))
        torch.testing.assert_close(main, twin, rtol=1e-6, atol=0)
        layer.weight.data.copy_(main)
        layer(x_of(dtype=torch.bfloat16))
        assert torch.equal(layer.weight, main.bfloat16()), "the forward has nothing left to do"


def test_masters_that_nothing_leads_to_stay_but_every_forward_sees_clipped_weights() -> None:
    layer = Clipped(dtype=torch.bfloat16)
    main = layer.weight.detach().clone().float()
    optimizer = torch.optim.SGD([main], 0.01)
    for step in range(3):
        backward(layer, step)
        main.grad = layer.weight.grad.float()  # type: ignore[union-attr]
        layer.weight.grad = None
        optimizer.step()
        layer.weight.data.copy_(main)
        expected = clipped(layer.weight)
        layer(x_of(dtype=torch.bfloat16))
        torch.testing.assert_close(layer.weight.double(), expected, rtol=2**-8, atol=0)


def test_when_the_optimizer_is_gone_forwards_look_again() -> None:
    layer = Clipped()
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    backward(layer)
    optimizer.step()
    del optimizer
    gc.collect()
    layer.weight.grad = None
    backward(layer)
    subtract(layer.weight, 0.05)
    expected = clipped(layer.weight)
    layer(x_of())
    torch.testing.assert_close(layer.weight.double(), expected, rtol=1e-6, atol=0)


# --- sharded weights --------------------------------------------------------------------------------------------------


HERE = Path(__file__).parent


def train_sharded(rank: int, processes: int, file: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=processes)
    mesh = torch.distributed.init_device_mesh("cpu", (processes,))
    for config in (ROWS, WHOLE, LEARNED):
        ours, manual = pair(config)
        model = nn.Sequential(ours)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        first, second = torch.optim.AdamW(model.parameters(), 0.05), torch.optim.AdamW(manual.parameters(), 0.05)
        for step in range(3):
            for layer, optimizer in ((model, first), (manual, second)):
                optimizer.zero_grad()
                layer(x_of(seed=step)).square().sum().backward()
                optimizer.step()
            by_hand(manual, config)
            for name, sharded in ours.named_parameters():
                torch.testing.assert_close(sharded.full_tensor(), manual.get_parameter(name).data)  # type: ignore[operator]
        model.to(torch.float64)  # by torch.utils.swap_tensors
        assert all(p.dtype == torch.float64 for p in model.parameters())
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_weights_that_fully_shard_spreads_over_processes(tmp_path: Path) -> None:
    code = f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parent)]!r}; import test_clipping_foreign as t; "
    code += "t.train_sharded(int(sys.argv[1]), 2, sys.argv[2])"
    arguments = [sys.executable, "-W", "ignore", "-c", code]
    jobs = [
        subprocess.Popen([*arguments, str(rank), str(tmp_path / "rendezvous")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [job.communicate(timeout=120)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], errors
