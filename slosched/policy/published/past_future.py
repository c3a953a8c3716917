"""Past-Future: a request starts only if the KV cache will hold all requests at its peak."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from slosched.batch import largest_that_fits
from slosched.core import DecodeGroup, Request, SchedulerOutput, SchedulerView, tunable
from slosched.policy.kit.checks import check_at_least, check_share
from slosched.policy.kit.lengths import Floats, OutputLengths
from slosched.policy.kit.wrapper import Gate, Wrapper

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
_MAX_ASKED = 64
"""Waiting requests that are looked at in one step; it bounds the cost of the step."""


@dataclass
class PastFuture(Wrapper):
    """Holds new requests back while the predicted peak of the KV cache would exceed it.

    1. The output length of a running request is drawn from recently finished requests that were
       longer than it is already, and that of a waiting request from all recently finished ones.
    2. The cache is fullest just before a request ends.  With requests sorted by the tokens left to
       emit, the most first, the peak is the maximum over k of left_k * k + tokens of the first k.
    3. Waiting requests are let through in their order while the peak, the largest of `num_draws`,
       is below the cache size minus `reserve`.  The first that is not holds up those behind it.

    No request is rejected.  The wrapper saves preemptions where the cache is small for the load,
    and it costs queueing where outputs are shorter than drawn.

    Source: Past-Future (ASPLOS '25, arXiv 2507.10150), in the form of its authors' LightLLM,
    `chunked_prefill/impl_past_future.py`: `history_output_len` → `OutputLengths`, `REVERSED` →
    `reserve`, `MAXIMUM_LISTS` → `num_draws`, `_calc_max_token_num_needed` → `peak_tokens`.

    Differences: draws are a golden-ratio sequence over the requests, which needs no seed and is
    more even than chance.  Before any request has finished, outputs are `prior_output_tokens` long
    where LightLLM begins with the longest allowed.  A request that is longer than the whole history
    is expected to end with the next token, where LightLLM draws up to its limit.  A cached prefix
    that several share counts for each of them, as in LightLLM (`Req.get_tuple_tokens`).

    Output lengths are those of the last 1,000 finished requests.
    """

    reserve: float = tunable(0.05, 0.0, 0.1, 0.2)
    """Share of the cache that is left free."""
    num_draws: int = tunable(5, 1)
    prior_output_tokens: int = 200
    """Expected output of a request before any has finished."""

    def __post_init__(self) -> None:
        check_share(reserve=self.reserve)
        check_at_least(1, num_draws=self.num_draws)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._lengths = OutputLengths(self.prior_output_tokens)

    def gate(self, view: SchedulerView) -> Gate:
        if not view.waiting:
            return Gate(view.waiting, {})
        self._lengths.update()
        there = (*view.running, *view.swapped)
        held = sum(r.num_tokens for r in there)
        if self._fits_surely(view, len(there), held):
            return Gate(view.waiting, {})
        waiting = self._fitting_now(view, held)
        return Gate(waiting[: self._num_through(view, there, waiting)], {})

    def gate_beside(self, decodes: DecodeGroup, view: SchedulerView) -> Gate | None:
        """Decide from sums; return None unless all fit even with outputs as long as the longest."""
        if not view.waiting:
            return Gate(view.waiting, {})
        self._lengths.update()
        held = decodes.context_tokens + sum(r.num_tokens for r in view.running)
        if self._fits_surely(view, decodes.num_decodes + len(view.running), held):
            return Gate(view.waiting, {})
        return None

    def planned(self, view: SchedulerView, gate: Gate, output: SchedulerOutput) -> None:
        scheduled = output.num_scheduled_tokens
        for request in chain(view.running, gate.through):
            if not request.num_output_tokens and request.request_id in scheduled:
                self._lengths.watch(request)

    def _fitting_now(self, view: SchedulerView, held_tokens: int) -> list[Request]:
        """Return the first waiting requests whose known tokens alone fit, and at least one."""
        room = self._room(view)
        waiting: list[Request] = []
        for request in islice(view.waiting, _MAX_ASKED):
            held_tokens += request.num_prompt_tokens + request.num_output_tokens
            if waiting and held_tokens >= room:
                break
            waiting.append(request)
        return waiting

    def _num_through(
        self, view: SchedulerView, there: Sequence[Request], waiting: Sequence[Request]
    ) -> int:
        """Return how many of `waiting`, from the first on, keep the peak below the room."""
        requests = [*there, *waiting]
        known = np.array([r.num_tokens for r in requests], dtype=np.float64)
        left, room = self._draw_left(requests), self._room(view)

        def fits(tried: int) -> bool:
            num = len(there) + tried
            return peak_tokens(known[:num], left[:, :num]) < room

        return largest_that_fits(fits, 0 if there else 1, len(waiting) + 1)

    def _room(self, view: SchedulerView) -> float:
        """Return the tokens of the KV cache that may be used."""
        return (1 - self.reserve) * view.kv.num_blocks * view.kv.block_size

    def _fits_surely(self, view: SchedulerView, num_there: int, held_tokens: int) -> bool:
        """Tell whether all waiting requests fit even if every output is as long as the longest."""
        longest = self._lengths.longest
        room = self._room(view) - held_tokens - num_there * longest
        for request in view.waiting:
            if room <= 0:
                break
            room -= request.num_prompt_tokens + request.num_output_tokens + longest
        return room > 0

    def _draw_left(self, requests: Sequence[Request]) -> Floats:
        """Return draws of the output tokens still to come, shape (draws, requests)."""
        emitted = np.array([r.num_output_tokens for r in requests], dtype=np.float64)
        most = np.array([r.max_tokens for r in requests], dtype=np.float64) - emitted
        places = np.arange(1, len(requests) + 1) * _GOLDEN_RATIO
        draws = np.arange(self.num_draws)[:, np.newaxis] / self.num_draws
        drawn: Floats = np.minimum(self._lengths.upper_left(emitted, (places + draws) % 1), most)
        return drawn


def peak_tokens(known: Floats, left: Floats) -> float:
    """Return the most tokens that are in the KV cache at once while all requests run to their ends.

    Each request has `known` tokens, shape (requests,), and `left` tokens to emit, shape (requests,)
    or (draws, requests); of several draws the largest peak is returned.
    """
    by_left = np.argsort(-left, axis=-1, kind="stable")
    longest_first = np.take_along_axis(left, by_left, axis=-1)
    together = np.arange(1, len(known) + 1)
    return float((longest_first * together + np.cumsum(known[by_left], axis=-1)).max())
