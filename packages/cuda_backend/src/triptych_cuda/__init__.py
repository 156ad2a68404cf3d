"""Triptych's C++ backend: vectorised kernels for the CPU and CUDA kernels for NVIDIA GPUs, as two extension modules.

Importing this package loads neither torch nor a binary. `backend` is what Triptych finds, `ops/` are the entry points,
`native/` builds and finds the extension modules, `csrc/` are their sources.
"""

__version__ = "0.1.0"
