"""The analog convolutions: each place of the kernel is a row of inputs to a crossbar, each group a crossbar of its own.

Columns are in the order of `weight.flatten(1)`: channel, then the places of the kernel.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych import remake
from triptych.analog.config import AnalogConfig
from triptych.analog.layer import AnalogLayer, check_config
from triptych.errors import ArgumentError

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


def unfold(x: Tensor, kernel_size: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """The windows that a kernel sees: [B, C, *S] to [B, C, *O, *K], a view. `x` is padded already."""
    spatial = len(kernel_size)
    for axis, (size, step, spread) in enumerate(zip(kernel_size, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, spread * (size - 1) + 1, step)
    for axis, spread in enumerate(dilation, start=2 + spatial):
        if spread > 1:
            x = x[(slice(None),) * axis + (slice(None, None, spread),)]
    return x


class _AnalogConv(AnalogLayer):
    """What the convolutions share: everything but the constructor and the number of dimensions."""

    SPATIAL: ClassVar[int]
    in_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: Any  # torch says which strings
    _reversed_padding_repeated_twice: list[int]

    @property
    def crossbars(self) -> int:  # type: ignore[override]
        """One for each group."""
        return self.groups

    def crossbar_inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """The windows of each group, [B, *O, N] with N = channels of the group times places of the kernel."""
        x = self._checked(x)
        batched = x.dim() == self.SPATIAL + 2
        if (not batched and x.dim() != self.SPATIAL + 1) or x.shape[-self.SPATIAL - 1] != self.in_channels:
            raise ArgumentError(
                f"{self.title}: the input has shape {list(x.shape)}. It must have {self.in_channels} channels and "
                f"{self.SPATIAL} spatial dimensions behind them, with or without a batch dimension in front."
            )
        x = x if batched else x.unsqueeze(0)
        windows = self._windows(x)
        columns = tuple(self._columns(windows, group) for group in range(self.groups))
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # The columns hold each input as often as kernels see it: backward makes them again from the inputs.
            for group, each in enumerate(columns):
                remake.attach(each, functools.partial(self._columns_of, group), x.detach())
        return columns

    def _columns_of(self, group: int, x: Tensor) -> Tensor:
        return self._columns(self._windows(x), group)

    def _windows(self, x: Tensor) -> Tensor:
        """[B, C, *S] to [G, B, *O, C / G, *K]."""
        padding = self._reversed_padding_repeated_twice
        if any(padding):
            x = functional.pad(x, padding, "constant" if self.padding_mode == "zeros" else self.padding_mode)
        spans = [spread * (size - 1) + 1 for size, spread in zip(self.kernel_size, self.dilation, strict=True)]
        if any(have < need for have, need in zip(x.shape[2:], spans, strict=True)):
            raise ArgumentError(
                f"{self.title}: the padded input has size {list(x.shape[2:])}. It must be at least {spans}, which the "
                f"kernel spans."
            )
        windows = unfold(x, self.kernel_size, self.stride, self.dilation)
        # [B, G, C / G, *O, *K] to [G, B, *O, C / G, *K]
        windows = windows.view(x.shape[0], self.groups, self.in_channels // self.groups, *windows.shape[2:])
        places, kernel = range(3, 3 + self.SPATIAL), range(3 + self.SPATIAL, 3 + 2 * self.SPATIAL)
        return windows.permute(1, 0, *places, 2, *kernel)

    def _columns(self, windows: Tensor, group: int) -> Tensor:
        """Those of one group, [B, *O, N]."""
        return windows[group].reshape(*windows.shape[1 : 2 + self.SPATIAL], self._inputs)

    def forward(self, input: Tensor) -> Tensor:
        outputs = self._run(self.crossbar_inputs(input))
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        y = y.movedim(-1, 1).contiguous()
        return y if input.dim() == self.SPATIAL + 2 else y.squeeze(0)


def _constructor(digital: type[nn.Module]) -> Any:
    """The constructor of a convolution: torch's arguments, and the configuration."""

    def __init__(  # noqa: N807
        self: Any,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rpu_config: AnalogConfig = AnalogConfig(),  # noqa: B008 (it cannot change)
    ) -> None:
        check_config(type(self).__name__, rpu_config)
        digital.__init__(
            self,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device,
            dtype,
        )
        self._begin(rpu_config)

    return __init__


class AnalogConv1d(_AnalogConv, nn.Conv1d):
    """torch.nn.Conv1d as analog crossbars compute it. Takes its arguments, and `rpu_config`, see `AnalogConfig`."""

    DIGITAL: ClassVar[type[nn.Module]] = nn.Conv1d
    SPATIAL: ClassVar[int] = 1
    __init__ = _constructor(nn.Conv1d)


class AnalogConv2d(_AnalogConv, nn.Conv2d):
    """torch.nn.Conv2d as analog crossbars compute it. Takes its arguments, and `rpu_config`, see `AnalogConfig`."""

    DIGITAL: ClassVar[type[nn.Module]] = nn.Conv2d
    SPATIAL: ClassVar[int] = 2
    __init__ = _constructor(nn.Conv2d)


class AnalogConv3d(_AnalogConv, nn.Conv3d):
    """torch.nn.Conv3d as analog crossbars compute it. Takes its arguments, and `rpu_config`, see `AnalogConfig`."""

    DIGITAL: ClassVar[type[nn.Module]] = nn.Conv3d
    SPATIAL: ClassVar[int] = 3
    __init__ = _constructor(nn.Conv3d)
