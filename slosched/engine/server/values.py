"""Values of a body's fields, checked for type and range; an absent field and null are the same."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping

from slosched.engine.server.errors import ApiError

_SHOWN_CHARS = 100
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 3, _SHOWN_CHARS // 3, _SHOWN_CHARS // 3
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 2 * _SHOWN_CHARS

Body = Mapping[str, object]


def integer(body: Body, name: str, default: int, low: int, high: float = math.inf) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        bounds = f">= {low}" if high == math.inf else f"in [{low}, {high}]"
        raise wrong(name, value, f"an integer {bounds}")
    return value


def number(body: Body, name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise wrong(name, value, f"a number in [{low:g}, {high:g}]")
    return float(value)


def flag(body: Body, name: str, *, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def query_flag(query: Mapping[str, str], name: str) -> bool:
    """Return what the query of a URL says in words; without the word it is false."""
    text = query.get(name, "false")
    if text.lower() not in ("true", "false"):
        raise wrong(name, text, "true or false")
    return text.lower() == "true"


def mapping(body: Body, name: str) -> Body:
    """Return the object in a field; it is empty if there is none."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(name, value, "an object")
    return value


def strings(body: Body, name: str, at_most: int, max_chars: int) -> tuple[str, ...]:
    """Return the strings of a list, or the one string that a field holds in place of a list."""
    value = body.get(name)
    if value is None:
        return ()
    value = [value] if isinstance(value, str) else value
    if (
        not isinstance(value, list)
        or len(value) > at_most
        or not all(isinstance(text, str) and 1 <= len(text) <= max_chars for text in value)
    ):
        expected = f"a string or at most {at_most} strings, each of 1 to {max_chars} characters"
        raise wrong(name, value, expected)
    return tuple(value)


def token_ids(
    body: Body, name: str, vocab_size: int, at_most: float = math.inf
) -> tuple[int, ...] | None:
    """Return the token ids of a list; None if there is no list."""
    ids = body.get(name)
    if ids is None:
        return None
    if not isinstance(ids, list) or len(ids) > at_most or not set(map(type, ids)) <= {int}:
        limit = "" if at_most == math.inf else f"at most {at_most} "
        raise wrong(name, ids, f"a list of {limit}token ids")
    check_vocabulary(name, ids, vocab_size)
    return tuple(ids)


def check_vocabulary(name: str, ids: list[int], vocab_size: int) -> None:
    """Raise ApiError (400) if one of the ids is outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise ApiError(
            400, f"{name} has the token id {bad}, but ids are in [0, {vocab_size})", param=name
        )


def shown(value: object) -> str:
    """Return the beginning of a value as Python writes it, at most 100 characters.

    Unlike `repr` it does not take long for a value that is large.
    """
    return _SHORT.repr(value)[:_SHOWN_CHARS]


def wrong(name: str, value: object, expected: str) -> ApiError:
    if value is None:
        return ApiError(400, f"{name} is missing; it must be {expected}", param=name)
    return ApiError(400, f"{name} must be {expected}, not {shown(value)}", param=name)
