"""The effects of a plan on vLLM's free blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from slosched.kv.ledger import FoundBefore

Table = Mapping[str, Sequence[Any]]
"""vLLM's blocks by request, in one group of layers."""
Matched = Mapping[str, Sequence[Any]]
"""vLLM's cached blocks that a waiting request could use, from its first group."""


class VLLMLedger(FoundBefore):
    """A `core.BlockLedger` for which requests find what was cached before the plan.

    vLLM counts a cached block without a holder as free, so using it takes one of the free blocks.
    """

    def __init__(self, table: Table, matched: Matched, *, caches_prefixes: bool) -> None:
        self._table = table
        self._matched = matched
        self._caches_prefixes = caches_prefixes
        self._more: Counter[int] = Counter()
        """The change in holders that the plan makes, by block id."""

    def num_ready_blocks(self, request_id: str) -> int:
        held = len(self._table.get(request_id, ()))
        return held or sum(map(self._is_held, self._found_by(request_id)))

    def start(self, request_id: str) -> None:
        if found := self._found_by(request_id):
            self._more.update(block.block_id for block in found)

    def leave(self, request_id: str) -> int:
        blocks = self._table.get(request_id, ())
        if not self._caches_prefixes:
            return len(blocks)
        self._more.subtract(block.block_id for block in blocks)
        return len(blocks) - sum(map(self._is_held, blocks))

    def _found_by(self, request_id: str) -> Sequence[Any]:
        """Return the cached blocks that a waiting request takes when it starts."""
        return self._matched.get(request_id, ())

    def _is_held(self, block: Any) -> bool:
        return bool(block.ref_cnt + self._more[block.block_id] > 0)
