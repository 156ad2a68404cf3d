"""torch.compile's caches on disk know an operator by its name only: what it was when a graph was compiled goes with it.

The caches of AOTAutograd and of Inductor are shared by all processes of a user. They hold what was traced through fake
kernels and derivatives (shapes, dtypes, what is saved, which backward is called with what), under a key in which an
operator of a library stands by name. Without more, a graph that was compiled before an upgrade, or before an edit, is
served after it. torch takes a text into all of these keys, `torch.compiler.config.cache_key_tag`; ours is added to it:
a fingerprint of the declarations of the ops that are defined in this process. It changes when one of them does.

What an implementation computes behind an opaque operator needs no key: a graph only calls it. An implementation that is
traced through (inline.py) has its fingerprint in the graph itself.
"""

from __future__ import annotations

import hashlib
import re
import types

import torch.compiler

from triptych import fingerprint, operator
from triptych.opspec import OpSpec

_MARK = re.compile(r";?triptych-[0-9a-f]{16}")
_OPERATORS = tuple(each.__code__ for each in vars(operator).values() if isinstance(each, types.FunctionType))
"""What makes operators of declarations: derivatives are written there."""

_declared: dict[str, tuple[object, ...]] = {}
_known: dict[str, str] = {}
"""Fingerprints by op; one that is to be taken again is missing."""


def declare(spec: OpSpec) -> None:
    """Take an op's declaration into the keys."""
    phases = tuple((phase.schema(), phase.fake) for phase in (spec.forward, spec.backward) if phase is not None)
    names = (spec.differentiable, spec.returned, spec.saved, spec.gradients)
    _declared[spec.name] = (phases, spec.check, spec.check_backward, names, _OPERATORS)
    _known.pop(spec.name, None)
    keep()
    # Its module may go on after it, with functions that those above call: the first trace takes it once more. Not only
    # the first trace: a profile of sizes that torch keeps from run to run is looked up by the tag before that.
    del _known[spec.name]


def keep() -> None:
    """Put our part into the tag, if it is not there: whoever sets the tag after us replaces it."""
    for name, parts in _declared.items():
        if name not in _known:
            _known[name] = fingerprint.of(*parts)
    text = ";".join(f"{name}={value}" for name, value in sorted(_known.items()))
    ours = f"triptych-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    config = torch.compiler.config
    tag: str = config.cache_key_tag
    if ours not in tag:
        others = _MARK.sub("", tag)
        config.cache_key_tag = f"{others};{ours}" if others else ours
