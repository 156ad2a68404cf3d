"""Settings: frozen dataclasses whose every field is checked, and brought to its type, when they are made.

A field states its rule once, in its declaration; what is wrong with a value is said in one form everywhere:

    IOParameters: out_noise is -1.0. It must be a finite number, 0 or greater.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NoReturn

from triptych.errors import ArgumentError, nearest


@dataclass(frozen=True)
class Rule:
    """What a field takes.

    Attributes:
        wanted: the end of the sentence "It must be ...".
        read: brings a value to the field's type; None when it is not one.
        words: the strings that it takes, if it takes any.
    """

    wanted: str
    read: Callable[[Any], Any]
    words: tuple[str, ...] = ()


def setting(default: Any, rule: Rule) -> Any:
    """A field with a default and a rule."""
    return field(default=default, metadata={"rule": rule})


def number(wanted: str, fits: Callable[[float], bool]) -> Rule:
    """A finite real number: neither a bool, nor a tensor, whose gradient and device would be lost."""

    def read(value: Any) -> float | None:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return None
        try:
            plain = float(value)
        except OverflowError:
            return None
        return plain if math.isfinite(plain) and fits(plain) else None

    return Rule(wanted, read)


def whole(wanted: str, fits: Callable[[int], bool]) -> Rule:
    """An integer of 64 bits, not a bool."""

    def read(value: Any) -> int | None:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            return None
        return int(value) if value < 2**63 and fits(int(value)) else None

    return Rule(wanted, read)


FLAG = Rule("True or False", lambda value: value if isinstance(value, bool) else None)


def member(kind: type[Enum]) -> Rule:
    """A member of an enumeration, or its value."""
    values = {each.value: each for each in kind}

    def read(value: Any) -> Enum | None:
        return value if isinstance(value, kind) else values.get(value) if isinstance(value, str) else None

    return Rule(f"a member of {kind.__name__}, or its value", read, tuple(values))


def part(kind: type[Settings]) -> Rule:
    """Another group of settings."""
    return Rule(f"a {kind.__name__}", lambda value: value if isinstance(value, kind) else None)


@dataclass(frozen=True)
class Settings:
    """The base of each group of settings: checks its fields, says why it cannot be changed, becomes plain data."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            rule: Rule = each.metadata["rule"]
            read = rule.read(value)
            if read is None:
                text = f"{type(self).__name__}: {each.name} is {_shown(value)}. It must be {rule.wanted}."
                raise ArgumentError(f"{text} {nearest(str(value), rule.words)}" if rule.words else text)
            object.__setattr__(self, each.name, read)

    def to_dict(self) -> dict[str, Any]:
        """The settings as nested dictionaries of numbers, truth values and strings: fit for JSON."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.to_dict()
    return value.value if isinstance(value, Enum) else value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def unknown(owner: str, name: object, known: list[str]) -> ArgumentError:
    """The error for a setting that does not exist."""
    return ArgumentError(f"{owner} has no setting {name!r}. {nearest(str(name), known)}")


def refuse_changes(*kinds: type[Settings]) -> None:
    """Have these classes say how a setting is changed, where dataclasses would only say that it cannot be."""
    for kind in kinds:
        kind.__setattr__ = kind.__delattr__ = _refuse_change  # type: ignore[method-assign, assignment]


def _refuse_change(self: Settings, name: str, *value: Any) -> NoReturn:
    names = [each.name for each in fields(self)]
    if name not in names:
        raise unknown(type(self).__name__, name, names)
    raise dataclasses.FrozenInstanceError(
        f"{type(self).__name__}.{name} cannot be set: a configuration does not change once it is made. Make another "
        f"with config.replaced(path, value), for example config.replaced('modifier.std_dev', 0.05), and hand that to a "
        f"layer with layer.rpu_config = ..."
    )
