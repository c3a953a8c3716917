"""SLOs-Serve: take on only what stays feasible to the end, then keep every promise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import nsmallest
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from slosched.batch import BatchBuilder
from slosched.core import (
    DecodeGroup,
    EndReason,
    LatencyModel,
    PlansBesideDecodes,
    Request,
    SchedulerOutput,
    SchedulerView,
    tunable,
)
from slosched.policy.kit.checks import check_share
from slosched.policy.kit.decode_first import add_prefills, may_start_new, split_running
from slosched.policy.kit.deferred import add_without_preempting, all_in_time, are_alone, num_in_time
from slosched.policy.kit.drop import why_late
from slosched.policy.kit.lengths import Floats, OutputLengths
from slosched.policy.published.slosserve.best_subset import best_subset
from slosched.policy.published.slosserve.promised_load import PromisedLoad

_MAX_JUDGED = 6
_MAX_TOGETHER = 3
"""Arrivals that are looked at in one step, and of those that have room alone, how many at once.

The others wait for the next step.  It bounds the cost of a step in a burst.
"""
_MAX_CANDIDATES = 12
"""Those that the dynamic program looks at in one step: the most urgent ones, for its cost."""


class Admission(StrEnum):
    """How new requests are judged."""

    SIMULATE = "simulate"
    """In order of deadline, each if the load stays feasible with it: the later code."""
    DP = "dp"
    """The largest set that stays feasible: the paper's dynamic program."""


