"""A limit on what parsing a body may take, as nothing else is answered meanwhile."""

from __future__ import annotations

import asyncio

_CHEAP, _DEAR = b",", (b"[", b"{", b":")
_TIMES_DEARER = 8
"""How much longer an object, a list or a member takes than one more number or string."""
_FRACTION = b".", b"e", b"E"
_MORE_FOR_FRACTION = 1
"""How much longer a number with a fraction or an exponent takes: this many whole numbers more."""
_QUOTES_AT_ONCE = 2000
"""Quotation marks that are looked at before others get their turn."""


async def exceeds_work(content: bytearray, most: int) -> bool:
    """Tell whether JSON has more values than `most`.

    Lists, objects, members, and numbers with a fraction or an exponent count as several.  What
    stands in strings is no value; quotation marks count as one each.
    """
    if _work(content, 0, len(content)) <= most:
        return False
    work = place = num_quotes = 0
    is_inside = False
    while work <= most and (quote := content.find(b'"', place)) >= 0:
        if not is_inside:
            work += _work(content, place, quote)
        is_inside = not is_inside or _is_escaped(content, place, quote)
        work, place, num_quotes = work + 1, quote + 1, num_quotes + 1
        if num_quotes % _QUOTES_AT_ONCE == 0:
            await asyncio.sleep(0)
    return work + (0 if is_inside else _work(content, place, len(content))) > most


def _work(content: bytearray, start: int, end: int) -> int:
    num_dear = sum(content.count(mark, start, end) for mark in _DEAR)
    num_fractions = sum(content.count(mark, start, end) for mark in _FRACTION)
    num_cheap = content.count(_CHEAP, start, end)
    return num_cheap + _TIMES_DEARER * num_dear + _MORE_FOR_FRACTION * num_fractions


def _is_escaped(content: bytearray, start: int, quote: int) -> bool:
    """Tell whether an odd number of backslashes stands before a quotation mark."""
    before = content[start:quote]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1
