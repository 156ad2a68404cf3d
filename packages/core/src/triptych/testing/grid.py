"""The grid of cases: which op, sample, dtype and device a check runs on. Built from the ops' specs alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch

from triptych import dispatch, registry
from triptych.call import dtype_name
from triptych.compare import agreement, agreement_or_both_nan, all_finite
from triptych.dispatch import Op
from triptych.layout import clone_exactly
from triptych.opspec import OpSpec, Sample
from triptych.testing.assertions import Agreement
from triptych.testing.subject import Subject

FLOOR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""No backend may refuse a floor sample in one of these."""

DTYPES = (*FLOOR_DTYPES, torch.float64)


@dataclass(frozen=True)
class Case:
    """One point of the grid. Everything about it follows from these four names, so that a test id reproduces it."""

    op: str
    sample: str
    dtype: torch.dtype
    device_type: str

    @property
    def id(self) -> str:
        return f"{self.op}-{self.sample}-{dtype_name(self.dtype)}-{self.device_type}"

    @property
    def spec(self) -> OpSpec:
        return registry.ops.get(self.op)

    @property
    def live(self) -> Op:
        return dispatch.define(self.spec)

    @property
    def scalars(self) -> tuple[Any, ...]:
        return self._sample.scalars

    @property
    def floor(self) -> bool:
        """Whether no backend may refuse it."""
        return self._sample.floor and self.dtype in FLOOR_DTYPES

    @property
    def smooth(self) -> tuple[str, ...]:
        """The forward inputs, of those present, whose gradient is the derivative of forward."""
        made = _made(replace(self, device_type="cpu"))  # the grid is laid out where there is no other device too
        tensors = dict(zip(self.spec.forward.tensor_names, made, strict=True))
        named = self._sample.smooth
        known = [name for names in self.spec.gradients for name in names if tensors[name] is not None]
        return tuple(name for name in known if named is None or name in named)

    @property
    def agree(self) -> Agreement:
        """How results are compared: NaN is right only where inputs are not finite, or the sample says so."""
        expects_nan = self._sample.nan or not all_finite(_made(self))
        return agreement_or_both_nan if expects_nan else agreement

    @property
    def _sample(self) -> Sample:
        return samples(self.op)[self.sample]

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Forward's tensors, made afresh; always the same values."""
        return clone_exactly(_made(self))

    def arguments(self) -> tuple[Any, ...]:
        """Forward's tensors and scalars, made afresh."""
        return (*self.tensors(), *self.scalars)

    def generator(self, purpose: str) -> torch.Generator:
        """A generator of random values for one purpose. The device has no part in the seed: same values everywhere."""
        seed = zlib.crc32(f"{self.op}-{self.sample}-{dtype_name(self.dtype)}-{purpose}".encode())
        return torch.Generator().manual_seed(seed)


@lru_cache(maxsize=1024)
def _made(case: Case) -> tuple[torch.Tensor | None, ...]:
    """A case's tensors, made once: drawing the values takes longer than most of what is done with them."""
    return case._sample.make(case.generator("tensors"), case.dtype, torch.device(case.device_type))


Cases = Callable[[Subject, str, str], Iterator[Case]]
"""From a subject, the name of an op and a device type to the cases of a check."""


@cache
def samples(op: str) -> dict[str, Sample]:
    """The op's samples by name."""
    found: dict[str, Sample] = {}
    for sample in registry.ops.get(op).samples():
        assert sample.name not in found, f"{op} has two samples called {sample.name!r}"
        found[sample.name] = sample
    return found


@dataclass(frozen=True)
class _Looks:
    """What a sample looks like in float32: by this, thin grids and stand-ins are chosen without knowing the op."""

    trait: tuple[Any, ...]
    plain: bool
    dims: int
    numel: int


@cache
def _looks(op: str, name: str) -> _Looks:
    tensors = Case(op, name, torch.float32, "cpu").tensors()
    # A master weight is float32 beside 16-bit activations: its trait shows in bfloat16 only.
    halves = Case(op, name, torch.bfloat16, "cpu").tensors()
    trait = tuple(
        None if tensor is None or half is None else (_layout(tensor), half.dtype)
        for tensor, half in zip(tensors, halves, strict=True)
    )
    present = [tensor for tensor in tensors if tensor is not None]
    plain = len(present) == len(tensors) and all(
        each.is_contiguous() and (each.numel() > 1 or not each.is_floating_point()) for each in present
    )  # a seed is one number
    return _Looks(
        (trait, samples(op)[name].scalars), plain, present[0].dim(), sum(tensor.numel() for tensor in present)
    )


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    kinds = tuple("0" if step == 0 else "1" if step == 1 else "n" for step in tensor.stride())
    sizes, strides = tensor.shape, tensor.stride()
    collapses = tuple(strides[i] == sizes[i + 1] * strides[i + 1] for i in range(tensor.dim() - 1))
    return (kinds, collapses, tensor.numel() == 0, tensor.storage_offset() != 0)


@cache
def one_a_layout(op: str) -> tuple[str, ...]:
    """One sample for each combination of layouts, absent tensors and scalars: the smallest of more than 100 elements.

    Below that, a case of a column or two could stand for all and leave most of a kernel's code unvisited.
    """
    chosen: dict[tuple[Any, ...], str] = {}
    for name in sorted(samples(op), key=lambda name: (_looks(op, name).numel <= 100, _looks(op, name).numel)):
        chosen.setdefault(_looks(op, name).trait, name)
    return tuple(name for name in samples(op) if name in chosen.values())


