"""vLLM's KV cache as a policy sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from slosched.integrations.vllm.forecast import Forecast, Load, can_forecast
from slosched.integrations.vllm.group_ledger import GroupLedger
from slosched.integrations.vllm.groups import Groups
from slosched.integrations.vllm.ledger import VLLMLedger


class VLLMBlocks:
    """A `KVView` of vLLM's `KVCacheManager`: counts, read when asked for.

    Some models have several groups of layers that take blocks from one pool (sliding-window and
    full attention).  For these, a block here is a row of `groups`.  vLLM has no blocks in host
    memory to which a scheduler could swap.
    """

    num_free_host_blocks = 0

    def __init__(self, kv_cache_manager: Any, requests: Mapping[str, Any]) -> None:
        """Read from vLLM's manager; `requests` are vLLM's by id."""
        self._manager = kv_cache_manager
        self._requests = requests
        self._pool = kv_cache_manager.block_pool
        self.groups = Groups(kv_cache_manager)
        self._forecasts = can_forecast(kv_cache_manager)
        self._matched: dict[str, Sequence[Any]] = {}
        self._hits: dict[str, Sequence[Sequence[Any]]] = {}
        """The same for each group, if there are several."""
        self.block_size = self.groups.block_size
        self.num_loaded_tokens: dict[str, int] = {}
        """Tokens that a waiting request has once a KV connector has loaded its part, by id; those
        that are cached anyway are among them."""
        self.loads: list[Load] = []
        """The loads that begin in this step, whose blocks are not free any more."""
        self._grouped: Sequence[str] = ()
        """The decodes that get a token ahead of all that is planned."""

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks without the null block, which vLLM keeps for itself."""
        return int(self._pool.num_gpu_blocks - 1) // self.groups.num_blocks_per_row

    @property
    def num_free_blocks(self) -> int:
        num_free = int(self._pool.get_num_free_blocks()) // self.groups.num_blocks_per_row
        return num_free - sum(load.num_blocks for load in self.loads)

    def num_held_blocks(self, request_id: str) -> int:
        if self.groups.are_plain:
            return self.groups.num_rows(request_id)
        return len(self.groups.held(request_id)) // self.groups.num_blocks_per_row

    def num_held_host_blocks(self, request_id: str) -> int:  # noqa: ARG002  # there are none
        return 0

    def ledger(self) -> VLLMLedger:
        """Return a ledger for one plan, before any of its requests are entered."""
        if self._forecasts:
            return Forecast(
                self._manager,
                self._requests,
                self._matched,
                self.block_size,
                self.num_loaded_tokens,
                self.loads,
                self._grouped,
            )
        if self.groups.are_plain:
            [table] = self.groups.tables
            return VLLMLedger(table, self._matched, caches_prefixes=self.caches_prefixes)
        return GroupLedger(
            self.groups,
            self._hits,
            int(self._pool.get_num_free_blocks()),
            caches_prefixes=self.caches_prefixes,
        )

    @contextmanager
    def grouping(self, request_ids: Sequence[str]) -> Iterator[None]:
        """Within the block, ledgers begin with a token of each of these running requests."""
        self._grouped = request_ids
        try:
            yield
        finally:
            self._grouped = ()

    @property
    def caches_prefixes(self) -> bool:
        return bool(self._manager.enable_caching)

    def match(self, request: Any) -> int:
        """Return how many tokens of vLLM's waiting `request` are in the prefix cache now."""
        blocks, num_tokens, *_ = self._manager.get_computed_blocks(request)
        self._matched[request.request_id] = blocks.blocks[0]
        if not self.groups.are_plain:
            self._hits[request.request_id] = blocks.blocks
        return int(num_tokens)

    def has_matched(self, request_id: str) -> bool:
        return request_id in self._matched

    def forget(self, request_id: str) -> None:
        """Forget the matched blocks of a request that no longer waits."""
        self._matched.pop(request_id, None)
        self._hits.pop(request_id, None)
