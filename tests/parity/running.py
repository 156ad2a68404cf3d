"""Both layers through the same training: the same state before each step, compared after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from comparing import Tolerances, Worst, relative
from margins import watched
from peer import clip, same_noise, synchronise
from torch import Tensor

import triptych

ATTEMPTS = 300


def train(
    theirs: Any, ours: Any, draw: Callable[[torch.Generator], Tensor], seed: int, steps: int, worst: Worst
) -> None:
    """Training steps, which calibrate the input range first, then one step in evaluation."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps + 1):
        training = step < steps
        theirs.train(training)
        ours.train(training)
        x, noise_seed = clear_input(theirs, ours, draw, generator)
        one_step(theirs, ours, x, generator, noise_seed, worst)
        descend(theirs)
        synchronise(theirs, ours)
        clip(theirs)
        ours.clip_weights()
        worst.compare("clipped weight", ours.weight, theirs.weight, relative(16, ours.weight))
        synchronise(theirs, ours)


def clear_input(
    theirs: Any, ours: Any, draw: Callable[[torch.Generator], Tensor], generator: torch.Generator
) -> tuple[Tensor, int]:
    """An input and a seed for the noise with which no value of the reference's comes close to being rounded otherwise.

    Where a row has only one input that is not 0, as at the border of a convolution, its place among the levels depends on
    the weights alone: these are changed a little from time to time.
    """
    for attempt in range(1, ATTEMPTS):
        x, noise_seed = draw(generator), int(torch.randint(2**31, (), generator=generator))
        if attempt % 30 == 0:
            with torch.no_grad():
                theirs.weight.mul_(1 + 0.01 * torch.randn(theirs.weight.shape, generator=generator))
            synchronise(theirs, ours)
        with torch.no_grad():
            _, clear = forward(copy.deepcopy(theirs), ours, x, noise_seed)
        if clear:
            return x, noise_seed
    raise AssertionError(f"{ATTEMPTS} inputs, and each has a value on the edge of a decision")


def forward(theirs: Any, ours: Any, x: Tensor, noise_seed: int) -> tuple[Tensor, bool]:
    """The reference's output, and whether it kept clear of every decision."""
    torch.manual_seed(noise_seed)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64)
    noise = same_noise(theirs, rows_of(ours, x).shape[0], seed) if theirs.training else nullcontext()
    with watched(theirs) as margins, noise:
        return theirs(x), margins.clear


def rows_of(ours: Any, x: Tensor) -> Tensor:
    (rows,) = ours.crossbar_inputs(x)
    return rows.reshape(-1, rows.shape[-1])  # type: ignore[no-any-return]


def output_rows(ours: Any, y: Tensor) -> Tensor:
    outputs = ours.weight.shape[0]
    channels_last = ours.weight.dim() == 2
    return y.reshape(-1, outputs) if channels_last else y.movedim(-ours.SPATIAL - 1, -1).reshape(-1, outputs)


def one_step(theirs: Any, ours: Any, x: Tensor, generator: torch.Generator, noise_seed: int, worst: Worst) -> None:
    """Forward and backward of both, and everything that comes out of them."""
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    for layer in (theirs, ours):
        layer.zero_grad()
    their_y, _ = forward(theirs, ours, other, noise_seed)
    torch.manual_seed(noise_seed)
    our_y = ours(mine)
    g = torch.randn(our_y.shape, generator=generator)
    our_y.backward(g)
    their_y.backward(g.reshape(their_y.shape))

    for name, roundings in (("input_range", 64), ("x_min", 16), ("x_max", 16)):
        if getattr(ours, name) is not None:
            value = getattr(ours, name)
            worst.compare(name, value.detach(), getattr(theirs, name).detach(), relative(roundings, value))
    if ours.input_range_update_idx is not None:
        assert ours.input_range_update_idx.tolist() == theirs.input_range_update_idx.tolist(), "batches counted"

    allowed = tolerances(ours, x, g)
    worst.compare(
        "y", output_rows(ours, our_y.detach()), output_rows(ours, their_y.detach().reshape(g.shape)), allowed.y
    )
    leaf = x.clone().requires_grad_()
    (dx_allowed,) = torch.autograd.grad(rows_of(ours, leaf), leaf, allowed.dx)
    worst.compare("dx", mine.grad, other.grad, dx_allowed)
    parts = (
        ("weight", allowed.dweight.view_as(ours.weight)),
        ("bias", allowed.dbias),
        ("input_range", allowed.drange),
        ("learnable_weight_clip", allowed.dclip),
    )
    for name, tolerance in parts:
        our_tensor, their_tensor = getattr(ours, name), getattr(theirs, name)
        if our_tensor is not None:
            worst.compare(f"d {name}", our_tensor.grad, their_tensor.grad, tolerance)


def tolerances(ours: Any, x: Tensor, g: Tensor) -> Tolerances:
    config, rows = ours.rpu_config, rows_of(ours, x).abs()
    weight = ours.weight.detach().flatten(1).abs()
    modifier = config.modifier
    largest = weight.max().item() if ours.learnable_weight_clip is None else ours.learnable_weight_clip.max().item()
    levels = max(modifier.res, 1 / modifier.res) if modifier.quantization_type.value != "None" else 0.0
    spread = largest * (6 * modifier.std_dev + (1 / levels if levels else 0))
    ranges = torch.zeros(ours.tiles) if ours.input_range is None else ours.input_range.detach().abs()
    if config.pre_post.input_range.dynamic:
        ranges = ranges + rows.max()
    return Tolerances(
        x=rows + ranges.max() / 30,
        g=output_rows(ours, g).abs(),
        weight=weight + spread,
        bias=None if ours.bias is None else ours.bias.detach().abs(),
        ranges=ranges,
        clipped=clipped_places(ours, rows, ranges),
        fast=config.pre_post.input_range.fast_mode,
        full_scale=ranges.max().item() * largest,
        levels=levels,
    )


def clipped_places(ours: Any, rows: Tensor, ranges: Tensor) -> Tensor:
    """[R, N]: which inputs have a part in the gradient of the input range."""
    wide = torch.cat([ranges[tile].expand(size) for tile, size in enumerate(ours.in_sizes)])
    return rows >= wide * (1 - 1e-5)


@torch.no_grad()
def descend(theirs: Any) -> None:
    """A step of plain gradient descent, small enough to stay in the range of sensible numbers."""
    for parameter in theirs.parameters():
        if parameter.grad is not None:
            parameter.sub_(0.01 * parameter.grad / parameter.grad.norm().clamp(min=1.0))
    if theirs.input_range is not None:
        theirs.input_range.clamp_(min=0.2)


def backends_that_ran(before: Any) -> set[str]:
    """The backends that ran anything since `before`, an earlier `triptych.report()`."""
    earlier = {(row.op, row.phase, row.backend): row.calls for row in before.rows}
    return {
        row.backend for row in triptych.report().rows if row.calls > earlier.get((row.op, row.phase, row.backend), 0)
    }


def ran(before: Any, op: str, phase: str, backend: str) -> bool:
    """Whether a backend ran a phase of an op since `before`."""

    def calls(report: Any) -> int:
        return sum(row.calls for row in report.rows if (row.op, row.phase, row.backend) == (op, phase, backend))

    return calls(triptych.report()) > calls(before)
