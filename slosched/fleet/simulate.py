"""Replay a trace on replicas behind a router, in virtual time."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from slosched.core import EndReason, Policy, Request, RequestStatus
from slosched.fleet.roster import Roster
from slosched.fleet.router import Router
from slosched.fleet.scaler import FleetState
from slosched.fleet.scaling import Decisions, Lease, OnLease, Scaling
from slosched.fleet.spec import make_scaler
from slosched.fleet.view import ReplicaKind, ReplicaView
from slosched.simulator.closed_loop import Turns, in_order, run_some
from slosched.simulator.frames import with_room_for_frames
from slosched.simulator.grouped import OnRow
from slosched.simulator.simulate import SimulatedReplica, make_requests
from slosched.simulator.simulated import VirtualClock
from slosched.workload.trace import Trace

_SEED_STRIDE = 1_000_003
"""Distance of the seeds of two replicas, so that those of neighbouring runs do not meet."""


@dataclass(frozen=True, order=True)
class Failure:
    """The end of a replica: its device and all that its memory holds are lost."""

    at_s: float
    index: int
    """The replica's place in the fleet."""


@dataclass(frozen=True)
class FleetConfig:
    """What happens to a fleet, whatever its replicas are."""

    delay_s: float = 0.0
    """How old the state is that the router sees of a replica, and what it sent itself."""
    failures: tuple[Failure, ...] = ()
    startup_s: float = math.inf
    """Time after which a failed replica is back, with nothing in its memory; inf for never.

    It is also the time from the decision for a new replica until it takes requests."""

    def __post_init__(self) -> None:
        if not 0 <= self.delay_s < math.inf:
            raise ValueError(f"a router's delay must be finite seconds >= 0, not {self.delay_s!r}")
        if not self.startup_s > 0:
            raise ValueError(f"the start-up time must be positive, not {self.startup_s!r} s")

    def check_failures(self, num_replicas: int) -> None:
        """Raise ValueError if a replica that does not exist, or does not run, is to fail."""
        back_s = [0.0] * num_replicas
        for failure in sorted(self.failures):
            if not (0 <= failure.index < num_replicas and 0 <= failure.at_s < math.inf):
                raise ValueError(
                    f"replica {failure.index} cannot fail at {failure.at_s} s: there are replicas "
                    f"0 to {num_replicas - 1}, and time begins at 0"
                )
            if failure.at_s < back_s[failure.index]:
                raise ValueError(
                    f"replica {failure.index} cannot fail at {failure.at_s:g} s: it has failed "
                    f"before and is back at {back_s[failure.index]:g} s"
                )
            back_s[failure.index] = failure.at_s + self.startup_s


@with_room_for_frames
def simulate_fleet(
    trace: Trace,
    policy: Policy,
    replicas: Sequence[ReplicaKind],
    router: Router,
    config: FleetConfig | None = None,
    *,
    scaling: Scaling | None = None,
    seed: int = 0,
    on_row: OnRow | None = None,
    on_lease: OnLease | None = None,
) -> list[Request]:
    """Replay `trace` on `replicas`; return the requests in order of arrival, all ended.

    Arrivals are those of `simulate`, also of sessions in a closed loop.
    Each replica has its own copy of `policy`, and is the one of `simulate`.  A replica that fails
    loses its requests: those that have begun to answer end as a fault, as their clients have seen a
    part of the answer, and the others are routed again.  A request that finds no replica ends as a
    fault, too.  The replicas draw their disturbances from `seed`, the first one as `simulate` does.

    With `scaling` there are at most as many replicas at a time as `replicas` has, all of one kind.
    The fewest that it allows serve from the begin.  Each new one takes requests after
    `config.startup_s`; one that is closed gets no more requests and serves those that it has.  One
    that fails is replaced when the scaler next wants more than there are.  The last decision is
    made after the last arrival.  `on_lease` gets the lease of each replica at the end.
    """
    config = config or FleetConfig()
    fleet = _Fleet(trace, policy, replicas, router, config, scaling, seed, on_row)
    requests = fleet.play()
    if on_lease is not None:
        for lease in fleet.leases():
            on_lease(lease)
    return requests


