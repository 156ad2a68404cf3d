"""AnalogLinear, torch.nn.Linear on an analog crossbar."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from triptych.analog.config import AnalogConfig
from triptych.analog.layer import AnalogLayer, check_config
from triptych.errors import ArgumentError


class AnalogLinear(AnalogLayer, nn.Linear):
    """torch.nn.Linear as analog crossbars compute it; with the default configuration, torch.nn.Linear itself.

    Args:
        in_features, out_features, bias, device, dtype: as torch.nn.Linear.
        rpu_config: what the crossbars do; see `AnalogConfig`.

    Shape: [..., in_features] to [..., out_features], in the dtype of the weight.
    """

    DIGITAL: ClassVar[type[nn.Module]] = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rpu_config: AnalogConfig = AnalogConfig(),  # noqa: B008 (it cannot change)
    ) -> None:
        check_config("AnalogLinear", rpu_config)
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        self._begin(rpu_config)

    def crossbar_inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """The input itself."""
        x = self._checked(x)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ArgumentError(
                f"{self.title}: the input has shape {list(x.shape)}. Its last dimension must be {self.in_features}, "
                f"the layer's in_features."
            )
        return (x,)

    def forward(self, input: Tensor) -> Tensor:
        return self._run(self.crossbar_inputs(input))[0]
