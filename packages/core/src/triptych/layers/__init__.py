"""Layers: nn.Modules over the ops, drop-in replacements where torch.nn has one."""

from triptych.layers.naming import Layer, name_layers
from triptych.layers.rms_norm import AddRMSNorm, RMSNorm

__all__ = ["AddRMSNorm", "Layer", "RMSNorm", "name_layers"]
