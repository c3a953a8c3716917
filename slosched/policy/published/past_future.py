"""Past-Future: a request starts only if the KV cache will hold all of them at its fullest."""

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
"""Waiting requests that are asked in one step; a bound on its cost."""


@dataclass
class PastFuture(Wrapper):
    """Holds new requests back until the peak of the KV cache with them stays within it.

    1. The output of each request that runs is drawn from those of recently finished ones that
       were longer than it is already; of one that waits, from all of them.
    2. The cache is fullest just before one ends: with the k longest to go still there, in order
       of what is left, the peak is max over k of left_k * k + tokens of the first k.
    3. The waiting are let through in their order while the peak, the largest of `num_draws`, is
       below the cache less `reserve`.  The first that is not holds up those behind it.

    Nobody is refused.  It spares preemptions where the cache is small for the load and costs
    queueing where outputs are shorter than drawn.

    Source: Past-Future (ASPLOS '25, arXiv 2507.10150), in the form of its authors' LightLLM,
    `chunked_prefill/impl_past_future.py`: `history_output_len` → `OutputLengths`, `REVERSED` →
    `reserve`, `MAXIMUM_LISTS` → `num_draws`, `_calc_max_token_num_needed` → `peak_tokens`.

    Otherwise here: draws are a sequence of golden ratios over the requests, which no seed is
    needed for and which is more even than chance; before any request has finished, outputs are
    `prior_output_tokens` long where LightLLM begins with the longest allowed; a request that has
    outlived the history is expected to end with the next token, where it draws up to its limit.

    Output lengths: those of the last 1,000 finished requests.
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
        """If it fits even if all outputs are as long as the longest, which sums can tell."""
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
        """Those that wait, until their known tokens alone are too many; at least the first."""
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
        """How many of `waiting`, from the first, keep the peak below the room."""
        requests = [*there, *waiting]
        known = np.array([r.num_tokens for r in requests], dtype=np.float64)
        left, room = self._draw_left(requests), self._room(view)

        def fits(tried: int) -> bool:
            num = len(there) + tried
            return peak_tokens(known[:num], left[:, :num]) < room

        return largest_that_fits(fits, 0 if there else 1, len(waiting) + 1)

    def _room(self, view: SchedulerView) -> float:
        return (1 - self.reserve) * view.kv.num_blocks * view.kv.block_size

    def _fits_surely(self, view: SchedulerView, num_there: int, held_tokens: int) -> bool:
        """True if all that wait fit beside those that are there, however long any gets."""
        longest = self._lengths.longest
        room = self._room(view) - held_tokens - num_there * longest
        for request in view.waiting:
            if room <= 0:
                break
            room -= request.num_prompt_tokens + request.num_output_tokens + longest
        return room > 0

    def _draw_left(self, requests: Sequence[Request]) -> Floats:
        """Output tokens still to come of each, shape (draws, requests)."""
        emitted = np.array([r.num_output_tokens for r in requests], dtype=np.float64)
        most = np.array([r.max_tokens for r in requests], dtype=np.float64) - emitted
        places = np.arange(1, len(requests) + 1) * _GOLDEN_RATIO
        draws = np.arange(self.num_draws)[:, np.newaxis] / self.num_draws
        drawn: Floats = np.minimum(self._lengths.upper_left(emitted, (places + draws) % 1), most)
        return drawn


def peak_tokens(known: Floats, left: Floats) -> float:
    """The most tokens that are in the cache at once, if each request emits what is left of it.

    `known` tokens of each, shape (requests,), and `left` to come, shape (requests,) or, for the
    largest of several draws, (draws, requests).
    """
    by_left = np.argsort(-left, axis=-1, kind="stable")
    longest_first = np.take_along_axis(left, by_left, axis=-1)
    together = np.arange(1, len(known) + 1)
    return float((longest_first * together + np.cumsum(known[by_left], axis=-1)).max())
