"""Which fault is planted: the environment variable SHAKY_FAULT, read at each call."""

from __future__ import annotations

import os
import random
from functools import cache

FAULTS = {
    "s2": "rms_norm.backward walks the rows of x by a stride of x before its flattening",
    "nan": "rms_norm.forward writes one NaN at the 7th call of the process",
    "hang": "add_rms_norm.forward never returns from the 5th call of the process",
    "abort": "add_rms_norm.backward aborts the process",
    "pair": "add_rms_norm.backward trusts a workspace that rms_norm.forward has given back: wrong only together",
    "flaky": "rms_norm.backward raises in nine of ten processes, on average; SHAKY_SEED makes it repeatable",
    "none": "nothing: the backend is healthy",
}


def chosen() -> str:
    """The fault in force."""
    return os.environ.get("SHAKY_FAULT", "s2")


def mistakes() -> list[str]:
    """What is wrong with the environment, a sentence each."""
    if chosen() in FAULTS:
        return []
    return [f"SHAKY_FAULT is {chosen()!r}, which is no fault of this backend. Set it to one of {', '.join(FAULTS)}."]


@cache
def unlucky() -> bool:
    """Whether this process is one of those in which `flaky` strikes."""
    return random.Random(os.environ.get("SHAKY_SEED")).random() < 0.9
