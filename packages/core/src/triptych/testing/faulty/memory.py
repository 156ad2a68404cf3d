"""Faults in the use of memory: unwritten, written twice, read around, shared."""

from __future__ import annotations

from typing import Any

import torch

from triptych.opspec import Tensors
from triptych.testing.faulty.catalogue import Healthy, fault, whole_storage


def _without_last_row(output: torch.Tensor) -> torch.Tensor:
    """A copy in fresh memory of which the last row is not written."""
    copy = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    copy[:-1] = output[:-1]
    return copy


@fault("fresh_memory", case="M5")
def last_row_never_written(healthy: Healthy, *args: Any) -> Tensors:
    """The last row of every output is whatever its memory held."""
    return tuple(_without_last_row(output) if output.dim() > 1 else output for output in healthy(*args))


@fault("fresh_memory", case="M5")
def last_row_never_written_out_of_sight(healthy: Healthy, *args: Any) -> Tensors:
    """The same, with memory taken below PyTorch's dispatcher, where no mode sees the allocation."""
    outputs = healthy(*args)
    with torch._C._DisableTorchDispatch():
        return tuple(_without_last_row(output) if output.dim() > 1 else output for output in outputs)


@fault("fresh_memory", case="M5")
def workspace_taken_as_zero(healthy: Healthy, *args: Any) -> Tensors:
    """Outputs are added into fresh memory that nobody cleared."""
    return tuple(torch.empty(out.shape, dtype=out.dtype, device=out.device).add_(out) for out in healthy(*args))


@fault("fresh_memory")
def writes_past_outputs(healthy: Healthy, *args: Any) -> Tensors:
    """One element behind the end of an output is written, where there is one."""
    output, *rest = healthy(*args)
    copy = torch.empty(output.shape, dtype=output.dtype, device=output.device).copy_(output)
    whole_storage(copy)[copy.numel() : copy.numel() + 1] = 1
    return (copy, *rest)


@fault("reads_inputs_only", case="M6")
def reads_past_rows(healthy: Healthy, *args: Any) -> Tensors:
    """The element behind the last of the first tensor enters the result, where there is one."""
    first: torch.Tensor = args[0]
    output, *rest = healthy(*args)
    if first.numel():
        last = first.storage_offset() + sum((n - 1) * step for n, step in zip(first.shape, first.stride(), strict=True))
        output = output + whole_storage(first)[last + 1 : last + 2].sum().to(output.dtype)
    return (output, *rest)


@fault("inputs_unchanged", "opcheck_forward", "opcheck_backward", case="W1")
def writes_into_inputs(healthy: Healthy, *args: Any) -> Tensors:
    """The first element of the first tensor is changed after use."""
    outputs = healthy(*args)
    with torch.no_grad():
        first: torch.Tensor = args[0].detach()
        if first.numel():
            whole_storage(first)[first.storage_offset()] += 1
    return outputs


@fault("inputs_unchanged", case="W1")
def writes_around_inputs(healthy: Healthy, *args: Any) -> Tensors:
    """The element behind the last of an input is written, where there is one."""
    for value in args:
        if isinstance(value, torch.Tensor) and value.numel():
            last = value.storage_offset() + sum(
                (n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)
            )
            whole_storage(value)[last + 1 : last + 2] = 1
    return healthy(*args)


@fault("outputs_alias_nothing")
def outputs_share_memory(healthy: Healthy, *args: Any) -> Tensors:
    """All outputs of one dtype are slices of one allocation."""
    outputs = healthy(*args)
    dtype = outputs[0].dtype
    together = [output for output in outputs if output.dtype is dtype]
    whole = torch.cat([output.reshape(-1) for output in together])
    parts = iter(torch.split(whole, [output.numel() for output in together]))
    return tuple(next(parts).view(out.shape) if out.dtype is dtype else out for out in outputs)


@fault("outputs_alias_nothing")
def nothing_is_a_slice_of_an_input(healthy: Healthy, *args: Any) -> Tensors:
    """A gradient that is not wanted is an empty slice of an input, which it keeps alive."""
    first: torch.Tensor = args[0]
    return tuple(
        out if out.numel() or out.dtype is not first.dtype else first.as_strided(out.shape, out.stride())
        for out in healthy(*args)
    )


@fault("outputs_alias_nothing")
def buffers_reused(healthy: Healthy, *args: Any) -> Tensors:
    """Outputs are written into the buffers of the call before, where the shapes are the same."""
    outputs = healthy(*args)
    key = tuple((output.shape, output.dtype, output.device) for output in outputs)
    if key not in healthy.memory:
        healthy.memory[key] = outputs
    for kept, output in zip(healthy.memory[key], outputs, strict=True):
        kept.copy_(output)
    kept_outputs: Tensors = healthy.memory[key]
    return kept_outputs


@fault("outputs_as_declared", "opcheck_forward")
def outputs_not_contiguous(healthy: Healthy, *args: Any) -> Tensors:
    """Outputs of two dimensions and more are stored with the last two the other way round."""
    return tuple(
        output.transpose(-1, -2).contiguous().transpose(-1, -2) if output.dim() > 1 else output
        for output in healthy(*args)
    )


@fault("outputs_as_declared", "compile_static", "opcheck_forward")
def outputs_in_wrong_dtype(healthy: Healthy, *args: Any) -> Tensors:
    """The first output is float64, or float32 where float64 is asked for."""
    output, *rest = healthy(*args)
    return (output.float() if output.dtype is torch.float64 else output.double(), *rest)


@fault("deterministic", "short_path", "autograd_runs_the_phases", case="W2")
def every_other_call_differs(healthy: Healthy, *args: Any) -> Tensors:
    """The last bit of one element changes from call to call, as with atomic additions."""
    output, *rest = healthy(*args)
    healthy.memory["calls"] = healthy.memory.get("calls", 0) + 1
    if output.numel() and healthy.memory["calls"] % 2:
        output.view(-1).view(torch.uint8)[0] ^= 1
    return (output, *rest)


@fault("thread_counts")
def depends_on_thread_count(healthy: Healthy, *args: Any) -> Tensors:
    """The last bits of one element follow the number of CPU threads, as sums split between them do."""
    output, *rest = healthy(*args)
    if output.numel():
        output.view(-1).view(torch.uint8)[0] ^= torch.get_num_threads() - 1
    return (output, *rest)
