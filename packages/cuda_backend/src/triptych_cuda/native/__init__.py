"""Building and finding the two extension modules, `_cpu` and `_cuda`.

    toolchain   what this machine has: a C++ compiler, ninja, nvcc, a torch to build against
    recipe      what is compiled, with which flags; the hash that names a build
    progress    what is shown while ninja runs
    builder     running a recipe: one builder at a time, all or nothing, errors kept
    binaries    where a finished binary may lie: in the package (built ahead of time) or in the cache
    ahead       building into the package, for wheels
    device_code what nvcc says about the kernels: registers, spills, stack; needs neither torch nor a GPU

Nothing here imports triptych, so that a wheel can be built before it is installed.
"""
