"""Triptych's ops in idiomatic PyTorch: ATen's own fused kernels where there are some, fused arithmetic elsewhere."""

__version__ = "0.1.0"
