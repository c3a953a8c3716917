"""A prefix index that evicts in any order, asked of an `EvictionOrder`."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from slosched.core import Request
from slosched.kv.checks import KVCorruptionError
from slosched.kv.eviction.lines import Line, Lines
from slosched.kv.eviction.order import EvictionOrder
from slosched.kv.prefix.hash_index import HashIndex
from slosched.kv.prefix.keys import Key

_MOST_VOID = 256
"""Void entries that the queue may have beside as many as there are others."""

_Entry = tuple[tuple[float, float], int, Line, int]
"""A rank's value, its number, its line, and the first block for which it holds."""


class RankedIndex(HashIndex):
    """A `HashIndex` that evicts the tail of the line that its order ranks lowest.

    A line can be evicted when nothing cached follows it and no request holds its last cached block.
    So the index stays closed under prefixes whatever the order is.  Of a key with several blocks,
    idle ones are evicted first, as long as another one is left: they save nothing.

    The order is told the time of each arrival and each end, and the last of these times counts as
    now.  A line that has lost a part of its tail keeps its rank, so that it makes no difference
    whether blocks are evicted at once or one by one.  Evicting a block takes O(1), and each change
    of a line O(log lines).
    """

    def __init__(self, order: EvictionOrder) -> None:
        super().__init__()
        self._order = order
        self._lines = Lines()
        self._queue: list[_Entry] = []
        """Heap of the lines that may be evicted, the next one first, and of void entries."""
        self._changes: list[tuple[float, int, Line]] = []
        """Heap of the times at which ranks change, with their numbers and lines."""
        self._spare: OrderedDict[int, Key] = OrderedDict()
        """Idle blocks of keys that have, or had, several."""
        self._num_ranked = self._num_released = self._num_arrived = 0
        self._arrival_number: dict[str, int] = {}
        """The number among all arrivals of each request that has not ended, by its id."""
        self._most_entries = _MOST_VOID
        self._now_s = 0.0

    # What the requests do.

    def note_arrived(self, request: Request, keys: Sequence[Key]) -> None:
        """Note that a request with these keys has arrived.

        Do nothing if it is known already: a preempted request waits again, but is no new use.
        """
        if request.request_id in self._arrival_number:
            return
        path = self._lines.path(keys, len(keys))
        self._now_s = max(self._now_s, request.arrival_s)
        for line in path:
            if not line.users and line.left_number:
                gap_s = max(self._now_s - line.left_s, 1e-3)
                line.num_gaps += 1
                line.log_gap_sum += math.log(gap_s)
        self._order.note_arrived(path, self._now_s)
        self._num_arrived += 1
        self._arrival_number[request.request_id] = self._num_arrived
        for line in path:
            line.users[request.request_id] = self._num_arrived
        self._rank_again(path)

    def note_found(self, waiting: Mapping[str, Sequence[Key]]) -> None:
        """Note that something is cached now of waiting requests, of which the keys are given by id.

        They wait for these lines, too, which may have been computed since they arrived.  Each line
        is ranked once: a thousand may wait for the same.
        """
        found: dict[Line, None] = {}
        for request_id, keys in waiting.items():
            for line in self._lines.path(keys, len(keys)):
                line.users[request_id] = self._arrival_number[request_id]
                found[line] = None
        self._rank_again(found)

    def note_released(self, request: Request, keys: Sequence[Key]) -> int:
        """Note that a request has given up its blocks of `keys`, which stay cached.

        Return the number of first keys that were in lines before.
        """
        self._num_released += 1
        user = request.request_id
        before = self._lines.path(keys, len(keys))
        num_known = before[-1].stop if before else 0
        path = self._lines.extended(keys, len(keys), user)
        for line in path:
            line.users.setdefault(user, self._arrival_number[user])
            line.left_number = self._num_released
        self._rank_again(path)
        return num_known

    def note_ended(self, request: Request, keys: Sequence[Key]) -> None:
        """Note that a request with these keys has ended and left its blocks."""
        assert request.end_s is not None
        self._now_s = max(self._now_s, request.end_s)
        self._arrival_number.pop(request.request_id, None)
        path = self._lines.path(keys, len(keys))
        for line in path:
            line.users.pop(request.request_id, None)
            if not line.users:
                line.left_s = self._now_s
        self._order.note_ended(request, path, self._now_s)
        self._rank_again(path)

    # What the index does otherwise than `HashIndex`.

    def lock(self, keys: Sequence[Key]) -> list[int]:
        blocks = super().lock(keys)
        if self._spare:
            for block in blocks:
                self._spare.pop(block, None)
        return blocks

    def unlock(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:
        super().unlock(keys, blocks)
        if self.twins:
            for key, block in zip(reversed(keys), reversed(blocks), strict=True):
                if key in self.twins and block in self._evictable:
                    self._spare[block] = key

    def insert(self, keys: Sequence[Key], num_held: int, blocks: Sequence[int]) -> list[int]:
        own = super().insert(keys, num_held, blocks)
        if self.twins:
            for key in keys[num_held:]:
                for block in self.twins.get(key, ()):
                    if block in self._evictable:
                        self._spare[block] = key
        return own

    def requeue(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:  # noqa: ARG002
        self._num_released += 1
        path = self._lines.path(keys, len(keys))
        for line in path:
            line.left_number = self._num_released
        self._rank_again(path)

    def evict(self, count: int) -> list[tuple[Key, int]]:
        gone = self._evict_spare(count)
        self._rank_again(self._changed())
        while len(gone) < count:
            self._evict_tail(self._pop(), count, gone)
        return gone

    def discard(self, blocks: Sequence[int]) -> list[tuple[Key, int]]:
        gone = super().discard(blocks)
        for block in blocks:
            self._spare.pop(block, None)
        if gone:
            for line in self._lines.all():
                stop = line.cached_to
                while stop > line.start and line.keys[stop - 1] not in self:
                    stop -= 1
                if stop < line.cached_to:
                    self._lines.shorten(line, stop)
                    self._rank_again((line,))
        return gone

    # The queue.

    def _rank_again(self, lines: Iterable[Line]) -> None:
        """Rank those of `lines` that may go, and those that may since the last call."""
        freed = self._lines.freed
        for line in (*lines, *freed):
            if self._may_go(line):
                self._enqueue(line)
        freed.clear()

    def _changed(self) -> list[Line]:
        """Return the lines whose rank has to be asked for again by now, each once.

        They are all found before any is ranked: an order may say that the new rank, too, changes
        now, since sums of times are rounded.
        """
        changed: list[Line] = []
        while self._changes and self._changes[0][0] <= self._now_s:
            _, number, line = heappop(self._changes)
            if line.rank_number == number:
                changed.append(line)
        return changed

    def _may_go(self, line: Line) -> bool:
        """Tell whether a line has a last cached block that nothing needs to stay."""
        return (
            line.is_cached
            and not line.num_cached_children
            and line.keys[line.cached_to - 1] not in self._holders
        )

    def _enqueue(self, line: Line) -> None:
        value, until_s, down_to = self._order.rank(line, self._now_s)
        self._num_ranked = line.rank_number = self._num_ranked + 1
        heappush(self._queue, (value, self._num_ranked, line, down_to))
        if until_s < math.inf:
            heappush(self._changes, (until_s, self._num_ranked, line))
        if len(self._queue) > self._most_entries:
            self._sweep()

    def _sweep(self) -> None:
        """Take void entries out of both heaps.  They are swept once as many more have come."""
        self._queue = [entry for entry in self._queue if entry[2].rank_number == entry[1]]
        self._changes = [change for change in self._changes if change[2].rank_number == change[1]]
        heapify(self._queue)
        heapify(self._changes)
        self._most_entries = 2 * len(self._queue) + _MOST_VOID

    def _pop(self) -> _Entry:
        """Take the entry of the line that goes next out of the queue, and return it."""
        while self._queue:
            entry = heappop(self._queue)
            _, number, line, _ = entry
            if line.rank_number == number and self._may_go(line):
                return entry
        raise KVCorruptionError("idle blocks of the prefix cache are in no line")

    def _evict_spare(self, count: int) -> list[tuple[Key, int]]:
        gone: list[tuple[Key, int]] = []
        while self._spare and len(gone) < count:
            block, key = self._spare.popitem(last=False)
            if key in self.twins:
                del self._evictable[block]
                self._drop(key, block)
                gone.append((key, block))
        return gone

    def _evict_tail(self, entry: _Entry, count: int, gone: list[tuple[Key, int]]) -> None:
        """Evict the tail of an entry's line until `gone` has `count`, or as far as its rank holds.

        If its rank holds for more of it, the entry returns to the queue.
        """
        _, _, line, down_to = entry
        keys, holders, evictable = line.keys, self._holders, self._evictable
        floor, place = max(line.start, down_to), line.cached_to
        while place > floor and len(gone) < count and keys[place - 1] not in holders:
            place -= 1
            key = keys[place]
            block = self._block[key]
            del evictable[block]
            self._drop(key, block)
            gone.append((key, block))
        self._lines.shorten(line, place)
        if place > floor and keys[place - 1] not in holders:
            heappush(self._queue, entry)
        else:
            self._rank_again((line,))
