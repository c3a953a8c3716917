"""The requests that a portfolio has seen: how well they were served, and the latest of them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from slosched.core import DeadlineRule, LatencyModel, Request, RequestStatus, latest_first
from slosched.metrics import RequestRecord
from slosched.metrics.columns import RequestColumns
from slosched.metrics.promises import good_requests
from slosched.policy.kit.crowd import decode_s
from slosched.policy.portfolio.question import PastRequest

_SPREADS = 3.0
"""Standard deviations by which a count has to exceed the expected one, so that it surprises."""
_NUM_LENGTHS = 1000
"""Number of finished requests whose output lengths are remembered."""


class Trouble(NamedTuple):
    """Requests that were rejected, late or overdue though their promise could have been kept."""

    num_bad: int
    num_requests: int
    num_unkeepable: int = 0
    """Requests whose promise could not have been kept."""

    @property
    def share(self) -> float:
        """Return the share of the requests; 0 if there are none."""
        return self.num_bad / self.num_requests if self.num_requests else 0.0

    def exceeds(self, share: float) -> bool:
        """Tell whether there are more than by chance if `share` of the requests were expected."""
        expected, spread = self.num_requests * share, math.sqrt(self.num_requests * share)
        return self.num_bad > expected + _SPREADS * max(1.0, spread)


@dataclass(slots=True)
class _Entry:
    """A request, and once it has ended whether it was served as promised."""

    request: Request
    is_good: bool | None = None
    is_keepable: bool | None = None
    """Whether its promise could be kept alone on the device; None until that is asked."""

    def is_bad(self, now_s: float) -> bool:
        """Tell whether it was rejected or late, or its next token is overdue."""
        return self.request.deadline_s < now_s if self.is_good is None else not self.is_good


class Seen:
    """The requests that arrived within the last `window_s`, or were served in it.

    The policy holds on to the requests that it was shown, and looks at them again only when it
    asks a question.  In between, a step costs the requests that are new in it.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._entries: dict[str, _Entry] = {}
        self._lengths: deque[int] = deque(maxlen=_NUM_LENGTHS)
        self.num_seen = 0
        """Number of requests that were remembered so far."""

    def note(self, waiting: Sequence[Request]) -> None:
        """Remember the requests that have joined the queue since the last call."""
        entries = self._entries
        new = []
        for request in latest_first(waiting):
            if request.request_id in entries:
                break
            new.append(request)
        for request in reversed(new):
            entries[request.request_id] = _Entry(request)
        self.num_seen += len(new)

    def update(self, shown: Iterable[Request], now_s: float, rule: DeadlineRule) -> None:
        """Judge what has ended, and forget what ended before the window.

        `shown` are all requests of the view: some may have been missed while they waited.
        """
        missed = [request for request in shown if request.request_id not in self._entries]
        self._entries |= {request.request_id: _Entry(request) for request in missed}
        self.num_seen += len(missed)
        ended = [
            entry
            for entry in self._entries.values()
            if entry.is_good is None and entry.request.status.is_ended
        ]
        if ended:
            records = [RequestRecord.from_request(entry.request) for entry in ended]
            verdicts = good_requests(RequestColumns.of(records), rule)
            for entry, is_good in zip(ended, verdicts, strict=True):
                entry.is_good = bool(is_good)
                if entry.request.status is RequestStatus.FINISHED:
                    self._lengths.append(entry.request.num_output_tokens)
        begin_s = now_s - self._window_s
        self._entries = {
            name: entry
            for name, entry in self._entries.items()
            if not entry.request.status.is_ended or _end_s(entry.request) >= begin_s
        }

    def trouble(self, since_s: float, now_s: float, model: LatencyModel) -> Trouble:
        """Return how many requests that arrived since then were not served as promised.

        A request that has not ended counts if its next token is overdue.  One that its client took
        back does not count at all.
        """
        entries = [
            entry
            for entry in self._entries.values()
            if entry.request.arrival_s >= since_s
            and entry.request.status is not RequestStatus.ABORTED
        ]
        bad = [entry for entry in entries if entry.is_bad(now_s)]
        num_unkeepable = sum(not _is_keepable(entry, model) for entry in bad)
        return Trouble(len(bad) - num_unkeepable, len(entries), num_unkeepable)

    def gather(self, now_s: float, max_requests: int, model: LatencyModel) -> Gathering:
        """Return the window's requests, at most `max_requests`, and those in service at its begin.

        They are in order of arrival.
        """
        window = self._window(now_s)[-max_requests:]
        if not window:
            return Gathering((), now_s, now_s, model)
        begin_s = window[0].request.arrival_s
        before = [
            entry
            for entry in self._entries.values()
            if entry.request.arrival_s < begin_s
            and (not entry.request.status.is_ended or _end_s(entry.request) > begin_s)
        ]
        before.sort(key=attrgetter("request.arrival_s"))
        return Gathering((*before, *window), begin_s, now_s, model)

    @property
    def output_lengths(self) -> tuple[int, ...]:
        """Return the output tokens of finished requests, in the order in which they were judged."""
        return tuple(self._lengths)

    def _window(self, now_s: float) -> list[_Entry]:
        begin_s = now_s - self._window_s
        inside = [e for e in self._entries.values() if e.request.arrival_s >= begin_s]
        inside.sort(key=attrgetter("request.arrival_s"))
        return inside