@dataclass
class SLOsServe(PlansBesideDecodes):
    """Admission by feasibility of all token deadlines to come; nothing admitted is dropped.

    1. New requests, the most urgent first: admitted if the load that is promised already stays
       feasible with them (`PromisedLoad`: first-token deadlines, token rate, KV cache, seats),
       else rejected.  With `admission=dp` as many of them as can be, by the dynamic program.
    2. The step lasts until the earliest deadline that can still be met.  Decodes whose token falls
       due within a TPOT after it are served first, then prompts by deadline, cut to the time, then
       the decodes that are ahead of their pace.

    Source: SLOs-Serve (arXiv 2504.08784), in the form of its later code (`gulang2019/SLOServe`,
    `csrc/adm_ctrl_scheduler.cc` at 377ad25): budget line → `PromisedLoad`, `batch_to_time` →
    the run's latency model, `online_slack` and the upper-percentile fit → `margin`.  The bank of
    prefill tokens is kept in seconds, which is the same where a token costs the same anywhere and
    right where it does not.  The dynamic program is in `_slosserve_dp`.  Left out: profits (all
    requests are worth the same here), speculative decoding, routing to the next replica, and the
    best-effort tier (what is infeasible is rejected).  Requests that were promised nothing are
    always admitted.

    Output lengths: the paper gives every system the true ones.  Here a request is expected to
    last as long as the finished ones that were longer than it is already.
    """

    admission: Admission = tunable(Admission.SIMULATE, Admission.DP)
    prior_output_tokens: int = 200
    """Expected output of a request before any has finished."""
    margin: float = tunable(0.05, 0.0, 0.1, 0.2)
    """Share of the time that is neither promised nor planned, against low predictions."""

    def __post_init__(self) -> None:
        check_share(margin=self.margin)
        self.reset()

    def reset(self) -> None:
        self._lengths = OutputLengths(self.prior_output_tokens)
        self._admitted: frozenset[str] = frozenset()
        """Ids of those that wait and were admitted; all that have begun were."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        model = view.model
        self._lengths.update()
        batch = BatchBuilder(view)
        decodes, begun = split_running(view.running)
        waiting = self._admit(batch, view, model, decodes, begun)
        self._pack(batch, view, model, _Queues(decodes, begun, waiting))
        for request in (*begun, *waiting):
            if request in batch:
                self._lengths.watch(request)
        return batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """If they are alone, and all done before the first is due, which still can be in time."""
        model = view.latency_model
        first_slack_s = decodes.first_deadline_s - view.now_s
        if (
            model is None
            or not are_alone(decodes, view)
            or first_slack_s <= model.predict_prefill(1)
            or not all_in_time(decodes, view, (1 - self.margin) * first_slack_s)
        ):
            return None
        self._lengths.update()
        self._admitted = frozenset()
        return SchedulerOutput()

    def _admit(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        model: LatencyModel,
        decodes: Sequence[Request],
        begun: Sequence[Request],
    ) -> list[Request]:
        """Judge the new ones; those that wait and were admitted, now or earlier."""
        known = self._admitted
        admitted = [r for r in view.waiting if r.request_id in known or r.num_preemptions]
        if len(admitted) < len(view.waiting):
            unknown = (
                r for r in view.waiting if r.request_id not in known and not r.num_preemptions
            )
            if self.admission is Admission.DP:
                new = nsmallest(_MAX_CANDIDATES, unknown, key=attrgetter("deadline_s"))
            else:
                new = list(islice(unknown, _MAX_JUDGED))
            decodes = [*decodes, *(r for r in view.swapped if r.is_decode)]
            prompts = [*begun, *(r for r in view.swapped if not r.is_decode), *admitted]
            load = PromisedLoad(view, model, self._lengths, decodes, prompts, margin=self.margin)
            admitted += self._judge(batch, view, load, new)
        self._admitted = frozenset(r.request_id for r in admitted)
        return admitted

    def _judge(
        self, batch: BatchBuilder, view: SchedulerView, load: PromisedLoad, new: list[Request]
    ) -> list[Request]:
        accepted = [r for r in new if r.deadline_s == math.inf]
        new = sorted((r for r in new if r.deadline_s < math.inf), key=attrgetter("deadline_s"))
        columns = load.columns_of(new)
        candidates = []
        for i, (request, has_room) in enumerate(zip(new, load.has_room(columns), strict=True)):
            if has_room:
                candidates.append(i)
            else:
                batch.reject(request, why_late(request, view.now_s))
        if not candidates:
            return accepted
        decide = _by_program if self.admission is Admission.DP else _by_simulation
        taken, refused = decide(load, columns[:, candidates])
        for i in refused:
            batch.reject(new[candidates[i]], EndReason.INFEASIBLE)
        return accepted + [new[candidates[i]] for i in taken]

    def _pack(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        model: LatencyModel,
        queues: _Queues,
    ) -> None:
        decodes, begun, waiting = queues
        limit_s = (1 - self.margin) * _earliest_s(view, model, decodes, (*begun, *waiting))
        victims = list(view.running)
        now_s = view.now_s
        ahead = [r for r in decodes if r.deadline_s - now_s - r.slo.tpot_s >= limit_s]
        are_ahead = {r.request_id for r in ahead}
        due = [r for r in decodes if r.request_id not in are_ahead] if ahead else decodes
        batch.add_preempting(due, victims)
        may_start = may_start_new(batch, view, begun)
        prefills = sorted(
            (*(r for r in begun if not batch.has_left(r)), *(waiting if may_start else ())),
            key=attrgetter("deadline_s"),
        )
        batch.time_limit_s = limit_s
        add_prefills(batch, prefills, reserved_blocks=batch.blocks_promised(begun))
        ahead.sort(key=attrgetter("deadline_s"))
        fitting = ahead[: num_in_time(batch, ahead)]
        batch.time_limit_s = math.inf
        add_without_preempting(batch, fitting)
        if not batch.num_scheduled_tokens:
            _serve_any(batch, victims, decodes, prefills)


def _by_simulation(load: PromisedLoad, new: Floats) -> tuple[Sequence[int], Sequence[int]]:
    """Whom to take of those that have room alone, and whom to refuse; the others have to wait."""
    # What is feasible together is so one by one; else the first is judged alone.
    together = new.shape[1] if new.shape[1] <= _MAX_TOGETHER else 1
    for num in dict.fromkeys((together, 1)):
        if load.add(new[:, :num]):
            return range(num), ()
    return (), (0,)


def _by_program(load: PromisedLoad, new: Floats) -> tuple[Sequence[int], Sequence[int]]:
    """The same; nobody has to wait."""
    taken = best_subset(load.room_beside(new), new)
    return taken, sorted({*range(new.shape[1])} - {*taken})


class _Queues(NamedTuple):
    """Who may be in the step."""

    decodes: Sequence[Request]
    begun: list[Request]
    waiting: list[Request]


def _earliest_s(
    view: SchedulerView,
    model: LatencyModel,
    decodes: Sequence[Request],
    prefills: Sequence[Request],
) -> float:
    """Seconds to the earliest deadline that can be met; infinite if there is none."""
    now_s = view.now_s
    decode_s = model.predict_prefill(1)
    slacks_s = [s for r in decodes if (s := r.deadline_s - now_s) > decode_s]
    slacks_s += [
        slack_s
        for r in prefills
        if (slack_s := r.deadline_s - now_s)
        > model.predict_prefill(r.num_uncomputed_tokens, r.num_computed_tokens)
    ]
    return min(slacks_s, default=math.inf)


def _serve_any(
    batch: BatchBuilder,
    victims: list[Request],
    decodes: Sequence[Request],
    prefills: Sequence[Request],
) -> None:
    """Nothing fits into the time: all decodes go on all the same, or else the first prompt."""
    batch.add_preempting(decodes, victims)
    if not batch.num_scheduled_tokens:
        add_prefills(batch, prefills[:1], reserved_blocks=0)
