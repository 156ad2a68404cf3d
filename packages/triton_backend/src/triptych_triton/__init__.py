"""The Triton backend of Triptych. Importing it does not import triton; loading an op does."""

__version__ = "0.1.0"
