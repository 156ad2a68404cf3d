"""Tensors that are made again for backward: not kept, the same gradients, the right policy, changes noticed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import triptych
from triptych import registry, remake
from triptych.ops.analog_linear import analog_linear
from triptych.ops.analog_weight import analog_weight
from triptych.testing import ran, under

Tensor = torch.Tensor
FORWARD = ("analog_linear", "forward", "composite")
BACKWARD = ("analog_linear", "backward", "composite")
WEIGHT = ("analog_weight", "forward", "composite")


@contextmanager
def saved() -> Iterator[list[Tensor]]:
    """The tensors that autograd keeps in the block."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def noisy(weight: Tensor, seed: Tensor) -> Tensor:
    return analog_weight(weight, None, seed, noise="per_channel", std_dev=0.1)[0]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 16, generator=generator).requires_grad_()
    weight = torch.randn(8, 16, generator=generator)
    return x, weight, torch.tensor([7])


def test_a_marked_weight_is_not_kept_and_gives_the_same_gradient() -> None:
    x, weight, seed = inputs()
    with under("composite"):
        kept_weight = noisy(weight, seed)
        (expected,) = torch.autograd.grad(analog_linear(x, kept_weight).sum(), x)
        modified = noisy(weight, seed)
        remake.attach(modified, noisy, weight, seed)
        with saved() as kept:
            y = analog_linear(x, modified)
        assert not any(tensor.data_ptr() == modified.data_ptr() for tensor in kept)
        assert any(tensor.data_ptr() == weight.data_ptr() for tensor in kept)  # hooks see what it is made from
        with ran({BACKWARD: 1, WEIGHT: 1}):
            (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, expected)


def test_an_unmarked_weight_is_kept() -> None:
    x, weight, seed = inputs()
    with under("composite"), saved() as kept:
        modified = noisy(weight, seed)
        analog_linear(x, modified)
    assert any(tensor.data_ptr() == modified.data_ptr() for tensor in kept)


def test_it_is_made_under_the_policy_of_forward() -> None:
    x, weight, seed = inputs()
    with triptych.use("composite"):
        modified = noisy(weight, seed)
        remake.attach(modified, noisy, weight, seed)
        y = analog_linear(x, modified)
    others = [name for name in registry.backends.names() if name != "composite"]
    with under(others[0] if others else "composite"), ran({BACKWARD: 1, WEIGHT: 1}):
        y.sum().backward()


def test_a_source_that_changed_is_an_error() -> None:
    x, weight, seed = inputs()
    with under("composite"):
        modified = noisy(weight, seed)
        remake.attach(modified, noisy, weight, seed)
        y = analog_linear(x, modified)
        weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_it_may_be_made_more_than_once() -> None:
    x, weight, seed = inputs()
    with under("composite"):
        modified = noisy(weight, seed)
        remake.attach(modified, noisy, weight, seed)
        y = analog_linear(x, modified)
        first = torch.autograd.grad(y.sum(), x, retain_graph=True)
        with ran({BACKWARD: 1, WEIGHT: 1}):
            second = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first[0], second[0])


def test_checkpointed_recomputation_makes_it_again_too() -> None:
    x, weight, seed = inputs()

    def layer(x: Tensor) -> Tensor:
        modified = noisy(weight, seed)
        remake.attach(modified, noisy, weight, seed)
        return analog_linear(x, modified)

    with under("composite"):
        (expected,) = torch.autograd.grad(layer(x).sum(), x)
        y = checkpoint(layer, x, use_reentrant=False)
        with ran({FORWARD: 1, BACKWARD: 1, WEIGHT: 2}):
            (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, expected)


def test_what_a_maker_reads_is_dropped_by_checkpointing() -> None:
    """The sources are kept by autograd, not by the function: inside a checkpoint nothing keeps them alive."""
    alive: list[weakref.ref[torch.UntypedStorage]] = []

    def layer(x: Tensor) -> Tensor:
        wide = x * 2  # an activation inside the checkpoint
        alive.append(weakref.ref(wide.untyped_storage()))
        columns = wide.repeat(1, 2)
        remake.attach(columns, lambda wide: wide.repeat(1, 2), wide.detach())
        return analog_linear(columns, torch.ones(3, 32))

    x = torch.randn(5, 16, requires_grad=True)
    with under("composite"):
        y = checkpoint(layer, x, use_reentrant=False)
        assert alive[0]() is None
        (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, torch.full((5, 16), 12.0))
