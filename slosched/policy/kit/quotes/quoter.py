"""Quotes: the TTFT and the TPOT that a request would have if it came now."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from slosched.core import (
    LatencyModel,
    OnInfeasible,
    PromptOrder,
    Request,
    RequestStatus,
    SchedulerOutput,
)
from slosched.policy.kit.crowd import decode_s
from slosched.policy.kit.make_way import FAR_S
from slosched.policy.kit.quotes.chance import Outlook, Prospects, Queued
from slosched.policy.kit.quotes.expected import Expected, first_due_s
from slosched.policy.kit.quotes.lineup import Lineup
from slosched.policy.kit.quotes.overtaking import Overtaking
from slosched.policy.kit.quotes.speed import Speed
from slosched.policy.kit.quotes.spread import Spread, SpreadByTTFT
from slosched.policy.kit.quotes.work import Work, prompt_work, sum_of, work_of

_FIRST = -math.inf
"""The place of a prompt that goes before all that wait."""
_NUM_BEHIND = 64
"""Prompts behind a new one that are looked at; it bounds the cost."""
_WAITING, _RUNNING = RequestStatus.WAITING, RequestStatus.RUNNING
"""Local names, because each attribute look-up on an enum takes 0.1 µs in Python 3.11."""


class Displaced(NamedTuple):
    """What a request would cost those that were let in before it and go behind it."""

    num_late: float
    """How many fewer of them are expected to be in time."""
    last_s: float
    """Its own TTFT if it went behind all of them instead."""


class Quoter:
    """Expects the times of each request that arrives, and learns how far off it was.

    **TTFT**: the time that the server adds, the rest of the running step, then the prefills of all
    prompts that go first, then its own, at the speed at which the device got prefills done lately.
    While none are done, that speed comes back to what the latency model says.  Under a policy that
    serves short prompts first, those that are still to arrive overtake it, too: the speed is less
    by the work of shorter prompts that arrived lately in a second.  (For a queue with priorities
    this is Cobham's formula, Operations Research 1954.)  **TPOT**: the time for each token of a
    decode lately, and at least what a step of one decode takes.

    The quantiles come from the ratios of actual to expected times.  Requests that find the queue
    empty and those that do not have a spread of their own, and so has each TTFT that is promised.

    Another thread may ask while the engine's thread plans.  What both use is copied in one go, by
    `copy`, since a tuple or a list of a dict's values may let another thread in.
    """

    def __init__(self, order: Callable[[], PromptOrder]) -> None:
        """Begin with nothing learnt; `order` returns the policy's order of prompts."""
        self._order = order
        self._prompts = Lineup[Expected]()
        """Prompts that wait or have begun, by request id."""
        self._emitting: list[Expected] = []
        """Prompts whose first token comes with the step that runs."""
        self._decoding: list[Expected] = []
        self._overtaking = Overtaking()
        """Which requests arrived lately, refused ones too."""
        self._speed = Speed(first=1.0, first_s=0.05)
        """Seconds of prefills, each alone on the device, that are done in a second."""
        self._speed_seen_s = -math.inf
        """When that was last observed."""
        self._pace = Speed(first=1e3, first_s=1e-6)
        """Tokens that a decode gets in a second."""
        self._alone, self._behind, self._tpot = SpreadByTTFT(), SpreadByTTFT(), Spread()
        self._prospects = Prospects()
        self._step: _Step | None = None
        self._busy_until_s = -math.inf

    def knows(self, request: Request) -> bool:
        """Tell whether the prompt of `request` is among those that wait or have begun."""
        return request.request_id in self._prompts

    def awaited(self) -> list[Request]:
        """Return the requests whose prompts wait or have begun; any thread may ask."""
        return [each.request for each in self._prompts.all()]

    def find(self, request_id: str) -> Expected | None:
        """Return what was expected of a request that has no token yet; None if it is unknown."""
        waiting = self._prompts.get(request_id)
        if waiting is not None:
            return waiting if waiting.ttft_s else None
        return next((e for e in self._emitting if e.request.request_id == request_id), None)

    def expect(self, request: Request, model: LatencyModel) -> Expected:
        """Return what is expected of a request that arrives now; nothing is learnt.  O(prompts)."""
        work, num_tokens = prompt_work(request, model), request.num_uncomputed_tokens
        place = self._place(request)
        due_s = first_due_s(request)
        far_s = request.arrival_s + FAR_S
        if self._all_press or due_s >= far_s:
            far_s = math.inf
        ahead = self._prompts.ahead(place, far_s)
        server_s = request.server_s
        wait_s = server_s + max(0.0, self._busy_until_s - request.arrival_s - server_s)
        first = ahead
        if self._order() is PromptOrder.PUNCTUAL and due_s < far_s:
            # Shorter ones that have more time let it pass.
            first = self._prompts.ahead(place, due_s)
        alone_s = first.alone_s + work.alone_s
        ttft_s = wait_s + self._prefills_s(alone_s, num_tokens, request.arrival_s)
        spreads = self._behind if ahead.alone_s else self._alone
        spread = spreads.at(request.slo.ttft_s)
        if self._order() is PromptOrder.DEADLINE:
            # It is not known whom the policy gives up: earlier requests tell how many are in time.
            in_time = spread.share_up_to(request.slo.ttft_s / ttft_s)
            likely_s = ttft_s * spread.median
        else:
            outlook, later_s = self._outlook(request, far_s, ahead.shared_s, work.alone_s, wait_s)
            in_time = outlook.chance(request.slo.ttft_s + later_s - wait_s)
            likely_s = wait_s + outlook.expected_s - later_s
        tpot_s = max(self._pace.seconds_for(1.0), decode_s(request, model))
        return Expected(
            request,
            due_s,
            place,
            num_tokens,
            work,
            ttft_s,
            spreads,
            spread.factors,
            tpot_s,
            self._tpot.factors,
            ahead.shared_s,
            in_time,
            likely_s,
        )

    def displaced(self, expected: Expected) -> Displaced:
        """Return what the request that arrives now costs those that were let in.  O(prompts).

        Only where it goes before longer prompts it costs any.
        """
        request, place = expected.request, expected.place
        if not self._is_by_length:
            return Displaced(0.0, expected.likely_s)
        now_s = request.arrival_s
        far_s = now_s + FAR_S
        wait_s = max(0.0, self._busy_until_s - now_s)
        needed_s, queued = expected.ahead_s, []
        for each in self._prompts.behind(place, far_s, _NUM_BEHIND):
            needed_s += each.shared_s
            queued.append(Queued(needed_s, each.num_tokens, each.due_s - now_s - wait_s))
        more_s = expected.work.shared_s
        num_late = self._prospects.chance_lost(queued, more_s, now_s) if queued else 0.0
        needed_s = self._prompts.shared_s(far_s) + expected.work.alone_s
        last = self._prospects.outlook(needed_s, expected.num_tokens, now_s, is_overtaken=True)
        return Displaced(num_late, request.server_s + wait_s + last.expected_s)

    @property
    def pressure(self) -> float:
        """Return whether others would take the time of a request that is refused, from 0 to 1.

        It is known only under a policy that serves short prompts first.
        """
        return self._prospects.backlog.pressure if self._is_by_length else 0.0

    def add(self, expected: Expected) -> None:
        """Count a request that waits from now on."""
        self._note_arrival(expected)
        if not self._is_left_over(expected):
            arrival_s = expected.request.arrival_s
            work_s, ttft_s = expected.work.shared_s, expected.request.slo.ttft_s
            self._prospects.let_in(arrival_s, work_s, expected.num_tokens, ttft_s)
        self._prompts.put(expected.request.request_id, expected)

    def turn_away(self, expected: Expected) -> None:
        """Count a request that was refused: others like it will come."""
        self._note_arrival(expected)

    def add_unjudged(self, request: Request, model: LatencyModel) -> None:
        """Count a request of which nothing was expected, and which goes before all that wait.

        It was preempted, or it starts before anybody looked at it.
        """
        work = prompt_work(request, model)
        unjudged = Expected.unjudged(request, work, _FIRST, self._behind)
        self._prompts.put(request.request_id, unjudged)

    def note_free(self, now_s: float) -> None:
        """Note that the device is free for a step at `now_s`, whatever was predicted before."""
        self._busy_until_s = now_s

    def look(self, model: LatencyModel) -> None:
        """Learn from what has become of requests since the last call.  O(prompts)."""
        self._prompts.settle()
        changed = [  # of a thousand, few
            each
            for each in self._prompts.all()
            if (request := each.request).status is not _WAITING or request.asked_slo is not None
        ]
        self._note_unseen([e for e in changed if e.request.status is _RUNNING], model)
        self._learn_from_tokens()
        for each in changed:
            name = each.request.request_id
            if each.request.end_reason is not None:
                self._prompts.remove(name)
            elif each.request.asked_slo is not None and each.due_s < math.inf:
                each.due_s = math.inf  # it may have been given up since
                self._prompts.put(name, each)

    def _note_unseen(self, begun: Iterable[Expected], model: LatencyModel) -> None:
        """Take in what was computed since the latest step without a call of `note_step`.

        A wrapper around the door may have planned a step, or an engine by itself.
        """
        done: list[Work] = []
        for each in begun:
            request = each.request
            if request.num_uncomputed_tokens < each.num_tokens:
                has_begun_to_emit = request.is_decode and request.num_output_tokens
                num_left = 0 if has_begun_to_emit else request.num_uncomputed_tokens
                done.append(self._note_left(each, num_left, request.num_computed_tokens, model))
        if done and self._step is not None:
            self._step = self._step._replace(work=sum_of([self._step.work, *done]))

    def _learn_from_tokens(self) -> None:
        """Learn from first tokens, and from decodes that have ended."""
        waiting: list[Expected] = []
        for each in self._emitting:
            request = each.request
            if request.num_output_placeholders:
                waiting.append(each)  # the time of its token is still a forecast
            elif request.num_output_tokens and each.ttft_s:
                actual_s = request.token_times_s[0] - request.arrival_s
                ratio, promised_s = actual_s / each.ttft_s, request.slo.ttft_s
                each.ttft_spreads.observe(ratio, each.ttft_factors, promised_s)
                self._decoding.append(each)
        self._emitting = waiting
        ended = [each for each in self._decoding if each.request.end_reason is not None]
        if ended:
            self._decoding = [e for e in self._decoding if e.request.end_reason is None]
            for each in ended:
                self._learn_tpot(each)

    def note_step(
        self, now_s: float, model: LatencyModel, output: SchedulerOutput, num_decodes: int
    ) -> None:
        """Learn from the step before this one, and note what this one does.

        `num_decodes` are running; those not in the plan that `output` names get a token, too, if
        they are served beside it.
        """
        if self._step is not None:
            self._learn_speed(self._step, now_s)
        found = map(self._prompts.get, output.num_scheduled_tokens)
        done = [self._advance(each, output, model) for each in found if each is not None]
        for name in output.rejected:
            if (each := self._prompts.get(name)) is None:
                continue
            # It may be served though late: then it keeps its place where requests go by arrival.
            may_stay = each.request.on_infeasible is not OnInfeasible.REJECT
            if not may_stay:
                self._prompts.remove(name)
            if not (self._is_by_length or (may_stay and self._all_press)):
                done.append(each.work)  # those behind it need not wait
        predicted_s = 0.0 if output.shape is None else model.predict(output.shape)
        num_served = 0 if output.shape is None else min(num_decodes, output.shape.num_decodes)
        is_full = self._is_pressed(now_s) and not output.is_at_leisure
        self._step = _Step(
            now_s,
            predicted_s,
            sum_of(done),
            num_decodes,
            num_served,
            is_full,
            output.has_reserve,
        )
        self._busy_until_s = now_s + predicted_s

    @property
    def _is_by_length(self) -> bool:
        return self._order().is_by_length

    def _is_pressed(self, now_s: float, come_by_s: float = math.inf) -> bool:
        """Tell whether a prompt waits that does not only get what others leave over.

        Those count that had come by `come_by_s`.
        """
        all_press, far_s = self._all_press, now_s + FAR_S
        prompts = iter(self._prompts.all())

        def presses(each: Expected) -> bool:
            has_come = each.request.arrival_s + each.request.server_s <= come_by_s
            return has_come and (all_press or each.due_s < far_s)

        first = next(prompts, None)
        if first is None or presses(first):
            return first is not None
        # Of a thousand that are due much later, none has to be looked at.
        may_press = all_press or self._prompts.has_due_before(far_s)
        return may_press and any(map(presses, prompts))

    @property
    def _all_press(self) -> bool:
        """Tell whether the policy serves by arrival, so that nothing is left over for others."""
        return self._order() is PromptOrder.ARRIVAL

    def _place(self, request: Request) -> float:
        order = self._order()
        if order.is_by_length:
            # Not its time: a model that learns says another one a step later, and of a thousand
            # prompts of the same length all would go first, or none.
            return request.num_uncomputed_tokens
        if order is PromptOrder.DEADLINE:
            return request.arrival_s + request.slo.ttft_s
        return request.arrival_s

    def _outlook(
        self, request: Request, far_s: float, ahead_s: float, own_s: float, wait_s: float
    ) -> tuple[Outlook, float]:
        """Return what decides whether a new request is in time, and how long after it is due.

        A policy that serves by deadline while all can be in time gives up the longest if not all
        can.  A prompt is kept if it and the shorter ones that are due by its own deadline can be
        done until then, and likewise at each later time at which a shorter one is due.
        """
        num_tokens, now_s = request.num_uncomputed_tokens, request.arrival_s
        if self._order() is PromptOrder.PUNCTUAL and far_s < math.inf:
            laters_s, aheads_s = self._prompts.by_due(num_tokens, first_due_s(request), far_s)
            needed_s, until_s = aheads_s + own_s, laters_s + request.slo.ttft_s
            outlook, at = self._prospects.hardest(needed_s, until_s, num_tokens, now_s, wait_s)
            return outlook, float(laters_s[at])
        is_overtaken = self._is_by_length
        return self._prospects.outlook(
            ahead_s + own_s, num_tokens, now_s, is_overtaken=is_overtaken
        ), 0.0

    def _prefills_s(self, needed_s: float, num_tokens: int, now_s: float) -> float:
        """Return how long `needed_s` of prefills take: a prompt's own and those before it."""
        speed, unseen_s = self._speed, now_s - self._speed_seen_s
        if self._is_by_length:
            return self._overtaking.prefills_s(needed_s, num_tokens, speed, now_s, unseen_s)
        return speed.seconds_for(needed_s, unseen_s=unseen_s)

    def _note_arrival(self, expected: Expected) -> None:
        if not self._is_left_over(expected):
            arrival_s = expected.request.arrival_s
            self._overtaking.note(arrival_s, expected.num_tokens, expected.work.alone_s)

    def _is_left_over(self, expected: Expected) -> bool:
        """Tell whether a request that arrives only gets what others leave over; it overtakes none.

        How long others wait is foreseen from arrivals, of which it is none.
        """
        return not self._all_press and expected.due_s >= expected.request.arrival_s + FAR_S

    def _advance(self, each: Expected, output: SchedulerOutput, model: LatencyModel) -> Work:
        """Note what the step computes of a prompt; return the work that is done by that."""
        request = each.request
        name = request.request_id
        computed = output.num_found_tokens.get(name, request.num_computed_tokens)
        computed += output.num_scheduled_tokens[name]
        return self._note_left(each, request.num_tokens - computed, computed, model)

    def _note_left(self, each: Expected, num_left: int, computed: int, model: LatencyModel) -> Work:
        """Note how many tokens of a prompt are left; return the work that is done."""
        name, before = each.request.request_id, each.work
        each.num_tokens, each.work = num_left, work_of(num_left, computed, model)
        # By length, a prompt that has begun waits for shorter ones.
        each.place = num_left if self._is_by_length else _FIRST
        if num_left <= 0:
            self._prompts.remove(name)
            self._emitting.append(each)
        else:
            self._prompts.put(name, each)
        left = each.work
        return Work(before.alone_s - left.alone_s, before.shared_s - left.shared_s)

    def _learn_speed(self, step: _Step, now_s: float) -> None:
        # Without a prompt the device may run decodes without asking, or be idle until one comes.
        presses = self._is_pressed(now_s, come_by_s=step.start_s + step.predicted_s)
        took_s = now_s - step.start_s if presses else step.predicted_s
        if step.work.alone_s or presses:
            self._speed.observe(step.work.alone_s, took_s, step.start_s - self._speed_seen_s)
            self._speed_seen_s = step.start_s + took_s
        elapsed_s = now_s - step.start_s
        self._prospects.backlog.note_step(elapsed_s, step.predicted_s, is_full=step.is_full)
        if step.is_full:
            end_s, done_s = step.start_s + took_s, step.work.shared_s
            self._prospects.observe_full_step(done_s, took_s, end_s, has_reserve=step.has_reserve)
        if step.num_decodes:
            self._pace.observe(step.num_served / step.num_decodes, took_s)

    def _learn_tpot(self, each: Expected) -> None:
        times_s = each.request.token_times_s
        if each.request.status is RequestStatus.FINISHED and len(times_s) > 1:
            actual_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
            self._tpot.observe(actual_s / each.tpot_s, each.tpot_factors)


class _Step(NamedTuple):
    """The latest step that was planned."""

    start_s: float
    predicted_s: float
    work: Work
    """Prefills that it does, and those of prompts that it rejects."""
    num_decodes: int
    num_served: int
    """Decodes that get a token."""
    is_full: bool
    """True if it leaves prompts over."""
    has_reserve: bool
    """True if it would have done more for prompts that are short of time."""
