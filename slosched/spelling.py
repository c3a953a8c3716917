"""Suggestions for misspelt names, and messages for unknown options and wrong numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def meant(text: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" with the known name that is spelt most alike; empty if none is.

    The names in `known` must be in lower case.
    """
    spelt = {name.replace("-", "_"): name for name in known}
    close = get_close_matches(text.lower().replace("-", "_"), spelt, n=1)
    return f" (did you mean {spelt[close[0]]}?)" if close else ""


def no_option(owner: str, text: str, known: Sequence[str]) -> str:
    """Return the message for a `text` that is no option of `owner`, as `name=value`."""
    what = f"{owner} has no option {text!r}"
    if not known:
        return f"{what}: it has none at all"
    name = text.partition("=")[0].strip()
    if name in known:
        return f"{owner}'s option {name} has no value; write {name}=value"
    return f"{what}{meant(name, known)}; write name=value with one of {', '.join(known)}"


def whole_number(what: str, text: str) -> int:
    """Return the whole number that a text is; raise ValueError, which names `what`, otherwise."""
    try:
        return int(text)
    except ValueError:  # what Python says of it is no message for users
        raise ValueError(f"{what} must be a whole number, not {text!r}") from None


def number(what: str, text: str) -> float:
    """Return the number that a text is; raise ValueError, which names `what`, otherwise."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{what} must be a number, not {text!r}") from None
