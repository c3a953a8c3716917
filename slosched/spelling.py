"""Suggestions for misspelt names, and the message for an unknown option."""

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
