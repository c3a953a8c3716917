"""The groups of layers of a model, whose blocks vLLM takes from one pool.

Source: vLLM 0.32 `v1/core/single_type_kv_cache_manager.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager


class Growth(NamedTuple):
    """How a group of layers takes blocks as a context grows."""

    place: int
    """The place among vLLM's groups."""
    manager: Any
    """vLLM's manager of the group."""
    rows_per_block: int

    def most_blocks(self, num_tokens: int) -> int:
        """Return the blocks for so many tokens that one request holds at once, at most."""
        num_blocks = int(-(-num_tokens // self.manager.block_size))
        cap = self.manager.max_admission_blocks_per_request
        return num_blocks if cap is None else min(num_blocks, cap)

    def known(self, hit: Sequence[Any]) -> tuple[int, Sequence[Any]]:
        """Return how many blocks a cached prefix stands for, and those that it takes.

        Blocks that no token sees any more are not taken.
        """
        size = self.manager.block_size
        num_unseen = int(self.manager.get_num_skipped_tokens(len(hit) * size)) // size
        return max(len(hit), num_unseen), hit[num_unseen:]


class Groups:
    """The groups of layers of one model, and what its requests hold in them.

    A policy counts in rows: one block of each group that grows with the context.  Where blocks are
    of different sizes, a row is as long as the smallest ones, so that the others count for more
    than they take.  A group whose state has one size (Mamba) takes its blocks as a request starts.
    """

    def __init__(self, manager: Any) -> None:
        """Read from vLLM's `KVCacheManager`."""
        managers = manager.coordinator.single_type_managers
        self._manager = manager
        self.block_size = min(int(each.block_size) for each in managers)
        """The tokens of a row."""
        self.max_model_len = int(manager.max_model_len)
        self.growing: list[Growth] = []
        self.num_fixed_blocks = 0
        """The blocks that a request takes at its start, in groups that do not grow."""
        for place, each in enumerate(managers):
            if self.block_size < each.block_size >= self.max_model_len:
                self.num_fixed_blocks += 1 + int(getattr(each, "num_speculative_blocks", 0))
            else:
                self.growing.append(Growth(place, each, each.block_size // self.block_size))
        self.tables = [each.req_to_blocks for each in managers]
        self._rows = [g.manager.req_to_blocks for g in self.growing if g.rows_per_block == 1]
        self._has_windows = any(type(each) is not FullAttentionManager for each in managers)

    @property
    def are_plain(self) -> bool:
        """Tell whether there is one group alone, of full attention."""
        return len(self.tables) == 1 and not self._has_windows

    @property
    def num_blocks_per_row(self) -> int:
        return len(self.growing)

    def num_rows(self, request_id: str) -> int:
        """Return how many rows the request has begun; of the first ones it may hold only a part."""
        if len(self._rows) == 1:
            return len(self._rows[0].get(request_id, ()))
        return max(len(table.get(request_id, ())) for table in self._rows)

    def held(self, request_id: str) -> list[Any]:
        """Return vLLM's blocks that the request holds, of all groups.

        The null block stands in a table where a block was given back.
        """
        tables = (table.get(request_id, ()) for table in self.tables)
        return [block for table in tables for block in table if not block.is_null]

    def drop_unseen(self, running: Iterable[Any]) -> None:
        """Free the blocks of vLLM's `running` requests that no token sees any more.

        vLLM frees a request's own as it serves it, which is too late for a plan to count on them.
        """
        if not self._has_windows:
            return
        for theirs in running:
            num_processed = max(0, theirs.num_computed_tokens - theirs.num_in_flight_tokens)
            self._manager.remove_skipped_blocks(
                theirs.request_id, num_processed, theirs.num_prompt_tokens
            )
