"""Layers: nn.Modules over the ops, drop-in replacements where torch.nn has one."""

from triptych.layers.naming import name_layers
from triptych.layers.rms_norm import AddRMSNorm, RMSNorm

__all__ = ["AddRMSNorm", "RMSNorm", "name_layers"]