@cache
def stand_in(op: str) -> str:
    """The sample that stands for the op where one must do: plain, small, and of the most dimensions."""
    plain = [name for name in samples(op) if _looks(op, name).plain and _looks(op, name).numel <= 4096]
    assert plain, f"{op} needs a sample in which every tensor is present, contiguous and small"
    first = next(iter(samples(op).values())).scalars
    return max(plain, key=lambda name: (samples(op)[name].scalars == first, _looks(op, name).dims, name))


@cache
def same_but_size(op: str) -> tuple[str, ...]:
    """Up to three plain samples that differ in sizes only, none of them 0 or 1, which compilers treat apart."""
    groups: dict[Any, list[str]] = {}
    for name in samples(op):
        if not _looks(op, name).plain or _looks(op, name).numel > 100_000:
            continue
        tensors = Case(op, name, torch.float32, "cpu").tensors()
        if all(
            size > 1 for tensor in tensors if tensor is not None and tensor.is_floating_point() for size in tensor.shape
        ):
            groups.setdefault(_looks(op, name).trait, []).append(name)
    group = max(groups.values(), key=len, default=[])

    def size(name: str, dim: int) -> int:
        tensor = Case(op, name, torch.float32, "cpu").tensors()[0]
        assert tensor is not None
        return tensor.shape[dim]

    ends = (max(group, key=lambda name: size(name, 0)), max(group, key=lambda name: size(name, -1))) if group else ()
    return tuple(dict.fromkeys((*group[:1], *ends)))


def differentiable(cases: Cases) -> Cases:
    """The same cases, of ops that have a backward."""
    return lambda subject, op, device_type: (
        cases(subject, op, device_type) if registry.ops.get(op).backward is not None else iter(())
    )


def not_differentiable(cases: Cases) -> Cases:
    """The same cases, of ops that have no backward."""
    return lambda subject, op, device_type: (
        cases(subject, op, device_type) if registry.ops.get(op).backward is None else iter(())
    )


def full(subject: Subject, op: str, device_type: str) -> Iterator[Case]:
    """Every sample in every dtype; for a thin subject one sample a layout, and one case in each further dtype."""
    if subject.thin:
        yield from (Case(op, name, torch.float32, device_type) for name in one_a_layout(op))
        yield from (Case(op, stand_in(op), dtype, device_type) for dtype in DTYPES[1:])
    else:
        yield from (Case(op, name, dtype, device_type) for name in samples(op) for dtype in DTYPES)


def layouts(subject: Subject, op: str, device_type: str) -> Iterator[Case]:
    """One sample a layout in float32 and bfloat16; for a thin subject the stand-in in both."""
    names = (stand_in(op),) if subject.thin else one_a_layout(op)
    yield from (Case(op, name, dtype, device_type) for name in names for dtype in (torch.float32, torch.bfloat16))


def one_a_dtype(subject: Subject, op: str, device_type: str) -> Iterator[Case]:
    """The stand-in in every dtype."""
    yield from (Case(op, stand_in(op), dtype, device_type) for dtype in DTYPES)


def one(subject: Subject, op: str, device_type: str) -> Iterator[Case]:
    """The stand-in in float32."""
    yield Case(op, stand_in(op), torch.float32, device_type)


def smooth_in_float64(subject: Subject, op: str, device_type: str) -> Iterator[Case]:
    """The stand-in and every sample that names smooth inputs, if they have any; the stand-in, if there is no other."""
    named = [name for name, sample in samples(op).items() if sample.smooth or name == stand_in(op)]
    cases = [Case(op, name, torch.float64, device_type) for name in named]
    yield from [case for case in cases if case.smooth] or [Case(op, stand_in(op), torch.float64, device_type)]


def one_in_bfloat16(subject: Subject, op: str, device_type: str) -> Iterator[Case]:
    """The stand-in in bfloat16."""
    yield Case(op, stand_in(op), torch.bfloat16, device_type)


def largest(subject: Subject, op: str, device_type: str) -> Iterator[Case]:
    """The plain samples of most elements and of the longest first dimension, in float32 and bfloat16."""
    plain = [name for name in samples(op) if _looks(op, name).plain]

    def first_size(name: str) -> int:
        tensor = Case(op, name, torch.float32, "cpu").tensors()[0]
        assert tensor is not None
        return tensor.shape[0]

    names = {max(plain, key=first_size)} | (set() if subject.thin else {max(plain, key=lambda n: _looks(op, n).numel)})
    for name in sorted(names):
        yield from (Case(op, name, dtype, device_type) for dtype in (torch.float32, torch.bfloat16))


def layouts_in_float32(subject: Subject, op: str, device_type: str) -> Iterator[Case]:
    """`layouts` in float32 and with one choice of scalars, for checks that trace: tracers see layouts only."""
    seen = set()
    for case in layouts(subject, op, device_type):
        layout = _looks(op, case.sample).trait[0]
        if case.dtype is torch.float32 and layout not in seen:
            seen.add(layout)
            yield case


def operator_cases(subject: Subject, op: str, device_type: str) -> Iterator[Case]:
    """The stand-in, and the sample of most dimensions whose first tensor is not contiguous, in float32."""
    names = [stand_in(op)]
    strided = [
        name
        for name in one_a_layout(op)
        if (tensor := Case(op, name, torch.float32, "cpu").tensors()[0]) is not None and not tensor.is_contiguous()
    ]
    if strided and not subject.thin:
        names.append(max(strided, key=lambda name: _looks(op, name).dims))
    yield from (Case(op, name, torch.float32, device_type) for name in names)
