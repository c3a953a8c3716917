"""Requests that share blocks: what each holds of the prefix index, and what waiting ones would."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter

from slosched.core import Request
from slosched.kv.prefix.host_tier import NoHostTier
from slosched.kv.prefix.index import PrefixIndex
from slosched.kv.prefix.keys import BlockKeys, Key, block_keys
from slosched.kv.prefix.matches import Match, Matches
from slosched.kv.prefix.unfinished import Unfinished


class SharedBlocks:
    """The blocks of the prefix index that each request holds.

    A block table has a first part, which is in the index and may be shared, and a rest that belongs
    to the request alone.  Only the rest is ever written to.
    """

    def __init__(
        self,
        index: PrefixIndex,
        block_size: int,
        host: NoHostTier,
        keys_of: Callable[[Request, int], BlockKeys] = block_keys,
    ) -> None:
        """Begin without requests; `host` keeps what `index` evicts.

        `keys_of` makes the keys of a request, given the block size.
        """
        self.index = index
        self._keys_of = keys_of
        self.unfinished = Unfinished()
        """Blocks that are in the index although they are not computed yet."""
        self._host = host
        self.block_size = block_size
        self._matches = Matches(host.anywhere(index))
        self._requests: dict[str, Request] = {}
        self._keys: dict[str, BlockKeys] = {}
        self._num_indexed: dict[str, int] = {}
        """Number of first blocks of a table that are in the index."""
        self.full_at: dict[str, float] = {}
        """Number of computed tokens at which a table has another block for the index."""
        self._num_started = 0
        self._started: dict[str, int] = {}
        """Place of each request that holds blocks in the order of all starts so far."""
        self._ended: list[tuple[int, Sequence[Key], Sequence[int]]] = []
        """For each request that has ended in this step: its place in the order of the starts, and
        the keys and blocks that it held."""

    def watch(self, request: Request) -> None:
        """Follow, while `request` waits, what is cached of it: see `refresh`."""
        request_id = request.request_id
        if self._requests.get(request_id) is not request:
            self._requests[request_id] = request
            self._keys[request_id] = self._keys_of(request, self.block_size)
        self._watch(request_id, request.num_tokens - 1)

    def watch_swapped(self, request_id: str) -> None:
        """Follow what is cached of a request that was swapped out with all that it computed."""
        self._watch(request_id, self._requests[request_id].num_computed_tokens)

    def _watch(self, request_id: str, num_tokens: int) -> None:
        """Follow what is cached of the first `num_tokens` tokens of a request.

        Their keys are found now and once, so that no step has to find them.
        """
        most = num_tokens // self.block_size
        keys = self.keys(request_id, most)
        self._matches.add(Match(request_id, keys, min(most, len(keys))))

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended and left its table."""
        self._matches.remove(request_id)
        self._requests.pop(request_id, None)
        self._keys.pop(request_id, None)
        self._started.pop(request_id, None)

    def refresh(self) -> list[tuple[str, int]]:
        """Return watched requests with their cached blocks, where these may have changed."""
        self.settle_ends()
        return self._matches.refresh()

    def settle_ends(self) -> None:
        """Let the requests that ended since the last call count as having left as they started.

        Their blocks are then evicted in the order in which the requests started.
        """
        if len(self._ended) > 1:
            for _, keys, blocks in sorted(self._ended, key=itemgetter(0)):
                self.index.requeue(keys, blocks)
        self._ended.clear()

    def matched(self, request_id: str) -> tuple[Sequence[Key], int]:
        """Return the keys of a waiting request and the number of first ones that are cached."""
        match = self._matches.get(request_id)
        return ((), 0) if match is None else (match.keys, match.num_blocks)

    def num_on_device(self, keys: Sequence[Key], num: int) -> int:
        """Return how many of the first `num` blocks, all cached, need no copy from the host."""
        return self._host.num_on_device(keys, num)

    def follows(self, request_id: str) -> bool:
        """Tell whether the request was watched and has not ended."""
        return request_id in self._requests

    def request(self, request_id: str) -> Request:
        """Return the request of this id, which has not ended."""
        return self._requests[request_id]

    def keys(self, request_id: str, num: int) -> Sequence[Key]:
        """Return at least the first `num` keys of a request, or all that can be known."""
        return self._keys[request_id].first(num)

    def most_blocks(self, request_id: str) -> int:
        """Return the number of cached blocks that a waiting request could use at most."""
        match = self._matches.get(request_id)
        return 0 if match is None else match.most_blocks

    def held(self, request_id: str) -> tuple[Sequence[Key], int]:
        """Return the keys of a request and the number of its first blocks in the index."""
        num = self._num_indexed.get(request_id, 0)
        return (self._keys[request_id].first(num), num) if num else ((), 0)

    def start(self, request_id: str, num_blocks: int | None = None) -> tuple[list[int], list[int]]:
        """Let a waiting request hold what is cached of it, and return two lists of blocks.

        The first holds the device blocks with which its table begins, the second the host blocks
        that have to be copied into the next blocks of its table.  Given `num_blocks`, which a plan
        has found, the request holds that many.
        """
        keys, num_matched = self.matched(request_id)
        if num_blocks is not None:
            keys, num_matched = self.keys(request_id, num_blocks), num_blocks
        num = self.num_on_device(keys, num_matched)
        self._matches.remove(request_id)
        self._num_started += 1
        self._started[request_id] = self._num_started
        self._num_indexed[request_id] = num
        self.full_at[request_id] = (num + 1) * self.block_size
        on_host: list[int] = []
        if num < num_matched:
            on_host = self._host.pin(request_id, keys[num:num_matched])
        return self.index.lock(keys[:num]), on_host

    def leave(self, request_id: str, table: Sequence[int], *, at_end: bool) -> Sequence[int]:
        """Let a request give up its table and return the blocks of it that were its own.

        `at_end` tells whether the request has ended.
        """
        keys, num = self.held(request_id)
        keys, blocks = keys[:num], table[:num]
        self.index.unlock(keys, blocks)
        self._host.unpin(request_id)
        if at_end and num:
            self._ended.append((self._started[request_id], keys, blocks))
        self._num_indexed.pop(request_id, None)
        self.full_at.pop(request_id, None)
        return table[num:]

    def fill(
        self, request_id: str, num_tokens: int, table: list[int], by: Request | None = None
    ) -> Sequence[int]:
        """Enter the full blocks of a table's first `num_tokens` tokens into the index.

        Return the blocks that the table does not need any more: the index had their content already
        and has put its own blocks in their place.  `by` is the request whose planned step is yet to
        compute them.
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
        if by is not None:
            self.unfinished.add(by, num, own)
        spare = [mine for mine, block in zip(own, canonical, strict=True) if mine != block]
        self._matches.changed(keys[num_known:])
        self._matches.changed(self._host.arrived(keys, num_known, own[num_known - num :]))
        self._host.unpin(request_id)
        return spare

    def note_computed(self, request_id: str, num_tokens: int, table: list[int]) -> Sequence[int]:
        """Note that a table's first `num_tokens` tokens are computed; return its spare blocks."""
        return self.fill(request_id, num_tokens, table)

    def evict(self, count: int) -> list[int]:
        """Free at least `count` blocks that are cached on the device, and return them."""
        return self._forget(self.index.evict(count))

    def discard(self, blocks: Sequence[int]) -> list[int]:
        """Free those of `blocks`, never computed, that no request holds, and return them."""
        return self._forget(self.index.discard(blocks))

    def _forget(self, gone: Sequence[tuple[Key, int]]) -> list[int]:
        """Forget evicted blocks and return them.

        Another block of the same key may be left; then the key is still cached.
        """
        self.unfinished.remove(block for _, block in gone)
        last = reversed(dict(reversed(gone)).items())
        gone_for_good = [pair for pair in last if pair[0] not in self.index]
        self._matches.changed(self._host.take_over(gone_for_good))
        return [block for _, block in gone]

    def clear_host(self) -> None:
        """Forget what is cached only on the host."""
        self._matches.changed(self._host.clear())
