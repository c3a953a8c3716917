"""Tail-optimized LRU: first goes what the next turn can compute again within its TTFT."""

from __future__ import annotations

from slosched.kv.eviction.lines import Line
from slosched.kv.eviction.order import EvictionOrder, Known, Rank

_SPARE_TOKENS = 8192
"""Tokens that a turn may compute before its first token, its own new ones included."""
_NEW_TOKENS = 3000
"""New tokens that a turn is expected to have."""


class TailLRU(EvictionOrder):
    """Evicts, least recently used first, the tails that no turn misses; then all as LRU does.

    A turn that may compute 8,192 tokens in its TTFT and has 3,000 new ones of its own can do
    without the last 5,192 cached ones.  Both numbers are constants here.

    Source: Tail-Optimized LRU (arXiv 2510.15152), of which the abstract and the input of its
    algorithm were read.  It estimates the length of the next turn; its authors report little gain
    from better estimates.
    """

    def __init__(self, known: Known) -> None:
        """Begin with the number of blocks that are spared."""
        self._num_spared = (_SPARE_TOKENS - _NEW_TOKENS) // known.block_size

    def rank(self, line: Line, now_s: float) -> Rank:  # noqa: ARG002
        needed_to = max(line.start, line.stop - self._num_spared)
        if line.cached_to > needed_to:
            return Rank((0.0, float(line.left_number)), down_to=needed_to)
        return Rank((1.0, float(line.left_number)))
