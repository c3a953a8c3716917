"""Waiting requests by length and by deadline, read from those alone that come to wait."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Mapping
from operator import attrgetter, itemgetter

from slosched.core import Request

_MOST_GONE = 64
"""Entries of requests that wait no longer, beyond as many as wait, before all are read anew."""


class WaitingIndex:
    """Finds the longest and the most urgent requests of a queue without a look at all of them.

    It is told of each request that comes to wait, and finds out for itself which do so no longer.
    Nothing is kept before it is first asked, nor long after, so that it costs nothing where no
    policy asks.
    """

    def __init__(self) -> None:
        self._lengths = _Sorted(attrgetter("num_tokens"))
        self._deadlines = _Sorted(attrgetter("deadline_s"))

    def note(self, request: Request, *, is_first: bool = False) -> None:
        """Note a request that has come to wait, behind all others or as the first.

        As long as it does, it must not become longer or due sooner.
        """
        self._lengths.note(request, is_first)
        self._deadlines.note(request, is_first)

    def longest_tokens(self, queue: Mapping[str, Request]) -> int:
        """Return the most prompt and output tokens of a request in `queue`; 0 if it is empty."""
        return int(self._lengths.largest(queue))

    def due_by(self, until_s: float, queue: Mapping[str, Request]) -> list[Request]:
        """Return the requests in `queue` whose deadline is at most `until_s`, by deadline.

        Those with the same deadline are in the order of the queue.
        """
        return self._deadlines.up_to(until_s, queue)


class _Sorted:
    """The ids of requests, sorted by a value that may have changed since they were noted.

    Those of the same value are sorted by their place in the queue, so that names do not matter.
    """

    def __init__(self, value: Callable[[Request], float]) -> None:
        self._value = value
        self._entries: list[tuple[float, int, str]] | None = None
        """Value, place in the queue and request id."""
        self._first = self._last = 0
        """The places of the first and of the last one."""
        self._most_entries = 0
        """Entries beyond which they are forgotten until somebody asks again."""

    def note(self, request: Request, is_first: bool) -> None:
        if is_first:
            self._first -= 1
        else:
            self._last += 1
        self._add(request, self._first if is_first else self._last)

    def _add(self, request: Request, place: int) -> None:
        if self._entries is not None:
            insort(self._entries, (self._value(request), place, request.request_id))
            if len(self._entries) > self._most_entries:
                self._entries = None

    def largest(self, queue: Mapping[str, Request]) -> float:
        entries = self._read(queue)
        while entries:
            value, place, request_id = entries[-1]
            if (request := queue.get(request_id)) is None:
                entries.pop()
            elif self._value(request) == value:
                return value
            else:
                entries.pop()
                self._add(request, place)
        return 0

    def up_to(self, limit: float, queue: Mapping[str, Request]) -> list[Request]:
        entries, value_of = self._read(queue), self._value
        while True:
            end = bisect_right(entries, limit, key=itemgetter(0))
            found: dict[str, Request] = {}
            kept: list[tuple[float, int, str]] = []
            moved: list[tuple[Request, int]] = []
            for entry in entries[:end]:
                value, place, request_id = entry
                if (request := queue.get(request_id)) is None or request_id in found:
                    continue
                if value_of(request) == value:
                    found[request_id] = request
                    kept.append(entry)
                else:  # its SLO was eased
                    moved.append((request, place))
            if len(kept) < end:
                entries[:end] = kept
            if not moved:
                return list(found.values())
            for request, place in moved:
                self._add(request, place)

    def _read(self, queue: Mapping[str, Request]) -> list[tuple[float, int, str]]:
        """Return the entries, read anew if most of them are of requests that wait no longer."""
        self._most_entries = 2 * len(queue) + _MOST_GONE
        if self._entries is None or len(self._entries) > self._most_entries:
            self._first, self._last = 0, len(queue)
            self._entries = sorted(
                (self._value(request), place, name)
                for place, (name, request) in enumerate(queue.items(), start=1)
            )
        return self._entries
