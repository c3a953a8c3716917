"""Adding prompts to a step until one of them has to be cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from slosched.batch import BatchBuilder
from slosched.core import Request, RequestStatus

_RUNNING = RequestStatus.RUNNING
"""A local name, because each attribute look-up on an enum takes 0.1 µs in Python 3.11."""


class PromptPack:
    """The prompts of one step: whole ones, then at most one that is cut.

    A step that finishes a prompt ends before that prompt is due, and the prompt that is cut ends
    with a whole tile.
    """

    tile_tokens: ClassVar[int] = 64
    """Rows of a matrix kernel's tile: a chunk that fills a part of one takes the time of all."""

    def __init__(self, batch: BatchBuilder, now_s: float, begun: Iterable[Request]) -> None:
        """Pack into `batch`; `begun` are the prompts that hold KV blocks and will need more."""
        self.batch, self.now_s = batch, now_s
        begun = tuple(begun)
        self._has_begun = bool(begun)
        self.reserved_blocks = batch.blocks_promised(begun)
        """KV blocks that prompts which start in this step may not take."""
        self._is_blocked = False
        self._is_full = False

    @property
    def num_free_blocks(self) -> int:
        """Return the free KV blocks that nobody has been promised."""
        return self.batch.num_free_blocks - self.reserved_blocks

    def add(self, prompts: Iterable[Request]) -> bool:
        """Add `prompts` in their order; return False once the step is full.

        The first waiting prompt that does not fit into the KV cache keeps out those after it.
        """
        if self.batch.num_free_seqs <= 0:  # Hundreds may wait for a seat: do not look at them.
            prompts = [r for r in prompts if r.status is _RUNNING] if self._has_begun else ()
        for request in prompts:
            if self._is_full or self.batch.num_free_tokens <= 0:
                return False
            if self._has_room(request):
                self._is_full = not self.add_chunk(request)
        return not self._is_full

    def add_chunk(self, request: Request) -> bool:
        """Add as much of `request` as fits into the step; return False if the step had to cut it.

        A chunk that only the limit of one request cuts leaves room for other requests.
        """
        batch = self.batch
        n = batch.largest_chunk(request)
        if n < min(request.num_uncomputed_tokens, batch.max_chunk_tokens):
            beyond = (batch.shape.num_tokens + n) % self.tile_tokens
            batch.add(request, n - beyond if n > beyond else n)
            return False
        is_granted = batch.add(request) > 0  # not without a LoRA slot
        if is_granted or request.status is _RUNNING:
            self.reserved_blocks += batch.blocks_promised((request,))
        if not is_granted:
            return True
        slack_s, predicted_s = request.deadline_s - self.now_s, batch.predicted_s
        if predicted_s is not None and predicted_s < slack_s < batch.time_limit_s:
            batch.time_limit_s = slack_s
        return True

    def _has_room(self, request: Request) -> bool:
        """Tell whether `request` may have a chunk: it has begun, or a seat and KV blocks are free.

        A prompt that has begun gives back the blocks that were reserved for it.
        """
        batch = self.batch
        if request.status is _RUNNING:
            self.reserved_blocks -= batch.blocks_promised((request,))
            return True
        if self._is_blocked or batch.num_free_seqs <= 0:
            return False
        self._is_blocked = not batch.fits_whole(request, self.reserved_blocks)
        return not self._is_blocked
