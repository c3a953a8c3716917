"""SLOs-Serve: admit only requests that stay feasible to the end, then keep every SLO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import nsmallest
from itertools import filterfalse
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
from slosched.policy.kit.make_way import come_back, make_way
from slosched.policy.published.slosserve.best_subset import best_subset
from slosched.policy.published.slosserve.promised_load import PromisedLoad

_MAX_JUDGED = 32
_MAX_SWEEPS = 8
"""Arrivals, the most urgent, that are judged in one step, and how often the load is swept for them.

Those who are not judged wait for the next step.  This bounds the cost of a step in a burst.
"""
_MAX_CANDIDATES = 12
"""Arrivals, the most urgent, that the dynamic program judges in one step; it bounds the cost."""


class Admission(StrEnum):
    """Methods of judging new requests."""

    SIMULATE = "simulate"
    """Admit each, by deadline, if the load stays feasible with it: the authors' later code."""
    DP = "dp"
    """Admit the largest set that stays feasible: the paper's dynamic program."""


@dataclass
class SLOsServe(PlansBesideDecodes):
    """Admission by feasibility of all token deadlines to come; nothing admitted is dropped.

    1. New requests, the most urgent first, are admitted if the load that is admitted already stays
       feasible with them (`PromisedLoad`: first-token deadlines, token rate, KV cache, seats), else
       rejected.  KV cache that requests share counts once.  With `admission=dp` the dynamic
       program admits as many of them as possible.
    2. The step lasts until the earliest deadline that can still be met.  Decodes whose token falls
       due within a TPOT after it are served first, then prompts by deadline, cut to the time, then
       the decodes that are ahead of their pace.
    3. Requests without an SLO are best effort: they are preempted where others lack KV cache or
       seats, keep their tokens and drop their KV cache (kit/make_way.py).

    Source: SLOs-Serve (arXiv 2504.08784), in the form of its later code (`gulang2019/SLOServe`,
    `csrc/adm_ctrl_scheduler.cc` at 377ad25): budget line → `PromisedLoad`, `batch_to_time` → the
    run's latency model, `online_slack` and the upper-percentile fit → `margin`.  The bank of
    prefill tokens is kept in seconds: a prompt shorter than a step of one TPOT takes of it what its
    tokens cost in such a step, as in the authors' code, and a longer one its own time.  The dynamic
    program is in `best_subset.py`.  Left out: profits (all requests are worth the same here),
    speculative decoding, routing to the next replica, and the way of infeasible requests into the
    best-effort tier (they are rejected).  Requests without an SLO are always admitted; their
    decodes are always ahead.

    The paper gives every system the true output lengths.  Here a request is expected to last as
    long as the finished requests that were longer than it is already.
    """

    admission: Admission = tunable(Admission.SIMULATE, Admission.DP)
    prior_output_tokens: int = 200
    """Expected output of a request before any has finished."""
    margin: float = tunable(0.05, 0.0, 0.1, 0.2)
    """Share of the time that is left unused, against predictions that are too low."""

    def __post_init__(self) -> None:
        check_share(margin=self.margin)
        self.reset()

    def reset(self) -> None:
        self._lengths = OutputLengths(self.prior_output_tokens)
        self._admitted: frozenset[str] = frozenset()
        """Ids of the waiting requests that were admitted; all that have begun were, too."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        model = view.model
        self._lengths.update()
        batch = BatchBuilder(view)
        running = sorted(view.running, key=_is_best_effort)
        decodes, begun = split_running(running)
        waiting = self._admit(batch, view, model, decodes, begun)
        if make_way(batch, view, sorted((*begun, *waiting), key=attrgetter("deadline_s"))):
            running = [request for request in running if not batch.has_left(request)]
            decodes, begun = split_running(running)
        waiting = come_back(waiting, view.kv)
        self._pack(batch, view, model, _Queues(running, decodes, begun, waiting))
        for request in (*begun, *waiting):
            if request in batch:
                self._lengths.watch(request)
        return batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Plan nothing else if there are only decodes, and all end before the first is due."""
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
        """Judge the new requests; return the waiting ones that were admitted, now or earlier."""
        known = self._admitted

        def is_admitted(r: Request) -> bool:
            return r.request_id in known or r.num_preemptions > 0 or r.deadline_s == math.inf

        admitted = list(filter(is_admitted, view.waiting))
        if len(admitted) < len(view.waiting):
            unknown = filterfalse(is_admitted, view.waiting)
            most = _MAX_CANDIDATES if self.admission is Admission.DP else _MAX_JUDGED
            new = nsmallest(most, unknown, key=attrgetter("deadline_s"))
            decodes = [*decodes, *(r for r in view.swapped if r.is_decode)]
            # Best effort makes way, and its tokens can be left out of any step.
            decodes = list(filterfalse(_is_best_effort, decodes))
            prompts = [*begun, *(r for r in view.swapped if not r.is_decode), *admitted]
            load = PromisedLoad(view, model, self._lengths, decodes, prompts, margin=self.margin)
            admitted += self._judge(batch, view, load, new)
        self._admitted = frozenset(r.request_id for r in admitted)
        return admitted

    def _judge(
        self, batch: BatchBuilder, view: SchedulerView, load: PromisedLoad, new: list[Request]
    ) -> list[Request]:
        columns = load.columns_of(new)
        candidates = []
        for i, (request, has_room) in enumerate(zip(new, load.has_room(columns), strict=True)):
            if has_room:
                candidates.append(i)
            else:
                batch.reject(request, why_late(request, view.now_s))
        if not candidates:
            return []
        decide = _by_program if self.admission is Admission.DP else _by_simulation
        taken, refused = decide(load, columns[:, candidates])
        for i in refused:
            batch.reject(new[candidates[i]], EndReason.INFEASIBLE)
        return [new[candidates[i]] for i in taken]

    def _pack(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        model: LatencyModel,
        queues: _Queues,
    ) -> None:
        running, decodes, begun, waiting = queues
        num_made_way = len(batch.preempted)
        limit_s = (1 - self.margin) * _earliest_s(view, model, decodes, (*begun, *waiting))
        victims = list(running)
        now_s = view.now_s
        ahead = []
        if limit_s < math.inf:
            ahead = [r for r in decodes if _can_wait_s(r, now_s) >= limit_s]
        are_ahead = {r.request_id for r in ahead}
        due = [r for r in decodes if r.request_id not in are_ahead] if ahead else decodes
        batch.add_preempting(due, victims)
        may_start = may_start_new(batch, view, begun, num_made_way)
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


