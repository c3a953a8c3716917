"""A forecast, within a plan, of what waiting requests will find in vLLM's prefix cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import RequestStatus as Status

from slosched.integrations.vllm.ledger import Matched, VLLMLedger


class _Found(NamedTuple):
    """The prefix that a waiting request finds when it starts."""

    cached: Sequence[Any]
    """vLLM's blocks that are in the cache now."""
    num_filled: int
    """The number of blocks after those, which earlier requests of the same step compute."""


class Load(NamedTuple):
    """A KV connector's load that begins in the step that is being planned."""

    before: frozenset[str]
    """The requests that are planned before it."""
    num_blocks: int
    """The free blocks that it takes."""


def can_forecast(manager: Any) -> bool:
    """Tell whether vLLM's `KVCacheManager` finds prefixes by the one rule that is known here.

    That rule is for one group of full attention, whose cached blocks are found whole and to their
    end.
    """
    coordinator = manager.coordinator
    return (
        bool(manager.enable_caching)
        and type(coordinator) is UnitaryKVCacheCoordinator
        and type(coordinator.single_type_managers[0]) is FullAttentionManager
        and not coordinator.eagle_group_ids
        and coordinator.dcp_world_size == coordinator.pcp_world_size == 1
    )


class Forecast(VLLMLedger):
    """A ledger that goes through the plan in its order, as vLLM's `schedule` will.

    Each planned request takes blocks from the front of vLLM's free ones, whose cached content is
    then lost, and fills blocks that requests planned after it find.  Requests that leave do so
    before any prefix is looked up.
    """

    def __init__(
        self,
        manager: Any,
        requests: Mapping[str, Any],
        matched: Matched,
        block_size: int,
        num_loaded_tokens: Mapping[str, int],
        loads: Sequence[Load] = (),
        grouped: Sequence[str] = (),
    ) -> None:
        """Prepare for one plan; `requests` are vLLM's by id, `can_forecast(manager)` is true.

        `num_loaded_tokens` are the tokens that a waiting request has after a KV connector's load;
        `loads` begin in this step, in this order.  The plan does not contain the running requests
        `grouped`, which get a token ahead of it.
        """
        [group] = manager.coordinator.single_type_managers
        super().__init__(group.req_to_blocks, matched, caches_prefixes=True)
        self._requests = requests
        self._block_size = block_size
        self._num_loaded_of = num_loaded_tokens
        self._num_cached_of: Mapping[str, int] = group.num_cached_block
        pool = manager.block_pool
        self._cache = pool.cached_block_hash_to_block._cache
        """A block, or a dict of several with the same content, by key."""
        self._num_entered = 0
        """The number of the plan's requests that were entered."""
        self._found: dict[str, _Found] = {}
        self._filled: set[Any] = set()
        """Keys of the blocks that the entered requests fill."""
        self._taken: set[int] = set()
        """Ids of the blocks that the entered requests took."""
        self._num_left_empty = 0
        self._left: list[Any] = []
        """Blocks with content that lost their last holder, in the order in which they did."""
        self._free = self._in_order(pool.free_block_queue)
        self._loads = list(loads)
        self._grouped = grouped
        self._entered: set[str] = set()

    def find(self, request_id: str, planned: Mapping[str, int], num_lent: int = 0) -> int | None:  # noqa: ARG002  # `grouped` says who gets the blocks that are lent
        """Return the tokens that the request finds cached; None if it kept its blocks.

        Takes O(blocks) for the request, and O(1) for each request planned since the last call.
        """
        for name in self._grouped:
            self._enter(name, 1)
        self._grouped = ()
        for name, num_new_tokens in islice(planned.items(), self._num_entered, None):
            self._begin_loads()
            self._enter(name, num_new_tokens)
        self._num_entered = len(planned)
        self._begin_loads()
        theirs = self._requests[request_id]
        # vLLM does not look up a prefix if the request kept its blocks
        if theirs.num_computed_tokens:
            return None
        found = self._found[request_id] = self._look_up(theirs)
        num_found = (len(found.cached) + found.num_filled) * self._block_size
        return max(num_found, self._num_loaded_of.get(request_id, 0))

    def num_ready_blocks(self, request_id: str) -> int:
        found = self._found.get(request_id)
        if found is None:
            return super().num_ready_blocks(request_id)
        num_ready = sum(map(self._is_held, found.cached)) + found.num_filled
        # A request whose load failed has blocks of its own, which it gives back as it starts.
        own = self._table.get(request_id, ())
        return num_ready + sum(1 for b in own if b.ref_cnt == 1 and b not in found.cached)

    def leave(self, request_id: str) -> int:
        blocks = self._table.get(request_id, ())
        num_freed = super().leave(request_id)
        freed = [block for block in reversed(blocks) if not self._is_held(block)]
        self._left += [block for block in freed if block.block_hash is not None]
        self._num_left_empty += sum(block.block_hash is None for block in freed)
        return num_freed

    def _found_by(self, request_id: str) -> Sequence[Any]:
        found = self._found.get(request_id)
        return super()._found_by(request_id) if found is None else found.cached

    def _look_up(self, theirs: Any) -> _Found:
        if theirs.skip_reading_prefix_cache:
            return _Found((), 0)
        cached: list[Any] = []
        num_filled = 0
        # The last token is always computed, since the next one comes out of it.
        for key in islice(theirs.block_hashes, (theirs.num_tokens - 1) // self._block_size):
            block = None if num_filled else self._cached(key)
            if block is not None:
                cached.append(block)
            elif key in self._filled:
                num_filled += 1
            else:
                break
        return _Found(cached, num_filled)

    def _cached(self, key: Any) -> Any:
        found = self._cache.get(make_block_hash_with_group_id(key, 0))
        if found is None:
            return None
        blocks = found.values() if isinstance(found, dict) else (found,)
        return next((block for block in blocks if block.block_id not in self._taken), None)

    def _enter(self, request_id: str, num_new_tokens: int) -> None:
        """Enter a planned request: take its blocks, and note the content that it fills in."""
        theirs, block_size = self._requests[request_id], self._block_size
        if theirs.status is Status.RUNNING:
            prior = theirs.num_computed_tokens
            num_held = len(self._table.get(request_id, ()))
            num_known = self._num_cached_of.get(request_id, 0)
        else:
            num_held = num_known = len(self._found_by(request_id))
            if request_id in self._found:
                num_held = num_known = num_known + self._found[request_id].num_filled
            prior = max(num_known * block_size, self._num_loaded_of.get(request_id, 0))
        after = prior + num_new_tokens
        for _ in range(-(-after // block_size) - num_held):
            self._take()
        num_full = min(after, theirs.num_tokens) // block_size
        if num_full > num_known:
            self._filled.update(islice(theirs.block_hashes, num_known, num_full))

        if self._loads:
            self._entered.add(request_id)

    def _begin_loads(self) -> None:
        """Take the blocks of the loads that begin before the next request is entered."""
        while self._loads and self._loads[0].before <= self._entered:
            for _ in range(self._loads.pop(0).num_blocks):
                self._take()

    def _take(self) -> None:
        if self._num_left_empty:
            self._num_left_empty -= 1
        elif (block := next(self._free, None)) is not None:
            self._taken.add(block.block_id)

    def _in_order(self, queue: Any) -> Iterator[Any]:
        """Yield free blocks in vLLM's order, without those that the plan's requests hold."""
        block = queue.fake_free_list_head.next_free_block
        while block is not None and block is not queue.fake_free_list_tail:
            if not self._is_held(block):
                yield block
            block = block.next_free_block
        for block in self._left:
            if not self._is_held(block):
                yield block
