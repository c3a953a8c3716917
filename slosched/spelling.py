"""Suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def meant(text: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" with the known name that is spelt most alike; empty if none is.

    The names in `known` must be in lower case.
    """
    spelt = {name.replace("-", "_"): name for name in known}
    close = get_close_matches(text.lower().replace("-", "_"), spelt, n=1)
    return f" (did you mean {spelt[close[0]]}?)" if close else ""
