"""vLLM V0's index of a prefix cache: of equal blocks one stays."""

from __future__ import annotations

from collections.abc import Sequence

from slosched.kv.prefix.hash_index import HashIndex
from slosched.kv.prefix.keys import Key


class MergedIndex(HashIndex):
    """A `HashIndex` in which blocks that are found equal become one.

    Two requests that compute the same at once have a block each while their steps run; then the
    later block is given back.  vLLM V0 does so when it plans, and lets both write into one block;
    slosched changes no table of a step that is yet to read it.

    Source: vLLM 0.6.3 `core/block/prefix_caching_block.py`.
    """

    merges = True

    def merge(self, keys: Sequence[Key], blocks: Sequence[int]) -> list[int]:
        return [
            block if key not in self._twins else self._merge(key, block)
            for key, block in zip(keys, blocks, strict=True)
        ]

    def _merge(self, key: Key, block: int) -> int:
        """Who holds `block` holds the oldest one from now on."""
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
