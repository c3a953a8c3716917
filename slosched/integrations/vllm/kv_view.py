"""vLLM's KV cache as a policy sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class VLLMBlocks:
    """A `KVView` of vLLM's `KVCacheManager`: counts, read when asked.

    Where a model has several groups of layers that take blocks from one pool (sliding window beside
    full attention), a block here is one of each group, and a request holds as many as the group
    with the most.  vLLM has no blocks in host memory that a scheduler could swap to.
    """

    num_free_host_blocks = 0

    def __init__(self, kv_cache_manager: Any, block_size: int) -> None:
        """`block_size` is in tokens."""
        self._manager = kv_cache_manager
        self._pool = kv_cache_manager.block_pool
        self._tables = [
            manager.req_to_blocks for manager in kv_cache_manager.coordinator.single_type_managers
        ]
        self._table = self._tables[0]
        self._num_groups = len(self._tables)
        self._matched: dict[str, Sequence[Any]] = {}
        """vLLM's cached blocks that a waiting request could use, of its first group."""
        self.block_size = block_size

    @property
    def num_blocks(self) -> int:
        """Without the null block, which vLLM keeps for itself."""
        return int(self._pool.num_gpu_blocks - 1) // self._num_groups

    @property
    def num_free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks()) // self._num_groups

    def num_held_blocks(self, request_id: str) -> int:
        if self._num_groups > 1:
            return max(len(table.get(request_id, ())) for table in self._tables)
        return len(self._table.get(request_id, ()))

    def num_held_host_blocks(self, request_id: str) -> int:  # noqa: ARG002  # there are none
        return 0

    def ledger(self) -> VLLMLedger:
        """For one plan, before anything of it is entered."""
        return VLLMLedger(self._table, self._matched, self.num_held_blocks, self.caches_prefixes)

    @property
    def caches_prefixes(self) -> bool:
        return bool(self._manager.enable_caching)

    def match(self, request: Any) -> int:
        """How many tokens of vLLM's waiting `request` are in the prefix cache now."""
        blocks, num_tokens, *_ = self._manager.get_computed_blocks(request)
        self._matched[request.request_id] = blocks.blocks[0]
        return int(num_tokens)

    def has_matched(self, request_id: str) -> bool:
        return request_id in self._matched

    def forget(self, request_id: str) -> None:
        """The request waits no longer."""
        self._matched.pop(request_id, None)


class VLLMLedger:
    """What a plan does to the free blocks; a `core.BlockLedger`.

    vLLM counts a cached block that nobody holds as free: to use it takes one of the free ones.
    """

    def __init__(
        self,
        table: Mapping[str, Sequence[Any]],
        matched: Mapping[str, Sequence[Any]],
        num_held_blocks: Callable[[str], int],
        caches_prefixes: bool,
    ) -> None:
        self._table = table
        self._matched = matched
        self._num_held_blocks = num_held_blocks
        self._caches_prefixes = caches_prefixes
        self._more: Counter[int] = Counter()
        """Holders by block id that the plan adds, or takes away."""

    def num_ready_blocks(self, request_id: str) -> int:
        held = self._num_held_blocks(request_id)
        if held or request_id not in self._matched:
            return held
        return sum(map(self._is_held, self._matched[request_id]))

    def num_blocks_to_load(self, request_id: str) -> int:  # noqa: ARG002  # vLLM loads none
        return 0

    def find(
        self,
        request_id: str,
        planned: Mapping[str, int],
        num_lent: int = 0,
    ) -> None:
        """Requests know what was cached before the plan."""

    def start(self, request_id: str) -> None:
        self._more.update(block.block_id for block in self._matched.get(request_id, ()))

    def leave(self, request_id: str) -> int:
        if not self._caches_prefixes:
            return self._num_held_blocks(request_id)
        blocks = self._table.get(request_id, ())
        self._more.subtract(block.block_id for block in blocks)
        return len(blocks) - sum(map(self._is_held, blocks))

    def _is_held(self, block: Any) -> bool:
        return bool(block.ref_cnt + self._more[block.block_id] > 0)
