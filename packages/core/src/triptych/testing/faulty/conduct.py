"""Faults in conduct: running elsewhere, refusing what may not be refused, giving no reasons."""

from __future__ import annotations

from typing import Any

import torch

import triptych
from triptych import dispatch
from triptych.call import Call
from triptych.opspec import Tensors
from triptych.testing.faulty.catalogue import Healthy, fault, fault_of_refusal


def _elsewhere(healthy: Healthy, args: tuple[Any, ...]) -> Tensors:
    with triptych.use("composite"):
        return dispatch.define(healthy.spec).run_phase("", healthy.phase, args)


@fault("forward_values", "backward_values", case="W6")
def runs_another_backend(healthy: Healthy, *args: Any) -> Tensors:
    """Every call is passed on to another backend."""
    return _elsewhere(healthy, args)


@fault("forward_values", "gradient_layouts", case="W6")
def falls_back_in_silence(healthy: Healthy, *args: Any) -> Tensors:
    """Calls with a tensor that is not contiguous are passed on to another backend."""
    if all(value.is_contiguous() for value in args if isinstance(value, torch.Tensor)):
        return healthy(*args)
    return _elsewhere(healthy, args)


@fault("gradient_layouts", "autograd_layouts")
def strided_gradients_raise(healthy: Healthy, *args: Any) -> Tensors:
    """A gradient that is not contiguous raises when it arrives, long after forward has run."""
    if not all(args[i] is None or args[i].is_contiguous() for i in healthy.gradients):
        raise RuntimeError("expected a contiguous gradient")
    return healthy(*args)


@fault("outputs_carry_no_gradient")
def leaves_a_graph_behind(healthy: Healthy, *args: Any) -> Tensors:
    """Outputs hang on a graph of PyTorch's own, which keeps the inputs alive."""
    with torch.enable_grad():
        return tuple(
            output + torch.zeros_like(output, requires_grad=True) if output.is_floating_point() else output
            for output in healthy(*args)
        )


@fault_of_refusal("refusals", "forward_values", case="W3")
def floor_refused(call: Call) -> list[str]:
    """Rows of more than 60000 columns are refused, which belong to the floor."""
    if any(meta is not None and meta.shape and meta.shape[-1] > 60000 for _, meta in call.tensors):
        return ["The rows are longer than 60000 columns, which do not fit; use another backend."]
    return []


@fault_of_refusal("refusals")
def refused_without_reason(call: Call) -> list[str]:
    """float64 is refused with an empty sentence."""
    return [""] if call.tensors[0][1] is not None and call.tensors[0][1].dtype is torch.float64 else []


@fault_of_refusal("refusals")
def refused_in_two_words(call: Call) -> list[str]:
    """float64 is refused with a remark that is no sentence."""
    wide = call.tensors[0][1] is not None and call.tensors[0][1].dtype is torch.float64
    return ["unsupported dtype"] if wide else []
