"""vLLM V1's rules: serving running requests, starting waiting ones, preempting any of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slosched.batch import BatchBuilder
from slosched.core import DecodeGroup, Request, SchedulerView


def admit(
    batch: BatchBuilder,
    view: SchedulerView,
    waiting: Iterable[Request],
    *,
    max_chunk_tokens: int | None = None,
    may_chunk: bool = True,
    must_fit_whole: bool = True,
    num_watermark_blocks: int = 0,
) -> list[str]:
    """Start waiting requests in order until one does not fit; return the ids of those passed over.

    A request is passed over if its LoRA adapter finds no slot.  The larger watermark, this one or
    that of the limits, is left free unless no request runs yet.  Takes O(1) for each request that
    is looked at.
    """
    passed_over: list[str] = []
    for request in waiting:
        if batch.num_free_tokens <= 0 or batch.num_free_seqs <= 0:
            break
        if not batch.has_lora_slot(request):
            passed_over.append(request.request_id)
            continue
        n = batch.find(request)
        if max_chunk_tokens is not None:
            n = min(n, max_chunk_tokens)
        # vLLM refuses a configuration in which a prompt is longer than any step, since it would
        # wait forever.
        whole = min(n, view.limits.max_num_batched_tokens)
        if not may_chunk and whole > batch.num_free_tokens:
            break
        n = min(n, batch.num_free_tokens)
        is_first = batch.num_free_seqs == view.limits.max_num_seqs
        left_free = 0 if is_first else num_watermark_blocks
        left_free = max(left_free, batch.blocks_kept_free(request))
        if must_fit_whole:
            missing = batch.blocks_missing_at_most(request)
        else:
            missing = batch.blocks_missing(request, n)
        if missing > batch.num_free_blocks - left_free:
            break
        batch.add(request, n)
    return passed_over


def add_begun_beside(
    batch: BatchBuilder,
    decodes: DecodeGroup,
    begun: Iterable[Request],
    max_chunk_tokens: int | None = None,
) -> bool:
    """Add running prompts; return False unless the decodes are oldest and blocks suffice."""
    if batch.num_free_tokens < 0 or not decodes.are_oldest:
        return False
    for request in begun:
        wanted = min(request.num_uncomputed_tokens, batch.num_free_tokens)
        if max_chunk_tokens is not None:
            wanted = min(wanted, max_chunk_tokens)
        if batch.add(request, wanted) < wanted:
            return False
    return True


def by_urgency(request: Request) -> tuple[int, float]:
    """Return what requests are sorted by, the most urgent first: priority, then arrival."""
    return request.priority, request.arrival_s


def in_order(waiting: Iterable[Request], key: Callable[[Request], Any]) -> Iterator[Request]:
    """Yield the request with the smallest key first; of equals, the first in the queue.

    Takes O(n) at first, and O(log n) for each request.
    """
    heap = [(key(request), place, request) for place, request in enumerate(waiting)]
    heapq.heapify(heap)
    while heap:
        yield heapq.heappop(heap)[-1]


def add_running_choosing(
    batch: BatchBuilder,
    view: SchedulerView,
    requests: Iterable[Request],
    key: Callable[[Request], Any],
    max_chunk_tokens: int | None = None,
) -> None:
    """Add running `requests` in order; when blocks run out, preempt whose `key` is largest of all.

    Of equals, the first admitted is preempted.  The victim may already have its part in this step,
    whose tokens and blocks then become free again.  So everything is decided before anything is
    added to the batch.  A request that is its own victim ends the step's list.
    """
    plan = _Plan(view, key)
    for request in requests:
        if not plan.num_free_tokens or not plan.add(request, max_chunk_tokens):
            break
    for victim in plan.victims:
        batch.preempt(victim)
    for request, n in plan.granted.values():
        batch.add(request, n)


class _Plan:
    """The tokens of running requests, while others may still be preempted."""

    def __init__(self, view: SchedulerView, key: Callable[[Request], Any]) -> None:
        self.num_free_tokens = view.limits.max_num_batched_tokens
        self.granted: dict[str, tuple[Request, int]] = {}
        self.victims: list[Request] = []
        self._running = view.running
        self._key = key
        self._dear_to_cheap: list[Request] | None = None
        self._num_free_blocks = view.kv.num_free_blocks
        self._block_size = view.kv.block_size
        self._ledger = view.kv.ledger()
        self._taken: dict[str, int] = {}
        """New blocks, by request that got any."""

    def add(self, request: Request, max_chunk_tokens: int | None) -> bool:
        """Return False if `request` itself was preempted; then no request behind it is served."""
        n = min(request.num_uncomputed_tokens, self.num_free_tokens)
        if max_chunk_tokens is not None:
            n = min(n, max_chunk_tokens)
        if request in self.victims:
            return True
        missing = -(-(request.num_computed_tokens + n) // self._block_size)
        missing -= self._ledger.num_ready_blocks(request.request_id)
        while missing > self._num_free_blocks:
            if self._preempt() is request:
                return False
        if missing > 0:
            self._taken[request.request_id] = missing
            self._num_free_blocks -= missing
        self.granted[request.request_id] = request, n
        self.num_free_tokens -= n
        return True

    def _preempt(self) -> Request:
        if self._dear_to_cheap is None:
            self._dear_to_cheap = list(self._running)
            self._dear_to_cheap.reverse()  # the last goes first: of equals, the first admitted
            self._dear_to_cheap.sort(key=self._key)
        victim = self._dear_to_cheap.pop()
        name = victim.request_id
        self.victims.append(victim)
        self._num_free_blocks += self._ledger.leave(name) + self._taken.pop(name, 0)
        _, n = self.granted.pop(name, (victim, 0))
        self.num_free_tokens += n
        return victim
