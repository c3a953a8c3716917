"""vLLM V0's index of a prefix cache: of equal blocks one stays."""

from __future__ import annotations

from collections.abc import Sequence

from slosched.kv.prefix.hash_index import HashIndex
from slosched.kv.prefix.keys import Key


class MergedIndex(HashIndex):
    """A `HashIndex` in which blocks that are found equal become one.

    Two requests that compute the same content at once have a block each while their steps run; then
    the later block is given back.  vLLM V0 merges them when it plans and lets both write into one
    block; slosched changes no table that a planned step is yet to read.

    Source: vLLM 0.6.3 `core/block/prefix_caching_block.py`.
    """

    def merge(self, keys: Sequence[Key], blocks: Sequence[int]) -> list[int]:
        """Return the blocks that a request holds from now on in place of its computed `blocks`.

        Blocks that differ are free and no longer in the index.
        """
        return [
            block if key not in self._twins else self._merge(key, block)
            for key, block in zip(keys, blocks, strict=True)
        ]

    def _merge(self, key: Key, block: int) -> int:
        """Let the request that holds `block` hold the oldest equal one, and return that."""
        twins = self._twins[key]
        oldest = next(iter(twins))
        if oldest != block:
            if not twins[oldest]:
                del self._evictable[oldest]
            twins[oldest] += 1
            twins[block] -= 1
            assert not twins[block], "only the oldest block is found, and held by several"
            self._drop(key, block)
        return oldest