class Gathering:
    """Requests that are described for a question a few at a time, so that no step waits for all."""

    def __init__(
        self, entries: Sequence[_Entry], begin_s: float, now_s: float, model: LatencyModel
    ) -> None:
        self._entries = entries
        self._begin_s = begin_s
        self._now_s = now_s
        self._model = model
        self.requests: list[PastRequest] = []
        """Those that have been described so far."""

    def __len__(self) -> int:
        return len(self._entries)

    def describe(self, most: int) -> bool:
        """Describe at most so many more requests; tell whether that were all."""
        num, begin_s, now_s = len(self.requests), self._begin_s, self._now_s
        self.requests += [
            _past(entry.request, begin_s, entry.is_bad(now_s) and _is_keepable(entry, self._model))
            for entry in self._entries[num : num + most]
        ]
        return len(self.requests) == len(self._entries)


def _end_s(request: Request) -> float:
    assert request.end_s is not None, f"{request.request_id!r} has ended at no time"
    return request.end_s


def _is_keepable(entry: _Entry, model: LatencyModel) -> bool:
    """Tell whether the promise could be kept if the request were alone on the device."""
    if entry.is_keepable is None:
        request, slo = entry.request, entry.request.slo
        cached = min(request.num_cached_tokens, request.num_prompt_tokens - 1)
        alone_s = model.predict_prefill(request.num_prompt_tokens - cached, cached)
        is_one_token = request.max_tokens == 1
        entry.is_keepable = alone_s <= slo.ttft_s and (
            is_one_token or decode_s(request, model) <= slo.tpot_s
        )
    return entry.is_keepable


def _past(request: Request, begin_s: float, in_trouble: bool) -> PastRequest:
    never_ran = request.status is RequestStatus.WAITING and not request.num_preemptions
    cached = request.num_computed_tokens if never_ran else request.num_cached_tokens
    past = PastRequest(
        arrival_s=request.arrival_s - begin_s,
        num_prompt_tokens=max(1, request.num_prompt_tokens - cached),
        max_tokens=request.max_tokens,
        num_output_tokens=request.num_output_tokens,
        has_ended=request.status.is_ended and request.num_output_tokens > 0,
        slo=request.slo,
        priority=request.priority,
        lora_id=request.lora_id,
        in_trouble=in_trouble,
    )
    if request.arrival_s >= begin_s:
        return past
    times_s = request.token_times_s
    num_before = bisect_right(times_s, begin_s)
    if not num_before:
        return past
    return past._replace(
        num_emitted_before=num_before,
        first_token_s=times_s[0] - begin_s,
        last_token_s=times_s[num_before - 1] - begin_s,
    )
