"""An example of a third-party backend for Triptych; its faults are chosen with SHAKY_FAULT."""

__version__ = "0.1.0"
