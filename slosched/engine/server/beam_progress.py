"""What the client of a beam search saw of it, for its account: the engine's own requests are each
for one token of one beam."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from slosched.core import EndReason, Request
from slosched.engine.server.generations import Generation


class BeamProgress:
    """The times of the tokens, of which each comes when all beams have theirs."""

    def __init__(self, request: Request) -> None:
        """Prepare it; `request` is what the client asked for, and is not queued itself."""
        self._request = request
        self._started_s: float | None = None
        self._expected_ttft_s: float | None = None
        self._eased: Request | None = None
        """A request for a token that is served by another SLO, if there was one."""
        self._token_times_s: list[float] = []
        self._num_preemptions = self._num_swaps = 0

    @property
    def num_tokens(self) -> int:
        return len(self._token_times_s)

    def note_step(self, generations: Sequence[Generation]) -> None:
        """Note a step of the search, in which each beam got a token."""
        requests = [generation.request for generation in generations]
        if not self._token_times_s:
            self._started_s = requests[0].started_s
            self._request.num_cached_tokens = requests[0].num_cached_tokens
            self._expected_ttft_s = generations[0].expected_ttft_s
        self._token_times_s.append(max(request.token_times_s[-1] for request in requests))
        for request in requests:
            self._num_preemptions += request.num_preemptions
            self._num_swaps += request.num_swaps
            if request.asked_slo is not None:
                self._eased = request

    def ended(self, ends: Iterable[tuple[int, EndReason]], now_s: float) -> list[Generation]:
        """Return an ended generation for each answer, given its number of tokens and its end.

        `now_s` is the end of those that were not finished.
        """
        return [self._ended(*end, now_s, place) for place, end in enumerate(ends)]

    def _ended(self, num_tokens: int, reason: EndReason, now_s: float, place: int) -> Generation:
        asked, times_s = self._request, self._token_times_s[:num_tokens]
        slo, asked_slo = asked.slo, asked.asked_slo
        if self._eased is not None:
            slo, asked_slo = self._eased.slo, asked.slo
        is_finished = reason in (EndReason.STOP, EndReason.LENGTH)
        answer = replace(
            asked,
            request_id=f"{asked.request_id}-{place}" if place else asked.request_id,
            slo=slo,
            asked_slo=asked_slo,
            status=reason.status,
            end_reason=reason,
            started_s=self._started_s,
            end_s=times_s[-1] if is_finished else now_s,
            num_output_tokens=num_tokens,
            token_times_s=times_s,
            num_preemptions=self._num_preemptions,
            num_swaps=self._num_swaps,
        )
        generation = Generation(answer, asyncio.get_running_loop())
        generation.expected_ttft_s = self._expected_ttft_s
        generation.ended.set()
        return generation
