"""vLLM's KV cache as a policy sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slosched.integrations.vllm.forecast import Forecast, Load, can_forecast
from slosched.integrations.vllm.ledger import VLLMLedger, num_held_blocks


class VLLMBlocks:
    """A `KVView` of vLLM's `KVCacheManager`: counts, read when asked for.

    Some models have several groups of layers that take blocks from one pool (sliding-window and
    full attention).  For these, a block here means one block of each group, and a request holds as
    many as in the group with the most. vLLM has no blocks in host memory to which a scheduler could
    swap.
    """

    num_free_host_blocks = 0

    def __init__(self, kv_cache_manager: Any, block_size: int, requests: Mapping[str, Any]) -> None:
        """Read from vLLM's manager; `block_size` is in tokens, `requests` are vLLM's by id."""
        self._manager = kv_cache_manager
        self._requests = requests
        self._pool = kv_cache_manager.block_pool
        self._tables = [
            manager.req_to_blocks for manager in kv_cache_manager.coordinator.single_type_managers
        ]
        self.num_groups = len(self._tables)
        self._forecasts = can_forecast(kv_cache_manager)
        self._matched: dict[str, Sequence[Any]] = {}
        self.block_size = block_size
        self.num_loaded_tokens: dict[str, int] = {}
        """Tokens that a waiting request has once a KV connector has loaded its part, by id; those
        that are cached anyway are among them."""
        self.loads: list[Load] = []
        """The loads that begin in this step, whose blocks are not free any more."""

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks without the null block, which vLLM keeps for itself."""
        return int(self._pool.num_gpu_blocks - 1) // self.num_groups

    @property
    def num_free_blocks(self) -> int:
        num_free = int(self._pool.get_num_free_blocks()) // self.num_groups
        return num_free - sum(load.num_blocks for load in self.loads)

    def num_held_blocks(self, request_id: str) -> int:
        return num_held_blocks(self._tables, request_id)

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
            )
        return VLLMLedger(self._tables, self._matched, caches_prefixes=self.caches_prefixes)

    @property
    def caches_prefixes(self) -> bool:
        return bool(self._manager.enable_caching)

    def match(self, request: Any) -> int:
        """Return how many tokens of vLLM's waiting `request` are in the prefix cache now."""
        blocks, num_tokens, *_ = self._manager.get_computed_blocks(request)
        self._matched[request.request_id] = blocks.blocks[0]
        return int(num_tokens)

    def has_matched(self, request_id: str) -> bool:
        return request_id in self._matched

    def forget(self, request_id: str) -> None:
        """Forget the matched blocks of a request that no longer waits."""
        self._matched.pop(request_id, None)
