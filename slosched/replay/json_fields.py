"""The fields of a JSON object, each checked for what it should be when it is read.

What Python says of a wrong type ("list indices must be integers") tells a user neither which field
is wrong nor what belongs there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard, TypeVar

_MAX_SHOWN = 80
_Member = TypeVar("_Member", bound=StrEnum)


def shown(value: object) -> str:
    """Return the value as Python writes it, cut where it would fill the screen."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + " …"


def is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether a value of JSON is a number, also one that is not finite."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> TypeGuard[int | float]:
    """Tell whether a value of JSON is a whole number of 0 or more."""
    return is_number(value) and value >= 0 and value % 1 == 0


def as_object(value: object) -> dict[str, Any]:
    """Return a JSON object; raise ValueError for any other value."""
    if not isinstance(value, dict):
        raise ValueError(f"it is {shown(value)}, not a JSON object")
    return value


@dataclass(frozen=True)
class Fields:
    """A JSON object.  Its methods raise ValueError for what does not belong into a field."""

    values: dict[str, Any]

    @classmethod
    def of(cls, value: object) -> Fields:
        return cls(as_object(value))

    def number(self, name: str) -> float:
        value = self._there(name)
        if not is_number(value):
            raise self.wrong(name, "a number")
        return float(value)

    def seconds(self, name: str) -> float | None:
        """Return a time as it is written; None if it is null or not there."""
        value = self.values.get(name)
        if value is not None and not (is_number(value) and math.isfinite(value)):
            raise self.wrong(name, "a finite number of seconds or null")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number of 0 or more; `default`, if there is one, if it is not there."""
        if default is not None and name not in self.values:
            return default
        value = self._there(name)
        if not is_count(value):
            raise self.wrong(name, "a whole number of 0 or more")
        return int(value)

    def at_least_one(self, name: str) -> int:
        """Return a whole number of 1 or more."""
        value = self._there(name)
        if not (is_count(value) and value >= 1):
            raise self.wrong(name, "a whole number of 1 or more")
        return int(value)

    def whole(self, name: str, default: int) -> int:
        """Return a whole number, `default` if it is not there."""
        value = self.values.get(name, default)
        if not (is_number(value) and value % 1 == 0):
            raise self.wrong(name, "a whole number")
        return int(value)

    def text(self, name: str) -> str | None:
        """Return a text; None if it is null or not there."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a text or null")
        return value

    def flag(self, name: str) -> bool:
        """Return whether it is true; False if it is not there."""
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def numbers(self, name: str) -> list[float]:
        value = self._there(name)
        if not (isinstance(value, list) and all(map(is_number, value))):
            raise self.wrong(name, "a list of numbers")
        return list(map(float, value))

    def inner(self, name: str) -> dict[str, Any]:
        value = self._there(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "a JSON object")
        return value

    def member(self, name: str, kind: type[_Member]) -> _Member:
        """Return a member of an enumeration by its value."""
        value = self._there(name)
        if value not in list(kind):
            raise self.wrong(name, f"one of {', '.join(kind)}")
        return kind(value)

    def wrong(self, name: str, wanted: str) -> ValueError:
        return ValueError(f"its {name} is {shown(self.values.get(name))}, not {wanted}")

    def _there(self, name: str) -> Any:
        if name not in self.values:
            raise ValueError(f"it has no {name!r}")
        return self.values[name]