def check_single_answers(trace: Trace) -> None:
    """Raise ValueError if a request of the trace is to be answered several times."""
    if several := next((r for r in trace.requests if r.n > 1), None):
        raise ValueError(
            f"request {several.request_id!r} wants {several.n} answers (n): a fleet is "
            "simulated with one answer to each request; replay the trace on one replica, or "
            "leave out its column n"
        )


def seed_of(index: int, seed: int) -> int:
    """Return the seed of a replica in a run of this seed; the first replica has the run's own."""
    return seed + _SEED_STRIDE * index


class _Fleet:
    """The replicas of one run, and the requests that they were sent."""

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        replicas: Sequence[ReplicaKind],
        router: Router,
        config: FleetConfig,
        scaling: Scaling | None,
        seed: int,
        on_row: OnRow | None,
    ) -> None:
        if not replicas:
            raise ValueError("a fleet needs at least one replica")
        config.check_failures(len(replicas))
        check_single_answers(trace)
        self._policy, self._replicas, self._router = policy, replicas, router
        self._config, self._seed, self._on_row = config, seed, on_row
        self._clock = VirtualClock()
        self._least_kv_tokens = min(replica.config.kv_tokens for replica in replicas)
        self._lengths = {r.request_id: r.num_output_tokens for r in trace.requests}
        self._is_closed_loop = trace.is_closed_loop
        self._last_arrival_s = trace.duration_s
        requests = make_requests(trace, self._least_kv_tokens)
        self._turns = Turns(trace, requests)
        self._requests = {r.request_id: r for r in requests}
        self._changes = sorted({failure.at_s for failure in config.failures})
        """Heap of the times at which replicas fail or are ready, or the scaler decides."""
        self._decisions: Decisions | None = None
        self._decides_s = math.inf
        num_up = len(replicas)
        if scaling is not None:
            scaling.check(replicas, config.startup_s)
            num_up = scaling.min_replicas
            self._decisions = Decisions(make_scaler(scaling.scaler), num_up, len(replicas))
            self._decides_s = self._decisions.scaler.every_s
            heappush(self._changes, self._decides_s)
        self._roster = Roster(replicas, self._new_replica, num_up)
        router.reset()

    def play(self) -> list[Request]:
        """Route all requests, let them end, and return them in order of arrival."""
        if self._is_closed_loop:
            self._play_closed_loop()
            return in_order(self._requests.values())
        for request in tuple(self._requests.values()):
            self._change_until(request.arrival_s)
            self._clock.advance_to(request.arrival_s)
            self._arrive(request)
        self._change_until(math.inf)
        for view in self._roster.running:
            view.simulated.run()
        return list(self._requests.values())

    def leases(self) -> list[Lease]:
        """Return the leases of all replicas, once `play` is over."""
        ends_s = [request.end_s for request in self._requests.values()]
        return self._roster.end(max(end_s for end_s in ends_s if end_s is not None))

    def _play_closed_loop(self) -> None:
        """Play turns that wait for each other, which binds the replicas' times."""
        turns = self._turns
        while True:
            next_change_s = self._changes[0] if self._changes else math.inf
            next_s = min(turns.next_s, next_change_s)
            if run_some((view.simulated for view in self._roster.running), turns, next_s):
                continue
            if next_s == math.inf:
                return
            if next_change_s == next_s:
                self._change_until(next_s)
            else:
                self._clock.advance_to(next_s)
                self._arrive(turns.take())

    def _change_until(self, until_s: float) -> None:
        """Let happen what is due until then, that time included."""
        while self._changes and self._changes[0] <= until_s:
            at_s = self._changes[0]
            while self._changes and self._changes[0] == at_s:
                heappop(self._changes)
            self._change(at_s)

    def _change(self, at_s: float) -> None:
        """Let replicas fail and open that do so at `at_s`, scale, and route again what was lost."""
        self._clock.advance_to(at_s)
        self._roster.open_ready(at_s)
        lost: list[Request] = []
        for failure in self._config.failures:
            if failure.at_s == at_s:
                lost += self._roster.fail(failure.index, at_s)
                if self._decisions is None and self._config.startup_s < math.inf:
                    self._roster.start(failure.index, at_s, self._ready_s())
        if self._decisions is not None and at_s == self._decides_s:
            self._scale(self._decisions)
        for request in sorted(lost, key=lambda request: request.arrival_s):
            if request.num_output_tokens == 0:
                self._requests[request.request_id] = again = _again(request)
                self._route(again)
            else:
                self._turns.note_ended(request)

    def _scale(self, decisions: Decisions) -> None:
        """Let the scaler decide, and start or close replicas accordingly."""
        now_s, roster, startup_s = self._clock.now_s(), self._roster, self._config.startup_s
        kind = self._replicas[0]
        state = FleetState(now_s, tuple(roster.up), roster.num_starting, kind, startup_s)
        roster.resize(decisions.num_wanted(state), now_s, self._ready_s())
        if self._goes_on():
            self._decides_s = now_s + decisions.scaler.every_s
            heappush(self._changes, self._decides_s)

    def _ready_s(self) -> float:
        """Return when a replica that starts now takes requests, and note that time."""
        ready_s = self._clock.now_s() + self._config.startup_s
        heappush(self._changes, ready_s)
        return ready_s

    def _goes_on(self) -> bool:
        """Tell whether requests are still to arrive; in a closed loop, or to end."""
        if not self._is_closed_loop:
            return self._clock.now_s() < self._last_arrival_s
        has_work = any(view.simulated.known_until_s < math.inf for view in self._roster.running)
        return has_work or self._turns.next_s < math.inf

    def _arrive(self, request: Request) -> None:
        if self._decisions is not None:
            self._decisions.scaler.note_arrival(request)
        self._route(request)

    def _route(self, request: Request) -> None:
        replicas = self._roster.up
        if not replicas:
            request.status, request.end_reason = RequestStatus.ABORTED, EndReason.FAULT
            request.end_s = self._clock.now_s()
            self._turns.note_ended(request)
            return
        if request.num_prompt_tokens + request.max_tokens > self._least_kv_tokens:
            replicas = [view for view in replicas if view.fits(request)] or replicas
        self._router.route(request, replicas).send(request)

    def _new_replica(self, index: int) -> ReplicaView:
        """Return the view of a replica that has nothing in its memory."""
        kind = self._replicas[index]
        now_s, failures = self._clock.now_s(), self._config.failures
        fails_s = [f.at_s for f in failures if f.index == index and f.at_s >= now_s]
        simulated = SimulatedReplica(
            copy.deepcopy(self._policy),
            kind.model,
            replace(kind.config, seed=seed_of(index, self._seed)),
            self._lengths,
            fails_s=min(fails_s, default=math.inf),
            on_row=self._on_row,
            stops_at_ends=self._is_closed_loop,
        )
        return ReplicaView(index, kind, simulated, self._clock, self._config.delay_s)


def _again(request: Request) -> Request:
    """Return a request as its client sent it, whatever became of it."""
    return Request(
        request_id=request.request_id,
        arrival_s=request.arrival_s,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        slo=request.asked_slo or request.slo,
        priority=request.priority,
        on_infeasible=request.on_infeasible,
        tier=request.tier,
        tenant=request.tenant,
        lora_id=request.lora_id,
        session_id=request.session_id,
        program_s=request.program_s,
        prefix_hashes=request.prefix_hashes,
        prefix_block_tokens=request.prefix_block_tokens,
    )
