"""Requests that share blocks: what each holds of the prefix index, and what the waiting would."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from slosched.core import Request
from slosched.kv.host_tier import HostTier
from slosched.kv.keys import BlockKeys, Key, block_keys
from slosched.kv.matches import Match, Matches
from slosched.kv.prefix import PrefixIndex


class SharedBlocks:
    """The part of the bookkeeping that there is only with a prefix cache.

    A table is a first part that is in the index and may be shared, and a rest that is the
    request's own.  Only the rest is ever written to.
    """

    def __init__(self, index: PrefixIndex, block_size: int, host: HostTier | None = None) -> None:
        """`host` keeps what `index` evicts."""
        self.index = index
        self._host = host
        self._block_size = block_size
        self._matches = Matches(index if host is None else _BothTiers(index, host))
        self._keys: dict[str, BlockKeys] = {}
        self._num_indexed: dict[str, int] = {}
        """Blocks of a table that are in the index."""
        self._full_at: dict[str, float] = {}
        """When so many tokens are computed, the table has another block for the index."""
        self._num_started = 0
        self._started: dict[str, int] = {}
        """The how-manieth it was that started, of those that hold blocks."""
        self._ended: list[tuple[int, Sequence[Key]]] = []
        """Who has ended in this step, as in `_started`, and what it held."""

    def watch(self, request: Request) -> None:
        """`request` waits from now on; `refresh` tells what is cached of it."""
        request_id = request.request_id
        if request_id not in self._keys:
            self._keys[request_id] = block_keys(request, self._block_size)
        most = (request.num_tokens - 1) // self._block_size
        self._matches.add(Match(request_id, self._keys[request_id], most))

    def forget(self, request_id: str) -> None:
        """The request has ended, and left its table."""
        self._matches.remove(request_id)
        self._keys.pop(request_id, None)
        self._started.pop(request_id, None)

    def refresh(self) -> Iterator[Match]:
        """The waiting requests of which another part is cached than before."""
        self.settle_ends()
        return self._matches.refresh()

    def settle_ends(self) -> None:
        """Who has ended since the last time has left in the order of the starts."""
        if len(self._ended) > 1:
            for _, keys in sorted(self._ended, key=itemgetter(0)):
                self.index.requeue(keys)
        self._ended.clear()

    def matched(self, request_id: str) -> tuple[Sequence[Key], int]:
        """Keys of a waiting request, and of how many of them the blocks are cached."""
        match = self._matches.get(request_id)
        return ((), 0) if match is None else (match.keys.first(match.num_blocks), match.num_blocks)

    def num_on_device(self, keys: Sequence[Key], num: int) -> int:
        """How many of the first `num` blocks, which are cached, need no copy from the host."""
        if self._host is None:
            return num
        index = self.index
        return bisect_left(keys, True, hi=num, key=lambda key: key not in index)

    def held(self, request_id: str) -> tuple[Sequence[Key], int]:
        """Keys of a request, and how many blocks of its table are in the index."""
        num = self._num_indexed.get(request_id, 0)
        return (self._keys[request_id].first(num), num) if num else ((), 0)

    def start(self, request_id: str) -> tuple[list[int], list[int]]:
        """Hold what is cached of a waiting request: the blocks with which its table begins.

        Then those on the host, which are to be copied into the next ones of its table.
        """
        keys, num_matched = self.matched(request_id)
        num = self.num_on_device(keys, num_matched)
        self._matches.remove(request_id)
        self._num_started += 1
        self._started[request_id] = self._num_started
        self._num_indexed[request_id] = num
        self._full_at[request_id] = (num + 1) * self._block_size
        on_host: list[int] = []
        if self._host is not None and num < num_matched:
            on_host = self._host.pin(request_id, keys[num:num_matched])
        return self.index.lock(keys[:num]), on_host

    def leave(self, request_id: str, table: Sequence[int], *, at_end: bool) -> Sequence[int]:
        """The request gives up its table, `at_end` or not; which blocks of it nobody needs."""
        keys, num = self.held(request_id)
        self.index.unlock(keys[:num])
        if self._host is not None:
            self._host.unpin(request_id)
        if at_end and num:
            self._ended.append((self._started[request_id], keys[:num]))
        self._num_indexed.pop(request_id, None)
        self._full_at.pop(request_id, None)
        return table[num:]

    def fill(self, request_id: str, num_tokens: int, table: list[int]) -> Sequence[int]:
        """The first `num_tokens` tokens of a table are computed; blocks that it no longer needs.

        These held what was in the index already; the table has the blocks from there instead.
        """
        if num_tokens < self._full_at.get(request_id, 0):
            return ()
        num, num_full = self._num_indexed.get(request_id, 0), num_tokens // self._block_size
        keys = self._keys[request_id].first(num_full)[:num_full]
        self._num_indexed[request_id] = len(keys)
        is_all = len(keys) < num_full  # what follows has no keys
        self._full_at[request_id] = math.inf if is_all else (num_full + 1) * self._block_size
        if len(keys) <= num:
            return ()
        own = table[num : len(keys)]
        table[num : len(keys)] = canonical = self.index.insert(keys, num, own)
        spare = [mine for mine, block in zip(own, canonical, strict=True) if mine != block]
        num_known = num + len(spare)
        self._matches.changed(keys[num_known:])
        if self._host is not None:
            self._matches.changed(self._host.arrived(keys, num_known, own[len(spare) :]))
            self._host.unpin(request_id)
        return spare

    def evict(self, count: int) -> list[int]:
        """Blocks that were cached on the device and are free now."""
        gone = self.index.evict(count)
        lost = [key for key, _ in gone] if self._host is None else self._host.take_over(gone)
        self._matches.changed(lost)
        return [block for _, block in gone]

    def clear_host(self) -> None:
        """Forget what is cached on the host alone."""
        if self._host is not None:
            self._matches.changed(self._host.clear())


@dataclass(frozen=True, slots=True)
class _BothTiers:
    """What is cached anywhere."""

    device: Container[Key]
    host: Container[Key]

    def __contains__(self, key: object) -> bool:
        return key in self.device or key in self.host
