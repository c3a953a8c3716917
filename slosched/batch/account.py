"""The account of a step in the making: what its limits leave, and what an addition would take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from slosched.core import (
    BatchShape,
    DecodeGroup,
    EndReason,
    PreemptionMode,
    Request,
    RequestStatus,
    SchedulerView,
    group_shape,
)

# A look at an enum's member takes 0.1 µs in Python 3.11, and hundreds are asked in a step.
WAITING, RUNNING = RequestStatus.WAITING, RequestStatus.RUNNING
SWAPPED = RequestStatus.SWAPPED


class StepAccount:
    """What is left of a step's tokens, seats, KV blocks, swap traffic, LoRA slots and time.

    Only the builder changes it; `find` notes what it has found.  Every question is O(1) unless it
    says otherwise.
    """

    __slots__ = (
        "_block_size",
        "_found",
        "_idle_seqs",
        "_ledger",
        "_loras",
        "_num_lent",
        "_num_ready_blocks",
        "_num_watermark_blocks",
        "_out",
        "_predict",
        "_view",
        "has_reserve",
        "is_at_leisure",
        "max_chunk_tokens",
        "num_free_blocks",
        "num_free_host_blocks",
        "num_free_seqs",
        "num_free_swap_blocks",
        "num_free_tokens",
        "num_scheduled_tokens",
        "preempted",
        "rejected",
        "rejected_waiting",
        "shape",
        "swapped_in",
        "swapped_out",
        "time_limit_s",
    )

    def __init__(
        self,
        view: SchedulerView,
        *,
        beside: DecodeGroup | None = None,
        token_budget: int | None = None,
        time_limit_s: float = math.inf,
        cautious: bool = False,
    ) -> None:
        """Begin a step that also serves the decodes `beside`, if given.

        `cautious` predicts the time that a step hardly ever exceeds, not the expected one.
        """
        limits = view.limits
        self._view = view
        model = view.latency_model
        self._predict: Callable[[BatchShape], float] | None = None
        if model is not None:
            self._predict = model.predict_upper if cautious else model.predict
        self._block_size = view.kv.block_size
        self._ledger = view.kv.ledger()
        self._num_ready_blocks = self._ledger.num_ready_blocks
        self._loras: set[str] = set()
        self._out: set[str] = set()
        self._found: dict[str, int] = {}
        """Cached tokens by waiting request for which `find` was called."""
        self._num_lent = 0 if beside is None else beside.num_new_blocks
        self.is_at_leisure = False
        """What the plan says of itself (`SchedulerOutput.is_at_leisure`); the policy sets it."""
        self.has_reserve = False
        """`SchedulerOutput.has_reserve`; the policy sets it."""
        self.num_free_tokens = limits.max_num_batched_tokens
        if token_budget is not None:
            self.num_free_tokens = min(self.num_free_tokens, token_budget)
        self.max_chunk_tokens = limits.max_chunk_tokens or limits.max_num_batched_tokens
        """The most tokens of one request; `add` grants no more."""
        self._num_watermark_blocks = limits.num_watermark_blocks
        self._idle_seqs = limits.max_num_seqs if not view.num_finishing else None
        """The free seats if no request runs; None if one runs that is not in view."""
        self.num_free_seqs = limits.max_num_seqs - len(view.running)
        self.num_free_blocks = view.kv.num_free_blocks
        self.num_free_host_blocks = view.kv.num_free_host_blocks
        self.num_free_swap_blocks: float = (
            math.inf if limits.max_num_swapped_blocks is None else limits.max_num_swapped_blocks
        )
        self.time_limit_s = time_limit_s
        """Limit below which the predicted time of the step stays, strictly."""
        self.shape = BatchShape() if beside is None else group_shape(beside)
        if beside is not None:
            self.num_free_tokens -= beside.num_decodes
            self.num_free_seqs -= beside.num_decodes
            self.num_free_blocks -= beside.num_new_blocks
        self.num_scheduled_tokens: dict[str, int] = {}
        self.preempted: list[str] = []
        self.swapped_out: list[str] = []
        self.swapped_in: list[str] = []
        self.rejected: dict[str, EndReason] = {}
        self.rejected_waiting: set[str] = set()
        """Those of them that wait; the others run or are swapped out."""

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self.num_scheduled_tokens

    def has_left(self, request: Request) -> bool:
        """Tell whether this step preempts, swaps out or rejects the request."""
        return request.request_id in self._out

    def has_lora_slot(self, request: Request) -> bool:
        """Tell whether the request needs no adapter, or one for which this step has room."""
        lora_id, max_loras = request.lora_id, self._view.limits.max_loras
        if lora_id is None or max_loras is None or lora_id in self._loras:
            return True
        return len(self._loras) < max_loras

    @property
    def predicted_s(self) -> float | None:
        """Return the predicted time of the step so far; None without a latency model."""
        return None if self._predict is None else self._predict(self.shape)

    def predict_with_rest_of(self, request: Request) -> float:
        """Return the predicted time of the step with all that is left of `request`; add nothing."""
        prior = self._num_prior_tokens(request)
        return self.predict_with(request.num_tokens - prior, prior)

    def predict_with(self, num_new_tokens: int, num_prior_tokens: int) -> float:
        """Return the predicted time of the step with one chunk more; nothing is added.

        The chunk computes `num_new_tokens` on top of `num_prior_tokens`.
        """
        predict = self._predict or self._view.model.predict  # without a model this raises
        shape = self.shape
        sums = shape.sums
        shape.add(num_new_tokens, num_prior_tokens)
        predicted_s = predict(shape)
        shape.restore(sums)
        return predicted_s

    def predict_with_decodes(self, contexts: Sequence[int]) -> float:
        """Return the predicted time of the step with more decodes; nothing is added.

        Their context lengths include the token that each computes.  O(n).
        """
        predict = self._predict or self._view.model.predict
        shape = self.shape
        sums = shape.sums
        shape.add_decodes(contexts)
        predicted_s = predict(shape)
        shape.restore(sums)
        return predicted_s

    def find(self, request: Request) -> int:
        """Return the uncomputed tokens of a waiting request that starts next in this step.

        Use it for each request that starts from now on: what is cached of these may be evicted by
        requests before them in the step, and they find what the step computes for those.  From now
        on no request may be preempted or rejected.  O(log), and O(1) for each request that was
        added since the last call.
        """
        return self._find(request, self.num_scheduled_tokens)

    def _find(self, request: Request, planned: Mapping[str, int]) -> int:
        """Return the uncomputed tokens of `request` if it starts after the tokens `planned`."""
        found = self._ledger.find(request.request_id, planned, self._num_lent)
        if found is None:
            return request.num_uncomputed_tokens
        self._found[request.request_id] = found
        return request.num_tokens - found

    def _num_prior_tokens(self, request: Request) -> int:
        if not self._found:
            return request.num_computed_tokens
        return self._found.get(request.request_id, request.num_computed_tokens)

    def blocks_missing(self, request: Request, num_new_tokens: int) -> int:
        """Return the free device blocks that computing `num_new_tokens` more would take."""
        tokens = self._num_prior_tokens(request) + num_new_tokens
        return -(-tokens // self._block_size) - self._num_ready_blocks(request.request_id)

    def blocks_missing_at_most(self, request: Request) -> int:
        """Return the free device blocks that computing all known tokens takes at one time.

        `request` does not run yet.
        """
        prior, num_tokens = self._num_prior_tokens(request), request.num_tokens
        num_spared = self._ledger.num_spared_blocks(request.request_id, num_tokens)
        return self.blocks_missing(request, num_tokens - prior) - num_spared

    def largest_chunk(self, request: Request, min_new_tokens: int = 1) -> int:
        """Return how many tokens of `request` time and tokens would allow now; add nothing."""
        n = self._tokens_wanted(request, None)
        if n <= 0 or self.time_limit_s == math.inf:
            return max(n, 0)
        return self._fit_time(request, n, min(n, min_new_tokens))

    def fits_whole(self, request: Request, reserved_blocks: int = 0) -> bool:
        """Tell whether the free blocks hold all known tokens of `request` and the reserved ones."""
        kept_free = reserved_blocks + self.blocks_kept_free(request)
        return self.blocks_missing_at_most(request) <= self.num_free_blocks - kept_free

    def blocks_kept_free(self, request: Request) -> int:
        """Return the free blocks that `request` leaves to others if it starts now: the watermark.

        There is none for a request that runs already, or while no request runs.
        """
        if request.status is RUNNING or self.num_free_seqs == self._idle_seqs:
            return 0
        return self._num_watermark_blocks

    def blocks_promised(self, requests: Iterable[Request]) -> int:
        """Return the blocks that running `requests` need to finish begun prompts.  O(n)."""
        promised, size = 0, self._block_size
        for request in requests:
            request_id, computed = request.request_id, request.num_computed_tokens
            known = request.num_prompt_tokens + request.num_output_tokens
            if known - computed > 1 and request_id not in self._out:
                computed += self.num_scheduled_tokens.get(request_id, 0)
                has = max(self._num_ready_blocks(request_id), -(-computed // size))
                promised += -(-known // size) - has
        return promised

    def would_swap_out(self, request: Request, mode: PreemptionMode | None = None) -> bool:
        """Tell whether `preempt` would keep what the request has computed."""
        held = self._view.kv.num_held_blocks(request.request_id)
        return (
            (mode or self._view.limits.preemption_mode) is PreemptionMode.SWAP
            and held <= self.num_free_host_blocks
            and held <= self.num_free_swap_blocks
        )

    def _tokens_wanted(self, request: Request, max_new_tokens: int | None) -> int:
        n = request.num_prompt_tokens + request.num_output_tokens - self._num_prior_tokens(request)
        if max_new_tokens is not None and max_new_tokens < n:
            n = max_new_tokens
        if n > self.num_free_tokens:
            n = self.num_free_tokens
        if n > self.max_chunk_tokens:
            n = self.max_chunk_tokens
        request_id = request.request_id
        if request_id in self.num_scheduled_tokens or request_id in self._out:
            return 0
        return n

    def _may_run(self, request: Request) -> bool:
        if request.lora_id is not None and not self.has_lora_slot(request):
            return False
        if request.status is RUNNING:
            return True
        if self.num_free_seqs <= 0:
            return False
        if request.status is WAITING:
            return True
        return self._host_blocks(request) <= self.num_free_swap_blocks

    def _host_blocks(self, request: Request) -> int:
        """Return the blocks to copy back from the host before `request` can run."""
        if request.status is WAITING:
            return self._ledger.num_blocks_to_load(request.request_id)
        if request.status is RUNNING:
            return 0
        return self._view.kv.num_held_host_blocks(request.request_id)

    def _tokens_beyond(self, request: Request, n: int, num_blocks: int) -> int:
        """Return how many of the `n` tokens are in the last `num_blocks` that they need."""
        block_size = self._view.kv.block_size
        last = (self._num_prior_tokens(request) + n) % block_size or block_size
        return min(n, (num_blocks - 1) * block_size + last)

    def _fit_time(self, request: Request, n: int, least: int) -> int:
        """Return the largest chunk of `least` to `n` tokens below the time limit, or 0.

        One prediction if it fits as a whole, two if nothing does, O(log n) if it must be cut.
        """
        if n < least:
            return 0
        prior = self._num_prior_tokens(request)
        host_blocks = self._host_blocks(request)
        self.shape.num_swapped_blocks += host_blocks
        try:
            return self._largest_chunk(prior, n, least)
        finally:
            self.shape.num_swapped_blocks -= host_blocks

    def _largest_chunk(self, num_prior_tokens: int, most: int, least: int) -> int:
        if self.predict_with(most, num_prior_tokens) < self.time_limit_s:
            return most
        if self.predict_with(least, num_prior_tokens) >= self.time_limit_s:
            return 0
        return largest_that_fits(
            lambda n: self.predict_with(n, num_prior_tokens) < self.time_limit_s, least, most
        )


def largest_that_fits(fits: Callable[[int], bool], least: int, too_many: int) -> int:
    """Return the largest number that fits, found by bisection in O(log n) questions.

    `least` is taken to fit and `too_many` not to; neither is asked about.
    """
    while too_many - least > 1:
        middle = (least + too_many) // 2
        if fits(middle):
            least = middle
        else:
            too_many = middle
    return least
