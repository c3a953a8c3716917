"""Requests that share blocks: what each holds of the prefix index, and what the waiting would."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass
from operator import itemgetter

from slosched.core import Request
from slosched.kv.prefix.host_tier import HostTier
from slosched.kv.prefix.index import PrefixIndex
from slosched.kv.prefix.keys import BlockKeys, Key, block_keys
from slosched.kv.prefix.matches import Match, Matches
from slosched.kv.prefix.unfinished import Unfinished


class SharedBlocks:
    """The part of the bookkeeping that there is only with a prefix cache.

    A table is a first part that is in the index and may be shared, and a rest that is the
    request's own.  Only the rest is ever written to.
    """

    def __init__(self, index: PrefixIndex, block_size: int, host: HostTier | None = None) -> None:
        """`host` keeps what `index` evicts; then nothing is found before it is computed."""
        self.index = index
        self.unfinished = Unfinished() if index.finds_planned and host is None else None
        """What is in the index although it is not computed yet, where that may be."""
        self._host = host
        self.block_size = block_size
        self._matches = Matches(index if host is None else _BothTiers(index, host))
        self._requests: dict[str, Request] = {}
        self._keys: dict[str, BlockKeys] = {}
        self._num_indexed: dict[str, int] = {}
        """Blocks of a table that are in the index."""
        self._num_merged: dict[str, int] = {}
        """Blocks of a table that were found, or of which none is equal to another any more."""
        self.full_at: dict[str, float] = {}
        """When so many tokens are computed, the table has another block for the index."""
        self._num_started = 0
        self._started: dict[str, int] = {}
        """The how-manieth it was that started, of those that hold blocks."""
        self._ended: list[tuple[int, Sequence[Key], Sequence[int]]] = []
        """Who has ended in this step, as in `_started`, and what it held."""

    def watch(self, request: Request) -> None:
        """`request` waits from now on; `refresh` tells what is cached of it."""
        request_id = request.request_id
        if self._requests.get(request_id) is not request:
            self._requests[request_id] = request
            self._keys[request_id] = block_keys(request, self.block_size)
        self._watch(request_id, request.num_tokens - 1)

    def watch_swapped(self, request_id: str) -> None:
        """It takes all that is computed of it along, and may find a part when it returns."""
        self._watch(request_id, self._requests[request_id].num_computed_tokens)

    def _watch(self, request_id: str, num_tokens: int) -> None:
        """It could use so many tokens.  Their keys are found now, and once, not within a step."""
        most = num_tokens // self.block_size
        keys = self.keys(request_id, most)
        self._matches.add(Match(request_id, keys, min(most, len(keys))))

    def forget(self, request_id: str) -> None:
        """The request has ended, and left its table."""
        self._matches.remove(request_id)
        self._requests.pop(request_id, None)
        self._keys.pop(request_id, None)
        self._started.pop(request_id, None)

    def refresh(self) -> list[tuple[str, int]]:
        """Waiting requests of which another part may be cached than before, and its blocks."""
        self.settle_ends()
        return self._matches.refresh()

    def settle_ends(self) -> None:
        """Who has ended since the last time has left in the order of the starts."""
        if len(self._ended) > 1:
            for _, keys, blocks in sorted(self._ended, key=itemgetter(0)):
                self.index.requeue(keys, blocks)
        self._ended.clear()

    def matched(self, request_id: str) -> tuple[Sequence[Key], int]:
        """Keys of a waiting request, and of how many of them the blocks are cached."""
        match = self._matches.get(request_id)
        return ((), 0) if match is None else (match.keys, match.num_blocks)

    def num_on_device(self, keys: Sequence[Key], num: int) -> int:
        """How many of the first `num` blocks, which are cached, need no copy from the host."""
        if self._host is None:
            return num
        index = self.index
        return bisect_left(keys, True, hi=num, key=lambda key: key not in index)

    def request(self, request_id: str) -> Request:
        """Of this id that has not ended."""
        return self._requests[request_id]

    def names(self, request_id: str, num_tokens: int) -> Sequence[Key]:
        """Of the full blocks of its first tokens, as far as can be known."""
        num = num_tokens // self.block_size
        return self._keys[request_id].first(num)[:num]

    def num_holders(self, name: Key) -> int:
        """Requests that hold a block of this name."""
        return self.index.num_holders(name)

    def keys(self, request_id: str, num: int) -> Sequence[Key]:
        """At least the first `num` of a request, or all that can be known."""
        return self._keys[request_id].first(num)

    def most_blocks(self, request_id: str) -> int:
        """That a waiting request could use."""
        match = self._matches.get(request_id)
        return 0 if match is None else match.most_blocks

    def held(self, request_id: str) -> tuple[Sequence[Key], int]:
        """Keys of a request, and how many blocks of its table are in the index."""
        num = self._num_indexed.get(request_id, 0)
        return (self._keys[request_id].first(num), num) if num else ((), 0)

    def start(self, request_id: str, num_blocks: int | None = None) -> tuple[list[int], list[int]]:
        """Hold what is cached of a waiting request: the blocks with which its table begins.

        Then those on the host, which are to be copied into the next ones of its table.  Given
        `num_blocks`, it holds so many, which a plan has found, and nothing is on the host.
        """
        keys, num_matched = self.matched(request_id)
        if num_blocks is not None:
            keys, num_matched = self.keys(request_id, num_blocks), num_blocks
        num = self.num_on_device(keys, num_matched)
        self._matches.remove(request_id)
        self._num_started += 1
        self._started[request_id] = self._num_started
        self._num_indexed[request_id] = self._num_merged[request_id] = num
        self.full_at[request_id] = (num + 1) * self.block_size
        on_host: list[int] = []
        if self._host is not None and num < num_matched:
            on_host = self._host.pin(request_id, keys[num:num_matched])
        return self.index.lock(keys[:num]), on_host

    def leave(self, request_id: str, table: Sequence[int], *, at_end: bool) -> Sequence[int]:
        """The request gives up its table, `at_end` or not; which blocks of it nobody needs."""
        keys, num = self.held(request_id)
        keys, blocks = keys[:num], table[:num]
        self.index.unlock(keys, blocks)
        if self._host is not None:
            self._host.unpin(request_id)
        if at_end and num:
            self._ended.append((self._started[request_id], keys, blocks))
        self._num_indexed.pop(request_id, None)
        self._num_merged.pop(request_id, None)
        self.full_at.pop(request_id, None)
        return table[num:]

    def fill(
        self, request_id: str, num_tokens: int, table: list[int], by: Request | None = None
    ) -> Sequence[int]:
        """The first `num_tokens` tokens of a table are in the index; blocks that it does not need.

        These held what was in the index already; the table has the blocks from there instead.
        `by` is given if a step that is planned is yet to compute them.
        """
        if num_tokens < self.full_at.get(request_id, 0):
            return ()
        num, num_full = self._num_indexed.get(request_id, 0), num_tokens // self.block_size
        keys = self._keys[request_id].first(num_full)[:num_full]
        self._num_indexed[request_id] = len(keys)
        is_all = len(keys) < num_full  # what follows has no keys
        self.full_at[request_id] = math.inf if is_all else (num_full + 1) * self.block_size
        if len(keys) <= num:
            return ()
        num_known = num + sum(key in self.index for key in keys[num:])
        own = table[num : len(keys)]
        table[num : len(keys)] = canonical = self.index.insert(keys, num, own)
        if by is not None and self.unfinished is not None:
            self.unfinished.add(by, num, own)
        spare = [mine for mine, block in zip(own, canonical, strict=True) if mine != block]
        self._matches.changed(keys[num_known:])
        if self._host is not None:
            self._matches.changed(self._host.arrived(keys, num_known, own[num_known - num :]))
            self._host.unpin(request_id)
        return spare

    def note_computed(self, request_id: str, num_tokens: int, table: list[int]) -> Sequence[int]:
        """The first `num_tokens` tokens of a table are computed; blocks that it no longer needs."""
        spare = self.fill(request_id, num_tokens, table)
        return self._merge(request_id, num_tokens, table) if self.index.merges else spare

    def _merge(self, request_id: str, num_tokens: int, table: list[int]) -> list[int]:
        first = self._num_merged.get(request_id, 0)
        stop = min(self._num_indexed.get(request_id, 0), num_tokens // self.block_size)
        if stop <= first:
            return []
        self._num_merged[request_id] = stop
        own = table[first:stop]
        table[first:stop] = merged = self.index.merge(self.keys(request_id, stop)[first:stop], own)
        return [mine for mine, block in zip(own, merged, strict=True) if mine != block]

    def evict(self, count: int) -> list[int]:
        """Blocks that were cached on the device and are free now."""
        return self._forget(self.index.evict(count))

    def discard(self, blocks: Sequence[int]) -> list[int]:
        """Those that nobody holds, whose content was never computed: they are free now."""
        return self._forget(self.index.discard(blocks))

    def _forget(self, gone: Sequence[tuple[Key, int]]) -> list[int]:
        """Of these a twin may be left."""
        if self.unfinished is not None:
            self.unfinished.remove(block for _, block in gone)
        last = reversed(dict(reversed(gone)).items())
        gone_for_good = [pair for pair in last if pair[0] not in self.index]
        lost = [key for key, _ in gone_for_good]
        if self._host is not None:
            lost = self._host.take_over(gone_for_good)
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