def _is_best_effort(request: Request) -> bool:
    """Tell whether no token of it is due, so that it is preempted before any other."""
    return request.deadline_s == math.inf


def _can_wait_s(decode: Request, now_s: float) -> float:
    """Return how long a decode can be left out of steps; for ever if no token of it is due."""
    if decode.deadline_s == math.inf:
        return math.inf
    return decode.deadline_s - now_s - decode.slo.tpot_s


def _by_simulation(load: PromisedLoad, new: Floats) -> tuple[Sequence[int], Sequence[int]]:
    """Return the places of requests to admit and of those to reject; the others have to wait.

    They are judged one by one in order of their deadlines.  But what is feasible together is so
    one by one, so that all are tried at once, and the first that is infeasible is found by halves.
    """
    taken: list[int] = []
    refused: list[int] = []
    first, end = 0, new.shape[1]
    too_many = end + 1
    """Up to this place they are infeasible together; beyond the end, nothing is known of it."""
    num_sweeps = 0
    while first < end and num_sweeps < _MAX_SWEEPS:
        if too_many == first + 1:
            refused.append(first)
            first, too_many = first + 1, end + 1
            continue
        num = end - first if too_many > end else (too_many - first) // 2
        if load.add(new[:, first : first + num]):
            taken += range(first, first + num)
            first += num
        else:
            too_many = first + num
        num_sweeps += 1
    return taken, refused


def _by_program(load: PromisedLoad, new: Floats) -> tuple[Sequence[int], Sequence[int]]:
    """Return the places of requests to admit and of those to reject, which are all others."""
    taken = best_subset(load.room_beside(new), new)
    return taken, sorted({*range(new.shape[1])} - {*taken})


class _Queues(NamedTuple):
    """The requests that may be in the step; `running` are the decodes and the begun prompts."""

    running: Sequence[Request]
    decodes: Sequence[Request]
    begun: list[Request]
    waiting: list[Request]


def _earliest_s(
    view: SchedulerView,
    model: LatencyModel,
    decodes: Sequence[Request],
    prefills: Sequence[Request],
) -> float:
    """Return the seconds to the earliest deadline that can be met; infinite if there is none."""
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
    """Serve all decodes although none fits into the time, or else the first prompt."""
    batch.add_preempting(decodes, victims)
    if not batch.num_scheduled_tokens:
        add_prefills(batch, prefills[:1], reserved_blocks=0)
