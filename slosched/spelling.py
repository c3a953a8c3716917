"""What may have been meant by a name that nobody knows."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def meant(text: str, known: Iterable[str]) -> str:
    """A question that names what is spelt most alike, to go behind the name; empty if nothing is.

    The names that are `known` are in lower case.
    """
    spelt = {name.replace("-", "_"): name for name in known}
    close = get_close_matches(text.lower().replace("-", "_"), spelt, n=1)
    return f" (did you mean {spelt[close[0]]}?)" if close else ""
