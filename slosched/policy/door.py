"""A door in front of any policy: it quotes times, and refuses on arrival what would be late."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import NamedTuple

from slosched.core import (
    DeadlineRule,
    DecodeGroup,
    Doorkeeper,
    EndReason,
    LatencyModel,
    OnInfeasible,
    PromptOrder,
    Refusal,
    Request,
    SchedulerOutput,
    SchedulerView,
    latest_first,
    tunable,
)
from slosched.policy.kit.checks import check_share
from slosched.policy.kit.crowd import Crowd, decode_s
from slosched.policy.kit.pausing import is_due
from slosched.policy.kit.quotes.expected import Expected, Quote
from slosched.policy.kit.quotes.quoter import Quoter
from slosched.policy.kit.quotes.returns import Returns
from slosched.policy.kit.remaining import Remaining
from slosched.policy.kit.strictness import Strictness
from slosched.policy.kit.wrapper import Gate, Wrapper

MAX_JUDGED = 16
"""Requests judged in one step, where none was on arrival; it bounds the cost of a step."""


class Refuse(StrEnum):
    """The requests that are refused on arrival."""

    NOTHING = "nothing"
    UNKEEPABLE = "unkeepable"
    """Those whose TTFT or TPOT could not be kept even if they were alone on the device."""
    LATE = "late"
    """Also those whose first token is expected too late, behind the others."""


class Foreseen(NamedTuple):
    """What would become of a request if it arrived now."""

    quote: Quote
    refusal: EndReason | None
    """Why it would be refused; None if it would be let in."""


@dataclass
class Door(Wrapper, Doorkeeper):
    """Refuses a request on arrival if its promise cannot be kept, or hardly would be.

    1. A TTFT below the time of its own prefill alone on the device, or a TPOT below a step of its
       second token alone, cannot be kept: it is refused as `unkeepable`.  With several answers to
       one prompt it is the step of all second tokens.  Under the rule `envelope` that step has what
       is left of the TTFT as well.
    2. Several answers to one prompt that would take most of the time of decodes, so that prompts
       and other decodes are late, are refused as `overload` (kit/crowd.py).
    3. The chance that its first token comes in time is less than `level`, or than what `most_late`
       has made of it: it is refused as `overload`, and told when to come again.
    4. Where prompts wait most of the time, another request takes the time of one that is refused.
       The least chance then has to be left after what is taken from those that were let in before,
       and go behind the new one: the sum of the chances that they lose.  Who would be in time
       behind all of them is let in.  Where prompts wait all the time, the least chance is
       `busy_level`.
    5. All others wait, and the inner policy decides about them, and may still reject them.

    Source: ours.  Early rejection as such is Mooncake's (arXiv 2407.00079; `early_rejection`).
    """

    refuse: Refuse = Refuse.LATE
    level: float = tunable(0.2, 0.05, 0.5)
    """Least chance to be in time that a request must have.  At 0.2 it is refused if it is expected
    that more than four of five like it would be late."""
    busy_level: float = tunable(0.5, 0.0)
    """Least chance where prompts wait all the time.  At most `level`: nothing rises there, and what
    is taken from others does not count."""
    most_late: float = 1.0
    """Share of those let in that may be late or rejected later.  While it is more, the least chance
    is above `level`, up to 0.5.  At 1 it is always `level`."""

    def __post_init__(self) -> None:
        check_share(level=self.level, busy_level=self.busy_level)
        if not 0 < self.most_late <= 1:
            raise ValueError(f"most_late must be in (0, 1], not {self.most_late}")
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._quoter = Quoter(lambda: self.prompt_order)
        self._returns, self._crowd = Returns(), Crowd()
        self._strictness = Strictness(self.level, self.most_late)
        self._refused: dict[str, Refusal] = {}
        """The requests that the step being planned refuses."""
        self.refusals: Mapping[str, Refusal] = {}
        """Those that the latest step refused, by request id."""
        self._unjudged: list[Request] = []
        """Waiting requests that came with too many others to be judged in this step, and those that
        were preempted and are not due yet."""
        self._num_decodes = 0

    def quote(self, request: Request, model: LatencyModel) -> Quote:
        """Return what a request would be promised if it arrived now; any thread may ask."""
        return self._quoter.expect(request, model).quote

    def expected_ttft_s(self, request_id: str) -> float | None:
        """Return the median TTFT that was expected when a request arrived that has no token yet.

        Returns None for all others.  Only the thread that plans may ask.
        """
        expected = self._quoter.find(request_id)
        return None if expected is None else expected.quote.ttft_s[0.5]

    def foresee(self, request: Request, model: LatencyModel, rule: DeadlineRule) -> Foreseen:
        """Return what would become of a request if it arrived now; any thread may ask."""
        expected = self._quoter.expect(request, model)
        refusal = self._refusal(expected, model, rule)
        return Foreseen(expected.quote, None if refusal is None else refusal.reason)

    def retry_after_s(self, request: Request, model: LatencyModel) -> float:
        """Return the seconds after which a request that is rejected now should come again."""
        return self._returns.wait_s(self._quoter.expect(request, model))

    def judge(self, request: Request, model: LatencyModel, rule: DeadlineRule) -> Refusal | None:
        expected = self._quoter.expect(request, model)
        is_kept = request.on_infeasible is not OnInfeasible.REJECT
        # Several answers to one prompt that are served all the same get an eased SLO at once.
        is_welcome = request.on_infeasible is OnInfeasible.SERVE and request.group is None
        refusal = None if is_welcome else self._refusal(expected, model, rule)
        if refusal is not None and is_kept:
            expected.due_s = math.inf  # it goes behind all others
        if refusal is None or is_kept:
            self._quoter.add(expected)
            self._strictness.let_in(request)
        elif refusal.reason is EndReason.OVERLOAD:
            self._quoter.turn_away(expected)
            return refusal._replace(retry_after_s=self._returns.wait_s(expected))
        return refusal

    def gate(self, view: SchedulerView) -> Gate:
        self._num_decodes = sum([request.is_decode for request in view.running])
        self._crowd.note(view.running)
        return self._gate(view)

    def gate_beside(self, decodes: DecodeGroup, view: SchedulerView) -> Gate:
        self._num_decodes = decodes.num_decodes
        self._crowd.note(view.running, decodes)
        return self._gate(view)

    def planned(self, view: SchedulerView, gate: Gate, output: SchedulerOutput) -> None:
        for request in self._unjudged:  # what they take is done, too
            if request.request_id in output.num_scheduled_tokens:
                self._quoter.add_unjudged(request, view.model)
        self._quoter.note_step(view.now_s, view.model, output, self._num_decodes)
        self.refusals, self._refused = self._refused, {}

    def is_new(self, request: Request) -> bool:
        """Tell whether a waiting request has yet to be judged.

        The first of several answers to a prompt is judged for all of them.
        """
        if request.group is not None and request is not request.group.members[0]:
            return False
        is_judged = self._quoter.knows(request) or request.request_id in self._refused
        return not is_judged and not _is_preempted(request)

    def _gate(self, view: SchedulerView) -> Gate:
        """Judge the requests that were not judged on arrival."""
        quoter, model = self._quoter, view.model
        if self._refused:  # the step for which they were was not planned; they may have begun since
            waiting = {request.request_id for request in view.waiting}
            self._refused = {name: r for name, r in self._refused.items() if name in waiting}
        quoter.note_free(view.now_s)
        quoter.look(model)
        self._strictness.look()
        paused = self._note_preempted(view)
        new = self._new(view)
        new, self._unjudged = new[:MAX_JUDGED], [*new[MAX_JUDGED:], *paused]
        for request in new:
            refusal = self.judge(request, model, view.limits.deadline_rule)
            if refusal is not None:
                self._refused[request.request_id] = refusal
        if not self._refused:
            return Gate(view.waiting, {})
        through = Remaining(view.waiting, set(self._refused))
        return Gate(through, {name: each.reason for name, each in self._refused.items()})

    def _note_preempted(self, view: SchedulerView) -> list[Request]:
        """Count preempted requests that go before new ones; return those that wait until due.

        A decode that is ahead of its deadlines is computed anew when it is due, unless the policy
        serves by arrival.
        """
        preempted = [
            request
            for request in takewhile(_is_preempted, view.waiting)
            if not self._quoter.knows(request)
        ]
        if not preempted:
            return []
        anew_s = view.model.predict_prefill(max([r.num_tokens for r in preempted]))
        may_pause = self.prompt_order is not PromptOrder.ARRIVAL
        paused: list[Request] = []
        for request in preempted:
            is_ahead = request.num_output_tokens and not is_due(request, anew_s, 0.0, view.now_s)
            if is_ahead and may_pause:
                paused.append(request)
            else:
                self._quoter.add_unjudged(request, view.model)
        return paused

    def _new(self, view: SchedulerView) -> list[Request]:
        """Return the waiting requests that were not judged yet; they have arrived last."""
        return list(takewhile(self.is_new, latest_first(view.waiting)))[::-1]

    def _refusal(
        self, expected: Expected, model: LatencyModel, rule: DeadlineRule
    ) -> Refusal | None:
        """Return why the request is refused, without a time to come again."""
        request, slo = expected.request, expected.request.slo
        if self.refuse is Refuse.NOTHING:
            return None
        unkeepable = EndReason.UNKEEPABLE
        if (alone_s := request.server_s + expected.work.alone_s) > slo.ttft_s:
            return Refusal(unkeepable, "TTFT", alone_s, slo.ttft_s, None)
        spare_s = slo.ttft_s - alone_s if rule is DeadlineRule.ENVELOPE else 0.0
        tpot_s = slo.tpot_s + spare_s
        if request.max_tokens > 1 and (step_s := decode_s(request, model)) > tpot_s:
            return Refusal(unkeepable, "TPOT", step_s, slo.tpot_s, None)
        if self.refuse is not Refuse.LATE:
            return None
        awaited = self._quoter.awaited() if request.group is not None else ()
        if (crowded_s := self._crowd.too_long_s(request, model, awaited)) is not None:
            return Refusal(EndReason.OVERLOAD, "TPOT", crowded_s, slo.tpot_s, None)
        if (late_s := self._late_s(expected)) is None:
            return None
        return Refusal(EndReason.OVERLOAD, "TTFT", late_s, slo.ttft_s, None)

    def _late_s(self, expected: Expected) -> float | None:
        """Return the likely TTFT of a request that is to be refused; None to let it in."""
        least = self._strictness.least_chance
        pressure = self._quoter.pressure if self.busy_level > least else 0.0
        least += pressure * (self.busy_level - least)
        if expected.in_time < least:
            return expected.likely_s
        if not pressure:
            return None
        num_late, last_s = self._quoter.displaced(expected)
        is_worth_it = expected.in_time - num_late >= least
        return None if is_worth_it or last_s <= expected.request.slo.ttft_s else last_s


def _is_preempted(request: Request) -> bool:
    return request.num_preemptions > 0
