"""Early rejection (Mooncake): a request that would break an SLO is refused on arrival."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slosched.core import (
    BatchShape,
    DecodeGroup,
    LatencyModel,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    latest_first,
    tunable,
)
from slosched.policy.kit.checks import check_positive
from slosched.policy.kit.drop import why_late
from slosched.policy.kit.remaining import Remaining
from slosched.policy.kit.wrapper import Gate, Wrapper

_WINDOW = 200
"""Number of recent requests over which observations are averaged."""
_MEMORY_S = 10.0
"""Time after which a wait is forgotten: who is refused shows no other one."""
_MAX_JUDGED = 64
"""New requests judged in one step; it bounds the cost of a step in a burst."""


@dataclass
class EarlyRejection(Wrapper):
    """Rejects a new request if the load predicted for the start of its decode is too high.

    1. Its decode starts after its own prefill and those of all requests accepted before it.  The
       TTFT load is the TTFT that follows from this, divided by the TTFT of its SLO.
    2. The requests that decode at that time are: itself, those accepted before it, and those that
       decode now and will have decoded for less than t_d.  The TBT load is the predicted time of a
       step of these, divided by the smallest TPOT of all accepted requests and the new one.
    3. The load is the larger of the two.  Above `max_load` the request is rejected.  An accepted
       request is never rejected here later.

    Source: Mooncake (arXiv 2407.00079), section 7: early rejection based on prediction, at the
    level of the system, which assumes that every request decodes for the same time t_d.  (If the
    present load of decodes decided, prefills and decodes would swing in opposite phase.)

    Differences: one replica does both prefill and decode here.  A wrapper does not know in which
    steps the inner policy computes a prompt, so predicted waits are scaled by how much longer
    waits in the last 10 s were than predicted.  t_d is the mean over finished requests.  Left out:
    the choice of an instance, and the transfer and reuse of KV caches.

    Output lengths are those of finished requests; they enter t_d and the mean context of a decode.
    """

    max_load: float = tunable(1.0, 0.7, 0.8, 0.9, 1.1)
    prior_decode_s: float = 5.0
    """t_d before any request has finished."""

    def __post_init__(self) -> None:
        check_positive(max_load=self.max_load, prior_decode_s=self.prior_decode_s)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._taken: dict[str, _Taken] = {}
        """Accepted requests by id, until they end."""
        self._just_taken: list[_Taken] = []
        """Requests accepted by the last `gate`, until its step is planned."""
        self._seen = _Seen(self.prior_decode_s)

    def gate(self, view: SchedulerView) -> Gate:
        model = view.model
        self._just_taken = []
        new = self._new(view.waiting)
        if not new:
            return Gate(view.waiting, {})
        self._look()
        self._just_taken = self._judge(new[:_MAX_JUDGED], view.now_s, model)
        if len(self._just_taken) == len(new):
            return Gate(view.waiting, {})
        taken = {each.request.request_id for each in self._just_taken}
        out = {r.request_id for r in new} - taken
        refused = [r for r in new[:_MAX_JUDGED] if r.request_id in out]
        rejected = {r.request_id: why_late(r, view.now_s) for r in refused}
        return Gate(Remaining(view.waiting, out), rejected)

    def gate_beside(self, decodes: DecodeGroup, view: SchedulerView) -> Gate:
        return self.gate(view)

    def planned(self, view: SchedulerView, gate: Gate, output: SchedulerOutput) -> None:
        self._taken |= {each.request.request_id: each for each in self._just_taken}
        self._just_taken = []

    def _new(self, waiting: Sequence[Request]) -> list[Request]:
        """Return the requests that were not judged yet; they have arrived last."""
        new = []
        for request in latest_first(waiting):
            if request.request_id in self._taken or request.num_preemptions:
                break
            new.append(request)
        return new[::-1]

    def _look(self) -> None:
        """Observe first tokens and ends since the last arrival."""
        for each in list(self._taken.values()):
            request = each.request
            if not each.has_begun and request.num_output_tokens:
                each.has_begun = True
                self._seen.first_token(request.token_times_s[0], each)
            if request.end_reason is not None:
                del self._taken[request.request_id]
                if request.status is RequestStatus.FINISHED:
                    self._seen.finished(request)

    def _judge(self, new: Sequence[Request], now_s: float, model: LatencyModel) -> list[_Taken]:
        forecast = _Forecast(now_s, model, self._taken.values(), self._seen)
        taken = []
        for request in new:
            work_s = forecast.work_s_with(request)
            if forecast.load(request, work_s) <= self.max_load:
                forecast.take(request, work_s)
                taken.append(_Taken(request, now_s, work_s))
        return taken


@dataclass(slots=True)
class _Taken:
    """An accepted request."""

    request: Request
    taken_s: float
    work_s: float
    """Seconds of prefills until its first token, as predicted when it was accepted."""
    has_begun: bool = False
    """True once its first token was observed."""


class _Wait(NamedTuple):
    """The wait for a first token, which came at `at_s`."""

    at_s: float
    wait_s: float
    work_s: float
    """Seconds of prefills that were predicted."""


class _Seen:
    """Waits and decode times of recent requests."""

    def __init__(self, prior_decode_s: float) -> None:
        self._prior_decode_s = prior_decode_s
        self._waits: deque[_Wait] = deque(maxlen=_WINDOW)
        self._decodes: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    def first_token(self, at_s: float, taken: _Taken) -> None:
        self._waits.append(_Wait(at_s, at_s - taken.taken_s, taken.work_s))

    def finished(self, request: Request) -> None:
        decode_s = request.token_times_s[-1] - request.token_times_s[0]
        self._decodes.append((decode_s, request.num_output_tokens))

    def slowdown(self, now_s: float) -> float:
        """Return the time until a first token divided by the prefills until then, recently.

        Without a recent one it is 1.  It would stay high for ever if it led to no request taken.
        """
        recent = [wait for wait in self._waits if wait.at_s >= now_s - _MEMORY_S]
        work_s = sum(wait.work_s for wait in recent)
        return sum(wait.wait_s for wait in recent) / work_s if work_s else 1.0

    @property
    def decode_s(self) -> float:
        """Return t_d, the mean time for which a request decodes."""
        if not self._decodes:
            return self._prior_decode_s
        return sum(each_s for each_s, _ in self._decodes) / len(self._decodes)

    @property
    def output_tokens(self) -> float:
        """Return the mean output length; 0 before any request has finished."""
        if not self._decodes:
            return 0.0
        return sum(num for _, num in self._decodes) / len(self._decodes)


class _Forecast:
    """The load to come, from all accepted requests."""

    def __init__(
        self, now_s: float, model: LatencyModel, taken: Iterable[_Taken], seen: _Seen
    ) -> None:
        self._now_s, self._model = now_s, model
        self._slowdown, self._decode_s = seen.slowdown(now_s), seen.decode_s
        self._work_s = 0.0
        self._ends_s: list[float] = []
        """Times at which the present decodes will have decoded for t_d."""
        self._begins_s: list[float] = []
        """Times at which the other accepted requests will start to decode."""
        self._tpot_s = math.inf
        requests = [each.request for each in taken]
        for request in requests:
            self._tpot_s = min(self._tpot_s, request.slo.tpot_s)
            if request.num_output_tokens and request.status is not RequestStatus.WAITING:
                self._ends_s.append(request.token_times_s[0] + self._decode_s)
            else:
                self._add_prefill(self.work_s_with(request))
        self._ends_s.sort()
        prompt_tokens = sum(r.num_prompt_tokens for r in requests) / max(1, len(requests))
        self._context = prompt_tokens + seen.output_tokens / 2
        self._steps_s: dict[int, float] = {}

    def work_s_with(self, request: Request) -> float:
        """Return the seconds of prefills until the request's first token if it comes next."""
        known = request.num_prompt_tokens + request.num_output_tokens
        computed = request.num_computed_tokens
        return self._work_s + self._model.predict_prefill(known - computed, computed)

    def load(self, request: Request, work_s: float) -> float:
        """Return the larger of TTFT load and TBT load if `request` comes next."""
        begin_s = self._now_s + self._slowdown * work_s
        ttft_load = (begin_s - request.arrival_s) / request.slo.ttft_s
        num_ended = bisect_right(self._ends_s, begin_s)
        num_ended += bisect_right(self._begins_s, begin_s - self._decode_s)
        num = len(self._ends_s) + len(self._begins_s) - num_ended + 1
        return max(ttft_load, self._step_s(num) / min(self._tpot_s, request.slo.tpot_s))

    def take(self, request: Request, work_s: float) -> None:
        """Count `request` among the accepted ones."""
        self._tpot_s = min(self._tpot_s, request.slo.tpot_s)
        self._add_prefill(work_s)

    def _add_prefill(self, work_s: float) -> None:
        self._work_s = work_s
        self._begins_s.append(self._now_s + self._slowdown * work_s)

    def _step_s(self, num_decodes: int) -> float:
        """Return the predicted time of a step of so many decodes and nothing else."""
        if num_decodes not in self._steps_s:
            shape = BatchShape()
            shape.num_decodes = num_decodes
            shape.decode_context_tokens = round(num_decodes * self._context)
            shape.max_context_tokens = shape.max_decode_context_tokens = round(self._context)
            self._steps_s[num_decodes] = self._model.predict(shape)
        return self._steps_s[num_decodes]
