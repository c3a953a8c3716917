"""JSON documents with lists so long that writing them at once would hold up the event loop."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from itertools import chain, islice


class LongList:
    """A list of which some items at a time are made and written."""

    def __init__(self, items: Iterable[object], num_at_a_time: int) -> None:
        """`items` are gone through once, when the list is written."""
        self._items = items
        self._num_at_a_time = num_at_a_time

    def parts(self) -> Iterator[str]:
        """Yield the list as JSON, in parts."""
        items, separator = iter(self._items), ""
        yield "["
        while some := list(islice(items, self._num_at_a_time)):
            yield separator + json.dumps(some, ensure_ascii=False)[1:-1]
            separator = ", "
        yield "]"


def in_parts(document: Mapping[str, object]) -> Iterator[bytes]:
    """Yield a document as JSON; a `LongList` may stand anywhere in it."""
    lists: list[LongList] = []
    # Nobody can guess it, so that no text of the document is taken for a list.
    mark = uuid.uuid4().hex

    def note(value: object) -> str:
        if not isinstance(value, LongList):
            raise TypeError(f"{type(value).__name__} is no JSON")
        lists.append(value)
        return mark

    first, *others = json.dumps(document, ensure_ascii=False, default=note).split(f'"{mark}"')
    yield first.encode()
    for each, behind in zip(lists, others, strict=True):
        for part in chain(each.parts(), [behind]):
            yield part.encode()


async def paced(parts: Iterator[bytes], turns: asyncio.Lock) -> AsyncIterator[bytes]:
    """Yield parts that take a while to make: of all answers that share `turns`, one in a turn of
    the event loop."""
    while True:
        async with turns:
            part = next(parts, None)
            await asyncio.sleep(0)
        if part is None:
            return
        yield part
