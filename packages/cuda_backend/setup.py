"""Makes the wheel, with the binaries in it where they can be built.

With torch importable and a compiler at hand (`pip wheel --no-build-isolation`) the parts are compiled and packed, and
the wheel is for this Python and platform. Otherwise (an isolated build) the wheel holds sources only, fits everywhere,
and each part is built at first use.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "src"))

from triptych_cuda.native import ahead

REASONS = ahead.buildable()


class BinaryDistribution(Distribution):
    """Platform-specific exactly when some part can be built here."""

    def has_ext_modules(self) -> bool:
        return not all(REASONS.values())


class BuildWithBinaries(build_py):
    """Adds the binaries to the build folder; an editable install builds at first use instead."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for part, reasons in REASONS.items():
            for reason in reasons:
                print(f"triptych-cuda: the {part} part is not built ahead of time. {reason}")
        built = ahead.build_into(Path(self.build_lib) / "triptych_cuda" / "binaries")
        print(f"triptych-cuda: built ahead of time: {', '.join(built) or 'nothing'}")


setup(distclass=BinaryDistribution, cmdclass={"build_py": BuildWithBinaries})
