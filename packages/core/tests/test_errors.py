"""Exceptions travel between processes: worker pools pickle them."""

from __future__ import annotations

import copy
import pickle

import pytest

from triptych import errors


def every_kind(root: type[BaseException]) -> list[type[BaseException]]:
    return [root, *(each for kind in root.__subclasses__() for each in every_kind(kind))]


@pytest.mark.parametrize("kind", every_kind(errors.TriptychError))
def test_an_error_survives_pickling_and_copying(kind: type[BaseException]) -> None:
    more = {
        errors.CheckFailed: ("nonfinite rms_norm.forward",),
        errors.Refused: ((("torch", ("a reason.",)),), {"layer": "a"}),
    }
    error = kind("what was found.", *more.get(kind, ()))
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert str(twin) == "what was found."
        assert twin.__dict__ == error.__dict__
