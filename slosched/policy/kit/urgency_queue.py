"""All requests of a step in one order of slack."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import attrgetter

from slosched.batch import BatchBuilder
from slosched.core import EndReason, LatencyModel, Request, RequestStatus, SchedulerView
from slosched.policy.kit.make_way import make_way

_WAITING = RequestStatus.WAITING
"""A local name, because each attribute look-up on an enum takes 0.1 µs in Python 3.11."""


class UrgencyQueue:
    """The requests of a step by slack, and what a prefill would do to those that wait.

    Slacks are all taken at the same time, so that the order by slack is the order by deadline.
    """

    def __init__(self, view: SchedulerView, model: LatencyModel, expire_begun: bool) -> None:
        """Sort the requests; `expire_begun` lets prompts expire that have begun, too."""
        self.view = view
        self.model = model
        by_slack = attrgetter("deadline_s")
        self.running = sorted(view.running, key=by_slack)
        self.begun = [r for r in self.running if not r.is_decode]
        decodes = [r for r in self.running if r.is_decode] if self.begun else self.running
        self.decodes = sorted((*decodes, *view.swapped), key=by_slack) if view.swapped else decodes
        """Decodes and swapped requests."""
        self.prefills = sorted((*self.begun, *view.waiting), key=by_slack)
        """Prompts that have begun or wait, without those in `expired`."""
        self.expired = self._take_expired(expire_begun)
        """Prompts without a token whose TTFT deadline has passed."""
        self.leaving: list[Request] = []
        """Running requests that make way for prompts in this step; no list above has them."""
        self._latest_starts_s: list[float] | None = None

    def make_way(self) -> None:
        """Let requests that can wait make way for prompts that lack seats or KV blocks."""
        if not self.view.waiting:
            return
        batch = BatchBuilder(self.view)
        for request in self.expired:
            batch.reject(request, EndReason.EXPIRED)
        if make_way(batch, self.view, self.prefills):
            self.leaving = [r for r in self.running if batch.has_left(r)]
            self._take_out(self.leaving)

    def latest_start_s(self, request: Request) -> float:
        """Return how long from now the prefill of `request` can wait and still be in time."""
        left, done = request.num_uncomputed_tokens, request.num_computed_tokens
        return request.deadline_s - self.view.now_s - self.model.predict_prefill(left, done)

    def count_starts_between(self, begin_s: float, end_s: float, limit_s: float) -> int:
        """Count the waiting requests that are in time if they start at `begin_s`, not at `end_s`.

        Both are times from now, and no `begin_s` of the step is beyond `limit_s`.
        """
        if self._latest_starts_s is None:
            self._latest_starts_s = self._find_latest_starts(limit_s)
        starts = self._latest_starts_s
        return bisect_left(starts, end_s) - bisect_left(starts, begin_s)

    def _take_expired(self, expire_begun: bool) -> list[Request]:
        """Remove the expired prompts from the queue and return them."""
        expired = []
        for request in self.prefills:
            if request.deadline_s >= self.view.now_s:
                break
            may_expire = expire_begun or request.status is RequestStatus.WAITING
            if may_expire and request.num_output_tokens == 0:
                expired.append(request)
        if expired:
            self._take_out(expired)
        return expired

    def _take_out(self, requests: list[Request]) -> None:
        gone = {r.request_id for r in requests}
        self.prefills, self.begun, self.running, self.decodes = (
            [r for r in requests if r.request_id not in gone]
            for requests in (self.prefills, self.begun, self.running, self.decodes)
        )

    def _find_latest_starts(self, limit_s: float) -> list[float]:
        """Return, sorted, the latest starts of all that a prefill could make late.

        The prefill starts before `limit_s`.  It cannot make a request late that is due more than
        two of the longest prefills later, which spares most of a long queue.
        """
        predict, now_s, waiting = self.model.predict_prefill, self.view.now_s, self.view.waiting
        longest_s = predict(max(r.num_prompt_tokens + r.num_output_tokens for r in waiting))
        due_s = now_s + limit_s + 2 * longest_s
        num_due = bisect_right(self.prefills, due_s, key=attrgetter("deadline_s"))
        due = self.prefills[:num_due]
        return sorted([self.latest_start_s(r) for r in due if r.status is _WAITING])
