"""SGLang's PrefillAdder: how many prompt tokens one step may take up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto

from slosched.batch import BatchBuilder
from slosched.core import Request, RequestStatus, SchedulerView

CLIP_MAX_NEW_TOKENS = 4096
"""No request is believed to emit more (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION)."""


class AddResult(Enum):
    """Whether the next request may be tried."""

    CONTINUE = auto()
    NO_TOKEN = auto()
    """The KV cache is full, or will be when those admitted go on."""
    OTHER = auto()
    """The step is full."""


def num_known_outputs(request: Request) -> int:
    """Output tokens that have come out; one of a step that still runs has not."""
    return request.num_output_tokens - request.num_output_placeholders


def num_new_tokens_left(request: Request) -> int:
    """Output tokens that it is believed to emit from now on, at most."""
    num_left = request.max_tokens - request.num_output_tokens + request.num_output_placeholders
    return min(num_left, CLIP_MAX_NEW_TOKENS)


def num_promised(request: Request) -> int:
    """Output tokens for which there is to be room when it is admitted."""
    return min(request.max_tokens, CLIP_MAX_NEW_TOKENS)


class PrefillAdder:
    """Three budgets: KV tokens (those that decodes will want included), input tokens, a chunk's.

    SGLang counts in KV tokens, free and evictable alike, and books what it admits in an offset;
    here the `BatchBuilder` knows the free blocks, and the offset is the rest.
    """

    def __init__(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        running: Sequence[Request],
        *,
        new_token_ratio: float,
        max_prefill_tokens: int,
        chunk_tokens: int,
        num_mixed: int,
    ) -> None:
        """`num_mixed` decodes are to be in the same step."""
        self._batch = batch
        self._page_size = view.kv.block_size
        self._ratio = new_token_ratio
        self._num_free = batch.num_free_blocks * self._page_size
        """KV tokens that were free before this step, less those that it has locked."""
        wanted = sum(num_new_tokens_left(r) * new_token_ratio for r in running)
        self._total_offset = num_mixed + wanted
        self._current_offset = num_mixed
        self._input_left = max_prefill_tokens - num_mixed
        self.chunk_left = chunk_tokens - num_mixed
        """Tokens that this step may still take up."""
        self._has_tiny_chunks = chunk_tokens < self._page_size
        """Smaller than a page, which SGLang forbids: a prompt would never come to an end."""
        self._goes_on_cut = False
        """Whether the prompt that was cut before will be so after this step: only one may be."""
        self.admitted: list[Request] = []
        self.new_chunked: Request | None = None
        """One whose prompt was cut in this step."""

    @property
    def _total_left(self) -> float:
        """KV tokens for which nobody running has a claim."""
        return self._num_free - self._total_offset

    def add_chunked(self, request: Request, limit: int | None = None) -> bool:
        """Go on with the prompt that was cut, by `limit` at most; True if all of it is computed.

        SGLang breaks if there is no room; here it waits.
        """
        want = request.num_uncomputed_tokens
        n = min(want, self.chunk_left, int(self._total_left))
        n = n if limit is None else min(n, limit)
        if n > 0 and self._admit(request, n):
            self._charge(n, 0 if n < want else num_promised(request))
        self._goes_on_cut = n < want
        return not self._goes_on_cut

    def add(self, request: Request) -> AddResult:
        """Admit a waiting request, the first of them even if it is too long for the step."""
        n = request.num_uncomputed_tokens
        total = n + max(num_new_tokens_left(request), 0)
        if total >= self._total_left:
            return AddResult.NO_TOKEN
        if self._pages(n) >= self._input_left and self.admitted:
            return AddResult.OTHER
        if total >= self._total_left - self._num_locked_by(request, n):
            return AddResult.NO_TOKEN
        num_outputs = num_promised(request)
        if is_cut := self._pages(n) > self.chunk_left and n > (cut := self._cut()):
            n, num_outputs = cut, 0
            if n <= 0 or self._goes_on_cut:
                return AddResult.OTHER
        if not self._admit(request, n):
            return AddResult.NO_TOKEN
        if is_cut:
            self.new_chunked = request
        self._charge(n, num_outputs)
        return self._state()

    def would_hold(self, num_tokens: int, victims: Sequence[Request]) -> bool:
        """Whether so many KV tokens are there once the claims of some `victims` fall away.

        The blocks that these hold are not counted.
        """
        wanted = num_tokens - self._total_left
        for victim in victims:
            wanted -= self._claim_of(victim)
        return bool(victims) and wanted <= 0

    def release(self, victims: Sequence[Request], incoming: Request) -> None:
        """Preempt running requests for `incoming`.

        As in SGLang 0.5.5 the claim that falls away is that of `incoming`, once for each victim.
        """
        for victim in victims:
            before = self._batch.num_free_blocks
            self._batch.preempt(victim)
            self._num_free += (self._batch.num_free_blocks - before) * self._page_size
            self._total_offset -= self._claim_of(incoming)

    def _claim_of(self, request: Request) -> float:
        """KV tokens that it is expected to want when it runs."""
        return num_new_tokens_left(request) * self._ratio

    def _cut(self) -> int:
        """Whole pages of a prompt that is longer than what is left of the chunk."""
        if self._has_tiny_chunks and not self.admitted:
            return self.chunk_left
        return self.chunk_left - self.chunk_left % self._page_size

    def _admit(self, request: Request, n: int) -> bool:
        num_locked = self._num_locked_by(request, n)
        if self._batch.add(request, n, min_new_tokens=n) < n:
            return False
        self._num_free -= num_locked
        self.admitted.append(request)
        return True

    def _charge(self, num_tokens: int, num_outputs: int) -> None:
        num_tokens = self._pages(num_tokens)
        self._total_offset += num_tokens + num_outputs
        self._current_offset += num_tokens
        self._input_left -= num_tokens
        self.chunk_left -= num_tokens

    def _state(self) -> AddResult:
        if self._total_left <= 0 or self._num_free - self._current_offset <= 0:
            return AddResult.NO_TOKEN
        if self._input_left <= 0 or self.chunk_left <= 0:
            return AddResult.OTHER
        return AddResult.CONTINUE

    def _num_locked_by(self, request: Request, n: int) -> int:
        """Tokens of what it has computed, or finds cached, whose blocks are free until then."""
        if request.status is RequestStatus.RUNNING or not request.num_computed_tokens:
            return 0
        missing = self._batch.blocks_missing(request, n) * self._page_size
        return max(0, missing - self._pages(n))

    def _pages(self, num_tokens: int) -> int:
        """Tokens of the pages that so many need."""
        return math.ceil(num_tokens / self._page_size) * self._page_size
