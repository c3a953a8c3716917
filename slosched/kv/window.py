"""Sliding windows: the first blocks of a request that no token sees any more are given back."""

from __future__ import annotations

from collections.abc import Mapping

from slosched.core import BlockLedger
from slosched.kv.ledger import HoldsAll


def num_unseen_blocks(num_prior_tokens: int, window_tokens: int, block_size: int) -> int:
    """Return how many first blocks no token sees after `num_prior_tokens` tokens of its context.

    A token sees the last `window_tokens` tokens, itself included, so that the next token and all
    after it see nothing before position `num_prior_tokens` - `window_tokens` + 1.
    """
    return max(0, num_prior_tokens - window_tokens + 1) // block_size


class WindowedLedger(HoldsAll):
    """A `core.BlockLedger` of requests that have given back their first blocks.

    The blocks that were given back need not be taken again for what is computed later.
    """

    def __init__(
        self, ledger: BlockLedger, tables: Mapping[str, list[int]], dropped: Mapping[str, int]
    ) -> None:
        """Go by the tables on the device and the number of dropped blocks of each request.

        `ledger` counts the entries of a table, whether their blocks were dropped or not.
        """
        self._ledger = ledger
        self._tables = tables
        self._dropped = dropped
        self.num_blocks_to_load = ledger.num_blocks_to_load
        self.find = ledger.find
        self.start = ledger.start

    def num_ready_blocks(self, request_id: str) -> int:
        if request_id not in self._tables and request_id in self._dropped:  # it is swapped out
            return self._dropped[request_id]
        return self._ledger.num_ready_blocks(request_id)

    def leave(self, request_id: str) -> int:
        return self._ledger.leave(request_id) - self._dropped.get(request_id, 0)
