"""Replay a trace on replicas behind a router, in virtual time."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slosched.core import EndReason, Policy, Request, RequestStatus
from slosched.fleet.router import Router
from slosched.fleet.view import ReplicaKind, ReplicaView
from slosched.simulator.closed_loop import Turns, in_order, run_some
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
    """Time after which a failed replica is back, with nothing in its memory; inf for never."""

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


def simulate_fleet(
    trace: Trace,
    policy: Policy,
    replicas: Sequence[ReplicaKind],
    router: Router,
    config: FleetConfig | None = None,
    *,
    seed: int = 0,
    on_row: OnRow | None = None,
) -> list[Request]:
    """Replay `trace` on `replicas`; return the requests in order of arrival, all ended.

    Arrivals are those of `simulate`, also of sessions in a closed loop.
    Each replica has its own copy of `policy`, and is the one of `simulate`.  A replica that fails
    loses its requests: those that have begun to answer end as a fault, as their clients have seen a
    part of the answer, and the others are routed again.  A request that finds no replica ends as a
    fault, too.  The replicas draw their disturbances from `seed`, the first one as `simulate` does.
    """
    fleet = _Fleet(trace, policy, replicas, router, config or FleetConfig(), seed, on_row)
    return fleet.play()


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
        requests = make_requests(trace, self._least_kv_tokens)
        self._turns = Turns(trace, requests)
        self._requests = {r.request_id: r for r in requests}
        self._up = [self._start(index) for index in range(len(replicas))]
        """The views of all replicas that take requests, in the order of the fleet."""
        router.reset()

    def play(self) -> list[Request]:
        """Route all requests, let them end, and return them."""
        changes = _changes(self._config)
        if self._is_closed_loop:
            return self._play_closed_loop(changes)
        for request in tuple(self._requests.values()):
            while changes and changes[0] <= request.arrival_s:
                self._change(changes.popleft())
            self._clock.advance_to(request.arrival_s)
            self._route(request)
        for at_s in changes:
            self._change(at_s)
        for view in self._up:
            view.simulated.run()
        return list(self._requests.values())

    def _play_closed_loop(self, changes: deque[float]) -> list[Request]:
        """Do the same for turns that wait for each other, which binds the replicas' times."""
        turns = self._turns
        while True:
            next_s = min(turns.next_s, changes[0] if changes else math.inf)
            if run_some((view.simulated for view in self._up), turns, next_s):
                continue
            if next_s == math.inf:
                return in_order(self._requests.values())
            if changes and changes[0] == next_s:
                self._change(changes.popleft())
            else:
                self._clock.advance_to(next_s)
                self._route(turns.take())

    def _change(self, at_s: float) -> None:
        """Let all replicas fail and start that do so at `at_s`, then route what was lost."""
        self._clock.advance_to(at_s)
        lost: list[Request] = []
        for failure in self._config.failures:
            if failure.at_s == at_s:
                view = next(view for view in self._up if view.index == failure.index)
                self._up.remove(view)
                lost += view.fail()
            if failure.at_s + self._config.startup_s == at_s:
                self._up.append(self._start(failure.index))
        self._up.sort(key=lambda view: view.index)
        for request in sorted(lost, key=lambda request: request.arrival_s):
            if request.num_output_tokens == 0:
                self._requests[request.request_id] = again = _again(request)
                self._route(again)
            else:
                self._turns.note_ended(request)

    def _route(self, request: Request) -> None:
        replicas = self._up
        if not replicas:
            request.status, request.end_reason = RequestStatus.ABORTED, EndReason.FAULT
            request.end_s = self._clock.now_s()
            self._turns.note_ended(request)
            return
        if request.num_prompt_tokens + request.max_tokens > self._least_kv_tokens:
            replicas = [view for view in replicas if view.fits(request)] or replicas
        self._router.route(request, replicas).send(request)

    def _start(self, index: int) -> ReplicaView:
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


def _changes(config: FleetConfig) -> deque[float]:
    """Return the times at which replicas fail or start, in order and each once."""
    times_s = {f.at_s for f in config.failures}
    times_s |= {f.at_s + config.startup_s for f in config.failures}
    return deque(sorted(times_s - {math.inf}))


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
