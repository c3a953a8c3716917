"""SGLang's PrefillAdder, which decides how many prompt tokens one step computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto

from slosched.batch import BatchBuilder
from slosched.core import Request, RequestStatus, SchedulerView

CLIP_MAX_NEW_TOKENS = 4096
"""The largest output that is expected of a request (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION)."""


class AddResult(Enum):
    """The outcome of an attempt to admit a request, which tells whether to try the next one."""

    CONTINUE = auto()
    NO_TOKEN = auto()
    """The KV cache is full, or will be when the admitted requests go on."""
    OTHER = auto()
    """The step is full."""


def num_known_outputs(request: Request) -> int:
    """Return the output tokens that have come out, without those of a step that still runs."""
    return request.num_output_tokens - request.num_output_placeholders


def num_new_tokens_left(request: Request) -> int:
    """Return the most output tokens that the request is expected to emit from now on."""
    num_left = request.max_tokens - request.num_output_tokens + request.num_output_placeholders
    return min(num_left, CLIP_MAX_NEW_TOKENS)


def num_promised(request: Request) -> int:
    """Return the output tokens for which there must be room when the request is admitted."""
    return min(request.max_tokens, CLIP_MAX_NEW_TOKENS)


class PrefillAdder:
    """Three budgets: KV tokens (including what decodes will want), input tokens, chunk tokens.

    SGLang counts free and evictable KV tokens together, and tracks what it admits in an offset.
    Here the `BatchBuilder` knows the free blocks, and the offset covers the rest.
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
        """Set up the budgets of a step that also runs `num_mixed` decodes."""
        self._batch = batch
        self._page_size = view.kv.block_size
        self._ratio = new_token_ratio
        self._num_free = batch.num_free_blocks * self._page_size
        """KV tokens that were free before this step, minus those that the step has locked."""
        wanted = sum(num_new_tokens_left(r) * new_token_ratio for r in running)
        self._total_offset = num_mixed + wanted
        self._current_offset = num_mixed
        self._input_left = max_prefill_tokens - num_mixed
        self.chunk_left = chunk_tokens - num_mixed
        """Tokens that this step may still compute."""
        self._has_tiny_chunks = chunk_tokens < self._page_size
        """True if chunks are smaller than a page; SGLang forbids it, as no prompt would be
        finished."""
        self._goes_on_cut = False
        """True if the prompt that was cut before stays cut after this step; only one may be cut."""
        self.admitted: list[Request] = []
        self.new_chunked: Request | None = None
        """The request whose prompt was cut in this step, if any."""

    @property
    def _total_left(self) -> float:
        """Return the KV tokens that no running request is expected to want."""
        return self._num_free - self._total_offset

    def add_chunked(self, request: Request, limit: int | None = None) -> bool:
        """Continue the cut prompt, with `limit` tokens at most; tell whether it is complete now.

        SGLang fails if there is no room; here the prompt waits.
        """
        want = request.num_uncomputed_tokens
        n = min(want, self.chunk_left, int(self._total_left))
        n = n if limit is None else min(n, limit)
        if n > 0 and self._admit(request, n):
            self._charge(n, 0 if n < want else num_promised(request))
        self._goes_on_cut = n < want
        return not self._goes_on_cut

    def add(self, request: Request) -> AddResult:
        """Try to admit a waiting request; the first one may be too long for the step."""
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
        """Tell whether `num_tokens` KV tokens are free without what running `victims` would want.

        The blocks that the victims hold are not counted.  False without victims.
        """
        wanted = num_tokens - self._total_left
        for victim in victims:
            wanted -= self._claim_of(victim)
        return bool(victims) and wanted <= 0

    def release(self, victims: Sequence[Request], incoming: Request) -> None:
        """Preempt running requests for `incoming`.

        As in SGLang 0.5.5, the expected KV tokens of `incoming` are subtracted once per victim,
        instead of each victim's own.
        """
        for victim in victims:
            before = self._batch.num_free_blocks
            self._batch.preempt(victim)
            self._num_free += (self._batch.num_free_blocks - before) * self._page_size
            self._total_offset -= self._claim_of(incoming)

    def _claim_of(self, request: Request) -> float:
        """Return the KV tokens that the request is expected to want when it runs."""
        return num_new_tokens_left(request) * self._ratio

    def _cut(self) -> int:
        """Return the tokens of the whole pages left in the chunk, for a prompt that is longer."""
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
        """Return the request's computed or cached tokens whose blocks are free until it starts."""
        if request.status is RequestStatus.RUNNING or not request.num_computed_tokens:
            return 0
        missing = self._batch.blocks_missing(request, n) * self._page_size
        return max(0, missing - self._pages(n))

    def _pages(self, num_tokens: int) -> int:
        """Return `num_tokens` rounded up to whole pages."""
        return math.ceil(num_tokens / self._page_size) * self._page_size
