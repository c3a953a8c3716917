"""The effects of a plan on vLLM's free blocks where a model has several groups of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slosched.integrations.vllm.groups import Groups, Growth
from slosched.integrations.vllm.ledger import VLLMLedger

Hits = Mapping[str, Sequence[Sequence[Any]]]
"""vLLM's cached blocks that a waiting request could use, for each group."""


class GroupLedger(VLLMLedger):
    """A `VLLMLedger` in rows, of which a request may take or give back only a part.

    Free blocks that make no whole row are counted along, so that a request fits here exactly if it
    fits in vLLM.
    """

    def __init__(self, groups: Groups, hits: Hits, num_free_blocks: int, *, caches_prefixes: bool):
        """Prepare for one plan, before which `num_free_blocks` of vLLM's blocks are free."""
        super().__init__(groups.tables[0], {}, caches_prefixes=caches_prefixes)
        self._groups = groups
        self._hits = hits
        self._num_over = num_free_blocks % groups.num_blocks_per_row
        """The free blocks that make no whole row."""

    def num_ready_blocks(self, request_id: str) -> int:
        num_rows = self._groups.num_rows(request_id)
        return num_rows or self._rows_with(self._num_ready(request_id))

    def num_spared_blocks(self, request_id: str, num_tokens: int) -> int:
        num_tokens = min(num_tokens, self._groups.max_model_len)
        num_rows = -(-num_tokens // self._groups.block_size)
        num_spared = 0
        for growth, hit in self._found(request_id):
            num_known, _ = growth.known(hit)
            num_spared += num_rows - num_known * growth.rows_per_block
            num_spared -= max(0, growth.most_blocks(num_tokens) - num_known)
        num_ready = self._num_ready(request_id)
        return self._rows_with(num_ready + num_spared) - self._rows_with(num_ready)

    def start(self, request_id: str) -> None:
        self._book(self._num_ready(request_id))
        self._more.update(
            block.block_id
            for growth, hit in self._found(request_id)
            for block in growth.known(hit)[1]
            if not block.is_null
        )

    def leave(self, request_id: str) -> int:
        blocks = self._groups.held(request_id)
        self._more.subtract(block.block_id for block in blocks)
        return self._book(len(blocks) - sum(map(self._is_held, blocks)))

    def _found(self, request_id: str) -> list[tuple[Growth, Sequence[Any]]]:
        hits = self._hits.get(request_id)
        return [(g, () if hits is None else hits[g.place]) for g in self._groups.growing]

    def _num_ready(self, request_id: str) -> int:
        """Return how many blocks fewer than its rows a waiting request takes from the free ones."""
        num_ready = -self._groups.num_fixed_blocks
        for growth, hit in self._found(request_id):
            num_known, taken = growth.known(hit)
            num_ready += num_known * growth.rows_per_block
            num_ready -= sum(not (block.is_null or self._is_held(block)) for block in taken)
        return num_ready

    def _rows_with(self, num_blocks: int) -> int:
        """Return the whole rows in `num_blocks` and the free blocks that make none."""
        return (self._num_over + num_blocks) // self._groups.num_blocks_per_row

    def _book(self, num_blocks: int) -> int:
        """Count `num_blocks` as free; return the whole rows that this makes."""
        num_rows = self._rows_with(num_blocks)
        self._num_over += num_blocks - num_rows * self._groups.num_blocks_per_row
        return num_rows
