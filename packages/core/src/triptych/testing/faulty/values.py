"""Faults that give wrong values: strides, shapes, precision, forgotten arguments."""

from __future__ import annotations

from typing import Any

import torch

from triptych.call import contiguous_stride
from triptych.opspec import Tensors
from triptych.testing.faulty.catalogue import (
    FAULTS,
    Fault,
    Healthy,
    _no_reasons,
    fault,
    offsets,
    read_at,
    read_with,
    replaced,
    scaled,
    with_integers,
)

HALVES = (torch.bfloat16, torch.float16)


# --- strides ----------------------------------------------------------------------------------------------------------


@fault("backward_values", "reads_inputs_only", case="S2")
def saved_tensor_with_outer_stride(healthy: Healthy, *args: Any) -> Tensors:
    """Backward walks the rows of a saved 3-D tensor with the stride of its first dimension."""

    def misread(saved: torch.Tensor) -> torch.Tensor:
        if saved.dim() < 3 or not saved.numel():
            return saved
        flat = (saved.numel() // saved.shape[-1], saved.shape[-1])
        return read_at(saved, offsets(flat, (saved.stride(0), saved.stride(-1)), saved.device)).view(saved.shape)

    return healthy(*replaced(args, healthy.inputs, misread)) if healthy.backward else healthy(*args)


@fault("gradient_layouts", "autograd_layouts", case="M2")
def expanded_gradient_taken_as_contiguous(healthy: Healthy, *args: Any) -> Tensors:
    """A gradient of stride 0 is read as if it were contiguous."""

    def misread(grad: torch.Tensor) -> torch.Tensor:
        return read_with(grad, contiguous_stride(tuple(grad.shape))) if 0 in grad.stride() else grad

    return healthy(*replaced(args, healthy.gradients, misread))


@fault("gradient_layouts", "autograd_layouts", case="M3")
def narrowed_gradient_taken_as_contiguous(healthy: Healthy, *args: Any) -> Tensors:
    """A gradient with gaps between its rows is read without them."""

    def misread(grad: torch.Tensor) -> torch.Tensor:
        gaps = grad.dim() > 1 and grad.stride(-1) == 1 and grad.stride(-2) > grad.shape[-1]
        return read_with(grad, contiguous_stride(tuple(grad.shape))) if gaps else grad

    return healthy(*replaced(args, healthy.gradients, misread))


@fault("gradient_layouts", "autograd_layouts", case="M3")
def transposed_gradient_taken_as_contiguous(healthy: Healthy, *args: Any) -> Tensors:
    """A gradient whose last stride is not 1 is read as if it were contiguous."""

    def misread(grad: torch.Tensor) -> torch.Tensor:
        return read_with(grad, contiguous_stride(tuple(grad.shape))) if grad.stride(-1) > 1 else grad

    return healthy(*replaced(args, healthy.gradients, misread))


@fault("forward_values", "drawn_layouts")
def leading_dimensions_taken_to_collapse(healthy: Healthy, *args: Any) -> Tensors:
    """Rows of any tensor are taken to follow each other at the stride of the second to last dimension."""

    def misread(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 3 or not tensor.numel():
            return tensor
        flat = (tensor.numel() // tensor.shape[-1], tensor.shape[-1])
        return read_at(tensor, offsets(flat, tensor.stride()[-2:], tensor.device)).view(tensor.shape)

    return healthy(*replaced(args, healthy.inputs, misread))


@fault("forward_values", "reads_inputs_only")
def storage_offset_ignored(healthy: Healthy, *args: Any) -> Tensors:
    """Tensors are read from the beginning of their storage."""
    return healthy(*replaced(args, healthy.inputs, lambda t: t.as_strided(t.shape, t.stride(), 0)))


@fault("addresses_past_2_31", case="M1")
def addresses_in_32_bits(healthy: Healthy, *args: Any) -> Tensors:
    """Addresses are computed in 32 bits and wrap around past 2^31 elements."""

    def misread(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel():
            return tensor
        exact = offsets(tuple(tensor.shape), tensor.stride(), tensor.device)
        return read_at(tensor, exact.to(torch.int32).to(torch.int64))

    return healthy(*replaced(args, healthy.inputs, misread))


# --- sizes ------------------------------------------------------------------------------------------------------------


@fault("forward_values", "backward_values")
def tail_columns_ignored(healthy: Healthy, *args: Any) -> Tensors:
    """The last columns, where their number is no multiple of 8, come out as zero."""
    outputs = healthy(*args)
    for output in outputs:
        if output.dim() > 1 and output.shape[-1] % 8:
            output[..., output.shape[-1] // 8 * 8 :] = 0
    return outputs


@fault("forward_values")
def long_rows_cut(healthy: Healthy, *args: Any) -> Tensors:
    """Columns past 16384 come out as zero."""
    outputs = healthy(*args)
    for output in outputs:
        if output.dim() > 1:
            output[..., 16384:] = 0
    return outputs


@fault("forward_values", "backward_values")
def no_rows_crash(healthy: Healthy, *args: Any) -> Tensors:
    """A tensor without elements raises, as a launch of an empty grid does."""
    if any(isinstance(value, torch.Tensor) and not value.numel() for value in args):
        raise RuntimeError("invalid configuration argument")
    return healthy(*args)


@fault("forward_values", "backward_values", "sharding_rule")
def one_lane_nan(healthy: Healthy, *args: Any) -> Tensors:
    """One element is NaN."""
    outputs = healthy(*args)
    if outputs[0].numel() > 7 and outputs[0].is_floating_point():
        outputs[0].view(-1)[7] = float("nan")
    return outputs


@fault(
    "forward_values",
    "backward_values",
    "wanted_gradients",
    "absent_gradients",
    "autograd_subsets",
    "gradcheck",
    "mixed_backends",
    "compile_static",
    "compile_dynamic",
    "compile_inductor",
    "policy_switch",
    "export_strict",
    "export_non_strict",
)
def one_percent_off(healthy: Healthy, *args: Any) -> Tensors:
    """Everything in backward, and what backward alone sees of forward, is 1 % too large."""
    kept = len(healthy.spec.differentiable) if healthy.forward else 0
    outputs = healthy(*args)
    return (*outputs[:kept], *scaled(outputs[kept:], 1.01))


# --- precision --------------------------------------------------------------------------------------------------------


@fault("forward_values")
def statistics_in_bfloat16(healthy: Healthy, *args: Any) -> Tensors:
    """float32 results of a 16-bit call have been through bfloat16."""
    outputs = healthy(*args)
    half = any(isinstance(value, torch.Tensor) and value.dtype in HALVES for value in args)
    return tuple(out.bfloat16().float() if half and out.dtype is torch.float32 else out for out in outputs)


@fault("forward_values")
def master_weight_rounded(healthy: Healthy, *args: Any) -> Tensors:
    """A float32 tensor beside 16-bit ones is rounded to their dtype before use."""
    first = args[0].dtype
    half = first in HALVES and healthy.forward

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(first).to(tensor.dtype) if tensor.is_floating_point() else tensor

    return healthy(*replaced(args, healthy.inputs if half else [], rounded))


@fault("forward_values")
def rounded_once_too_often(healthy: Healthy, *args: Any) -> Tensors:
    """16-bit inputs lose their last bit on the way in."""

    def coarse(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dtype not in HALVES else (tensor.view(torch.int16) & -2).view(tensor.dtype)

    return healthy(*replaced(args, healthy.inputs if healthy.forward else [], lambda t: coarse(t.contiguous())))


def _row_by_row(healthy: Healthy, args: tuple[Any, ...]) -> list[Tensors]:
    """The outputs of one call for each row of the first dimension."""
    first: torch.Tensor = args[0]
    count = first.shape[0]

    def row(value: Any, i: int) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() < max(first.dim() - 1, 1):
            return value
        return value[i : i + 1] if value.shape[:1] == first.shape[:1] else value

    return [healthy(*(row(value, i) for value in args)) for i in range(count)]


@fault("backward_values")
def sums_in_bfloat16(healthy: Healthy, *args: Any) -> Tensors:
    """A gradient that is summed over rows is accumulated in bfloat16."""
    outputs = healthy(*args)
    first: torch.Tensor = args[0]
    if healthy.forward or first.dim() != 2 or not 1 < first.shape[0] < 64 or first.shape[0] == first.shape[1]:
        return outputs
    parts = _row_by_row(healthy, args)
    summed = []
    for i, output in enumerate(outputs):
        total = output
        if output.numel() and output.shape[0] != first.shape[0]:
            total = torch.zeros_like(output, dtype=torch.bfloat16)
            for part in parts:
                total = total + part[i].bfloat16()
        summed.append(total.to(output.dtype))
    return tuple(summed)


@fault("backward_values")
def last_row_left_out_of_sums(healthy: Healthy, *args: Any) -> Tensors:
    """A gradient that is summed over rows misses the last one."""
    outputs = healthy(*args)
    if healthy.forward or not args[0].numel():
        return outputs

    def without_last_row(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad[-1:] = 0
        return grad

    short = healthy(*replaced(args, healthy.gradients, without_last_row))
    shape = args[0].shape
    return tuple(cut if out.shape != shape else out for out, cut in zip(outputs, short, strict=True))


# --- forgotten arguments ----------------------------------------------------------------------------------------------


def ignoring(scalar: str) -> Fault:
    """The fault of a backend that ignores one scalar of forward, in either phase."""

    def run(healthy: Healthy, *args: Any) -> Tensors:
        names = healthy.spec.phase(healthy.phase).scalar_names
        if scalar not in names:
            return healthy(*args)
        first = next(iter(healthy.spec.samples())).scalars
        usual = dict(zip(healthy.spec.forward.scalar_names, first, strict=True))[scalar]
        place = len(healthy.spec.phase(healthy.phase).tensors) + names.index(scalar)
        return healthy(*args[:place], usual, *args[place + 1 :])

    run.__doc__ = f"{scalar} is ignored: the usual value is used."
    return Fault(f"{scalar}_ignored", "", ("forward_values",), run, _no_reasons)


for _scalar in ("eps", "offset", "rounding"):
    FAULTS[f"{_scalar}_ignored"] = ignoring(_scalar)


@fault("absent_gradients", "autograd_subsets")
def absent_gradient_taken_as_ones(healthy: Healthy, *args: Any) -> Tensors:
    """A gradient that is absent counts as ones."""
    filled = tuple(
        torch.ones_like(args[0]) if i in healthy.gradients and value is None else value for i, value in enumerate(args)
    )
    return healthy(*filled)


@fault("wanted_gradients", "outputs_as_declared")
def unwanted_gradients_computed(healthy: Healthy, *args: Any) -> Tensors:
    """Gradients that are not wanted come back all the same, with shape [1] where there is nothing to compute."""
    if healthy.forward:
        return healthy(*args)
    count = len(healthy.spec.gradients)
    outputs = healthy(*args[:-count], *(True,) * count)
    return tuple(output if output.numel() else output.new_zeros(1) for output in outputs)


@fault("wanted_gradients", "autograd_subsets")
def only_gradient_wrong(healthy: Healthy, *args: Any) -> Tensors:
    """A gradient that is wanted alone comes out twice too large."""
    outputs = healthy(*args)
    count = len(healthy.spec.gradients)
    alone = healthy.backward and count > 1 and sum(args[-count:]) == 1
    return scaled(outputs, 2) if alone else outputs


@fault("gradcheck", "backward_values")
def gradients_off_in_float64(healthy: Healthy, *args: Any) -> Tensors:
    """In float64 gradients are 1 % too large."""
    outputs = healthy(*args)
    wide = healthy.backward and args[0].dtype is torch.float64
    return scaled(outputs, 1.01) if wide else outputs


@fault("forward_values", "mixed_backends", case="W5")
def saved_tensor_in_own_units(healthy: Healthy, *args: Any) -> Tensors:
    """What forward saves for backward is twice what the op declares; its own backward knows, no other one does."""
    saved = [name for name in healthy.spec.saved if name in healthy.spec.forward.outputs]
    private = [name for name in saved if name not in healthy.spec.differentiable]
    if healthy.forward:
        named = zip(healthy.spec.forward.outputs, healthy(*args), strict=True)
        return tuple(scaled((output,), 2)[0] if name in private else output for name, output in named)
    names = healthy.spec.phase(healthy.phase).tensor_names
    return healthy(*replaced(args, [names.index(name) for name in private], lambda tensor: scaled((tensor,), 0.5)[0]))


# --- counts, bits, and what is not a number ---------------------------------------------------------------------------


@fault("forward_values")
def integers_off_by_one(healthy: Healthy, *args: Any) -> Tensors:
    """The last number of every output that holds integers is one too large."""

    def larger(output: torch.Tensor) -> torch.Tensor:
        output.view(-1)[-1:] += 1
        return output

    return with_integers(healthy(*args), larger)


@fault("forward_values")
def integers_through_bfloat16(healthy: Healthy, *args: Any) -> Tensors:
    """Outputs that hold integers have been through bfloat16, in which a count gets stuck at 256."""
    return with_integers(healthy(*args), lambda output: output.bfloat16().to(output.dtype))


@fault("forward_values", "backward_values")
def absent_tensors_crash(healthy: Healthy, *args: Any) -> Tensors:
    """A tensor that is left out is used all the same."""
    if any(args[i] is None for i in healthy.inputs):
        raise AttributeError("'NoneType' object has no attribute 'data_ptr'")
    return healthy(*args)


@fault("forward_values")
def nan_lost(healthy: Healthy, *args: Any) -> Tensors:
    """NaN comes out as zero, as from a maximum that never picks it."""
    return tuple(output.nan_to_num(0, torch.inf, -torch.inf) for output in healthy(*args))
