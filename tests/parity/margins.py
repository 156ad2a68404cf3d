"""How close the reference came to deciding otherwise: the distance of its values from where it rounds or clips.

Two float32 computations of the same formula differ in the last bits. Where a value lies that close to the middle between
two levels of a quantiser, or to a bound, they may rightly decide differently, and one level apart is no fault. The tests
draw inputs that keep clear of such places, by these margins; ties that are exact in both are tested on their own.

One difference is evened out here, because it would be everywhere: the last level of an ADC is its bound, and where float32
puts it above, the reference takes the gradient away (test_differences.py). In here it does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peer import torch_linear
from torch import Tensor

DAC = 1e-4
"""Of a level, of which there are at most 127 a side, with a step right to 8 roundings: 127 * 8 * 2^-24 = 6e-5."""
ADC = 1e-3
"""Of a level. The two differ by at most 2 (N + 8) roundings of a sum of magnitudes, here some 3 full scales for N = 24; the
bound, with 127 levels, is 1.1 of them: 2 * 32 * 2^-24 * 3 * 127 / 1.1 = 1.3e-3 if every rounding went the same way."""
RELATIVE = 1e-4
"""Of a bound: that error again, relative to a bound of one weight's full scale, and the input range's few roundings."""


class Margins:
    """Whether a forward pass kept clear of every decision."""

    def __init__(self, theirs: Any) -> None:
        self.clear = True
        self._share = theirs.rpu_config.pre_post.input_range.input_min_percentage
        io = theirs.rpu_config.forward
        self._margins = itertools.cycle(([DAC] if io.inp_res > 0 else []) + ([ADC] if io.out_res > 0 else []))
        self._quantised: Tensor | None = None

    def quantise(self, values: Tensor, res: float, bound: Any, *rest: Any) -> Tensor:
        step = 2 * bound / res if res > 1 else 2 * bound * res
        levels = (values.detach() / step).nan_to_num()  # a dynamic range is 0 where a row has nothing but zeros
        self._demand(((levels - levels.floor() - 0.5).abs() > next(self._margins)).all())
        self._quantised = UNIFORM.apply(values, res, bound, *rest)
        return self._quantised

    def clamp(self, values: Tensor, min: Any = None, max: Any = None) -> Tensor:
        if min is not None and max is not None and torch.is_tensor(max):
            if values is self._quantised:
                wider = CLAMP(values, min=min * (1 + RELATIVE), max=max * (1 + RELATIVE))
                return wider + (CLAMP(values, min=min, max=max) - wider).detach()
            beyond = (values.detach().abs() - max.detach()) / max.detach()
            beyond = torch.where(max == 0, 1.0, beyond)
            self._demand(((beyond == 0) | (beyond.abs() > RELATIVE)).all())
            self._demand(((beyond < 0).double().mean() - self._share).abs() > 1e-6)
        return CLAMP(values, min=min, max=max)

    def _demand(self, kept: Tensor) -> None:
        self.clear = self.clear and bool(kept)


CLAMP, UNIFORM = torch_linear.clamp, torch_linear.UniformQuantize


@contextmanager
def watched(theirs: Any) -> Iterator[Margins]:
    """Watch what a layer of the reference does in here."""
    margins = Margins(theirs)
    torch_linear.clamp = margins.clamp
    torch_linear.UniformQuantize = type("Watched", (), {"apply": staticmethod(margins.quantise)})
    try:
        yield margins
    finally:
        torch_linear.clamp, torch_linear.UniformQuantize = CLAMP, UNIFORM
