"""Which memory a backend reads and writes: all of its outputs, its inputs only, in 64-bit addresses."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from triptych.call import BACKWARD
from triptych.opspec import Tensors
from triptych.testing import grid, memory
from triptych.testing.assertions import assert_no_alias, assert_same_bits
from triptych.testing.checks.catalogue import check
from triptych.testing.checks.values import assert_phase
from triptych.testing.grid import Case
from triptych.testing.running import Skip, arguments_of, phases_of, ran, run_phase, under
from triptych.testing.subject import Subject


@check(grid.full)
def fresh_memory(subject: Subject, case: Case) -> None:
    """Results do not depend on what fresh memory held, nor is anything written past an allocation (M5).

    Every element of every output is thus written, and no workspace is taken to be zero.
    """
    for phase in phases_of(subject, case):
        args = arguments_of(subject, case, phase)
        results: list[Tensors] = []
        for pattern in memory.PATTERNS:
            with (
                under(subject.backend),
                ran({(case.op, phase, subject.backend): 1}),
                memory.filled(pattern, torch.device(case.device_type)) as fresh,
            ):
                # The phase itself, not the operator: the operator's fake would allocate in the block too.
                outputs = case.live.run_phase("", phase, args)
            fresh.assert_tails_untouched()
            results.append(tuple(output.clone() for output in outputs))
        what = f"{phase}, with fresh memory full of {memory.PATTERNS[0]:#x} and of {memory.PATTERNS[1]:#x}"
        assert_same_bits(case.spec.phase(phase).outputs, results[0], results[1], what)


@check(grid.full)
def inputs_unchanged(subject: Subject, case: Case) -> None:
    """Inputs, the gaps between their rows and 4 KiB or more around them are not written (W1)."""
    for phase in phases_of(subject, case):
        args, memories = memory.guard_all(arguments_of(subject, case, phase), memory.PATTERNS[1])
        before = [each.clone() for each in memories]
        run_phase(subject.backend, case, phase, args)
        names = _names(case, phase, args)
        for name, now, then, tensor in zip(names, memories, before, _tensors(args), strict=True):
            changed = (now != then).nonzero()
            if len(changed):
                start = tensor.storage_offset() * tensor.element_size()
                raise AssertionError(
                    f"{phase} wrote {len(changed)} bytes into {name} or around it, "
                    f"the first {int(changed[0]) - start} bytes from its first element"
                )


@check(grid.full)
def reads_inputs_only(subject: Subject, case: Case) -> None:
    """Results do not depend on what lies around the inputs and between their rows (S2, M6)."""
    for phase in phases_of(subject, case):
        args = arguments_of(subject, case, phase)
        results: list[Tensors] = []
        for pattern in (memory.NAN_PATTERN, memory.PATTERNS[1]):
            inside, _ = memory.guard_all(args, pattern)
            results.append(run_phase(subject.backend, case, phase, inside))
        what = f"{phase}, with inputs surrounded by NaN and by other values"
        assert_same_bits(case.spec.phase(phase).outputs, results[0], results[1], what)


@check(grid.layouts)
def outputs_alias_nothing(subject: Subject, case: Case) -> None:
    """Outputs are fresh: they share memory with no input, no other output and no output of an earlier call."""
    for phase in phases_of(subject, case):
        args = arguments_of(subject, case, phase)
        names = case.spec.phase(phase).outputs
        wanted = len(case.spec.gradients) if phase == BACKWARD else 0
        for needs in itertools.product((True, False), repeat=wanted):
            asked = (*args[: len(args) - wanted], *needs)
            first = run_phase(subject.backend, case, phase, asked)
            second = run_phase(subject.backend, case, phase, asked)
            others = dict(zip(_names(case, phase, asked), _tensors(asked), strict=True))
            assert_no_alias(names, first, others)
            others.update({f"{name} of the call before": each for name, each in zip(names, first, strict=True)})
            assert_no_alias(names, second, others)


@check(grid.one_in_bfloat16)
def addresses_past_2_31(subject: Subject, case: Case) -> None:
    """A small tensor whose rows lie more than 2^31 elements apart is read where it lies (M1).

    An address that wraps around at 32 bits stays inside the allocation, so that it gives a wrong result, not a crash.
    """
    for phase in phases_of(subject, case):
        args = arguments_of(subject, case, phase)
        spread = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor) and _can_spread(value)]
        if not spread:
            raise Skip(f"{case.op} has no tensor of two dimensions to spread")
        room = sum(args[i].numel() + 64 for i in spread)
        # The first row lies past 2^31, so that a wrapped, negative offset from it is an address of this storage too.
        start = 2**31
        whole = memory.sparse(2 * start + 64 * 64 + room * 2, torch.bfloat16, torch.device(case.device_type))
        apart = list(args)
        for i in spread:
            tensor: torch.Tensor = args[i]
            rows = tensor.shape[0]
            step = 2**31 // (rows - 1) // 64 * 64 + 64
            inner = torch.empty(tensor.shape[1:], device="meta").stride()
            apart[i] = whole.as_strided(tensor.shape, (step, *inner), start)
            apart[i].copy_(tensor)
            start += tensor.numel() // rows // 64 * 64 + 64
        assert_phase(subject, case, phase, tuple(apart), f"{phase}, rows far apart: ")


def _can_spread(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.bfloat16 and tensor.dim() > 1 and 1 < tensor.shape[0] <= 64


def _tensors(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [value for value in args if isinstance(value, torch.Tensor)]


def _names(case: Case, phase: str, args: tuple[Any, ...]) -> list[str]:
    """The names of the tensors that are present in `args`."""
    names = case.spec.phase(phase).tensor_names
    return [name for name, value in zip(names, args, strict=False) if isinstance(value, torch.Tensor)]
