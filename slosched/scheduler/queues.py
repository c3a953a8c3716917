"""Waiting, running and swapped requests by id, each in its order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import overload

from slosched.core import Request, WaitingRequests
from slosched.scheduler.waiting_index import WaitingIndex


@dataclass(slots=True)
class Queues:
    """The five queues: every unfinished request is in exactly one.

    Only the Scheduler changes them.
    """

    waiting: dict[str, Request] = field(default_factory=OrderedDict)
    """Requests in order of arrival, with preempted ones in front.

    An OrderedDict gives up its first one in O(1) and takes one in front.  A plain dict, for a queue
    that is read from elsewhere, is gone through in a fifth of the time.
    """
    running: dict[str, Request] = field(default_factory=dict)
    """Requests in the order in which they were admitted."""
    swapped: dict[str, Request] = field(default_factory=dict)
    held: dict[str, Request] = field(default_factory=dict)
    """Requests of a group that wait until its first one has computed the prompt.  No policy sees
    them."""
    finishing: dict[str, Request] = field(default_factory=dict)
    """Requests that reach their output limit in the running step, with nothing left to plan."""
    index: WaitingIndex = field(default_factory=WaitingIndex)
    """The same as `waiting`, by length and by deadline."""

    def __len__(self) -> int:
        return sum(map(len, self._all()))

    def find(self, request_id: str) -> Request | None:
        """Return the request of this id, whatever its queue, or None."""
        for queue in self._all():
            if (request := queue.get(request_id)) is not None:
                return request
        return None

    def put_last(self, request: Request) -> None:
        """Put a request behind those that wait."""
        self.waiting[request.request_id] = request
        self.index.note(request)

    def put_first(self, request: Request) -> None:
        """Put a request in front of those that wait, in an OrderedDict."""
        assert isinstance(self.waiting, OrderedDict), "a plain dict cannot take one in front"
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        self.index.note(request, is_first=True)

    def remove(self, request: Request) -> None:
        """Take a request out of its queue."""
        for queue in self._all():
            if queue.pop(request.request_id, None) is not None:
                return

    def _all(self) -> tuple[dict[str, Request], ...]:
        return self.running, self.swapped, self.waiting, self.finishing, self.held


class InOrder(WaitingRequests):
    """A live view of those that wait, as a policy sees it: no step has to copy a long queue.

    Either end is reached in O(1), the middle in O(n).
    """

    __slots__ = ("_index", "_queue")

    def __init__(self, queues: Queues) -> None:
        self._queue, self._index = queues.waiting, queues.index

    @property
    def longest_tokens(self) -> int:
        return self._index.longest_tokens(self._queue)

    def due_by(self, until_s: float) -> list[Request]:
        return self._index.due_by(until_s, self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue.values())

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._queue.values())

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Request, ...]: ...
    def __getitem__(self, index: int | slice) -> Request | tuple[Request, ...]:
        if isinstance(index, slice):
            return tuple(self._queue.values())[index]
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no request {index} in a queue of {len(self)}")
        ordered = self._queue.values() if index >= 0 else reversed(self._queue.values())
        return next(islice(ordered, index if index >= 0 else -index - 1, None))

    def __repr__(self) -> str:
        return f"InOrder({list(self._queue)})"
