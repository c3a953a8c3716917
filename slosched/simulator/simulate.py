"""Replay a trace through the step loop in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slosched.core import LatencyModel, Limits, Policy, Request, fan_out
from slosched.engine.loop import Engine, StepRecord
from slosched.engine.overlap import OverlappedEngine
from slosched.kv import NO_PREFIX_HOST, Eviction, Known, KVCache, PrefixCaching, PrefixHost
from slosched.kv.eviction.order import KnownReturn
from slosched.metrics import StepRow
from slosched.perfmodel import FittedModel, OnlineModel, scaled
from slosched.scheduler import Scheduler
from slosched.simulator.clients import Clients, WatchedByClients
from slosched.simulator.closed_loop import Turns, in_order, play
from slosched.simulator.disturbances import UNDISTURBED, Disturbances
from slosched.simulator.drafts import AcceptedDrafts, SimulatedDrafts
from slosched.simulator.frames import with_room_for_frames
from slosched.simulator.grouped import GroupedSteps, OnRow
from slosched.simulator.known_returns import known_returns
from slosched.simulator.open_loop import OpenLoop
from slosched.simulator.race import rehearse_in_line
from slosched.simulator.scheduling_time import ScheduleTime, SimulatedDevice, TakesTime
from slosched.simulator.simulated import SimulatedExecutor, VirtualClock
from slosched.workload.trace import Trace


@dataclass(frozen=True)
class SimulationConfig:
    """The simulated replica, which is the same for every policy of a comparison."""

    limits: Limits = field(default_factory=Limits)
    num_blocks: int = 8192
    """KV blocks on the device."""
    block_size: int = 16
    num_host_blocks: int = 8192
    """KV blocks in host memory, for preemption by swap."""
    prefix_cache: PrefixCaching = PrefixCaching.OFF
    """Whether requests share KV blocks of equal content, by the trace's prefix hashes."""
    eviction: Eviction = Eviction.LRU
    """The order in which the prefix cache evicts what no request holds."""
    window_tokens: int | None = None
    """The last tokens that a token sees, itself included, if all layers have a sliding window: then
    requests give back the KV blocks that no token sees any more.  None for a model that sees all.
    """
    prefix_host: PrefixHost = NO_PREFIX_HOST
    """Host memory for blocks that the prefix cache evicts."""
    disturbances: Disturbances = UNDISTURBED
    """Differences between the times of the device's steps and its model."""
    bias: float = 1.0
    """A step's time over what the policy's latency model says; the device does not change."""
    online: bool = False
    """Whether the policy's latency model learns from the steps."""
    schedule_s: ScheduleTime = 0.0
    """Time of a decision: seconds, or "measured", which differs from run to run."""
    overlap: bool = False
    """Whether the next step is planned while one runs, so that the decision costs no time."""
    per_request_s: float = 0.0
    """What the server adds to a request's TTFT outside of its engine (`ServerTime`)."""
    client_timeout_s: float | None = None
    """The time from its arrival after which a client without its whole answer disconnects."""
    drafts: SimulatedDrafts | None = None
    """Speculative decoding; None for none."""
    seed: int = 0

    @property
    def kv_tokens(self) -> int:
        """Return the tokens that the device's KV cache can hold."""
        return self.num_blocks * self.block_size


@with_room_for_frames
def simulate(
    trace: Trace,
    policy: Policy,
    model: LatencyModel,
    config: SimulationConfig | None = None,
    *,
    scheduler_model: LatencyModel | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    on_row: OnRow | None = None,
) -> list[Request]:
    """Replay `trace` until every request has ended; return them in order of arrival.

    Requests arrive at their own times, however far the engine is, except for turns of sessions that
    have a `think_s`: these arrive that time after the turn before them has ended.

    A request of the trace with `n` above 1 is a group of n requests, all of which are returned.

    The device takes as long as `model` says. The policy predicts with `scheduler_model`. By default
    that is the same model, a perfect prediction that no real engine has. The prediction is off by
    `config.bias`, and is corrected as the replay goes on if `config.online`.  Only the device knows
    each request's true output length. A request's limit `max_tokens` is the longest output of the
    whole trace, as far as the KV cache allows.  `on_row` is called with a row of every step and the
    requests that ended in it.  `on_step` gets the full record of the step, request by request,
    which takes several times as long.

    A request reaches the engine `config.per_request_s` after its arrival.  So its deadlines are
    those of its client, and its TTFT is what the client sees.  It is aborted if it has not ended
    `config.client_timeout_s` after its arrival.
    """
    config = config or SimulationConfig()
    requests = make_requests(trace, config.kv_tokens)
    replica = SimulatedReplica(
        policy,
        model,
        config,
        output_lengths(trace, requests),
        scheduler_model=scheduler_model,
        on_step=on_step,
        on_row=on_row,
        stops_at_ends=trace.is_closed_loop,
        known_return=known_returns(trace),
    )
    if trace.is_closed_loop:
        play(replica, Turns(trace, requests))
        requests = in_order(requests)
    else:
        for request in requests:
            replica.add(request)
        replica.run()
    return [member for request in requests for member in members_of(request)]


class SimulatedReplica:
    """One replica in virtual time: an engine with its device, and the requests sent to it."""

    def __init__(
        self,
        policy: Policy,
        model: LatencyModel,
        config: SimulationConfig,
        output_lengths: Mapping[str, int],
        *,
        scheduler_model: LatencyModel | None = None,
        fails_s: float = math.inf,
        on_step: Callable[[StepRecord], None] | None = None,
        on_row: OnRow | None = None,
        stops_at_ends: bool = False,
        known_return: KnownReturn | None = None,
    ) -> None:
        """Prepare it; the arguments are those of `simulate`.

        `output_lengths` gives the true number of output tokens by request id.  At `fails_s` all of
        its requests end as a fault.  `run_until_end` needs `stops_at_ends`.  `known_return` is the
        future, for an order of eviction that knows it.
        """
        policy.reset()
        rehearse_in_line(policy)
        clock = VirtualClock()
        predictor = _biased(scheduler_model or model, config.bias)
        if config.online:
            predictor = OnlineModel(predictor)
        known = Known(config.num_blocks, config.block_size, predictor, known_return)
        kv = KVCache(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_host_blocks=config.num_host_blocks,
            prefix_index=config.prefix_cache.new_index(config.eviction, known),
            prefix_host=config.prefix_host,
            window_tokens=config.window_tokens,
        )
        if config.schedule_s:
            policy = TakesTime(policy, clock, config.schedule_s)
        drafts = config.drafts
        speculation = None if drafts is None else drafts.speculation()
        self.scheduler = Scheduler(policy, kv, config.limits, predictor, speculation)
        self.clients = Clients(self.scheduler, config.client_timeout_s, fails_s)
        self.clock = clock
        self._per_request_s = config.per_request_s
        device_clock = VirtualClock() if config.overlap else clock
        executor = SimulatedExecutor(
            model,
            device_clock,
            output_lengths,
            config.disturbances,
            config.seed,
            None if drafts is None else AcceptedDrafts(drafts.acceptance, config.seed),
        )
        watched = WatchedByClients(executor, device_clock, self.clients)
        if config.overlap:
            device = SimulatedDevice(watched, device_clock, clock)
            self.engine: Engine = OverlappedEngine(self.scheduler, device, clock)
        else:
            self.engine = Engine(self.scheduler, watched, clock)
        self.ended: list[Request] = []
        """Requests that have ended; whoever takes them empties the list."""
        self._on_step, self._on_row = on_step, on_row
        on_grouped = None if on_row is None else self._tell
        self._grouped = GroupedSteps(
            self.engine, executor, clock, self.clients, on_grouped, stops_at_ends=stops_at_ends
        )
        self._may_group = on_step is None and not config.overlap and speculation is None
        self._arrivals = OpenLoop(self.engine, self.clients, clock, self._run_some)

    def add(self, request: Request, arrival_s: float | None = None) -> None:
        """Send a request, by default at its own arrival; none may arrive before an earlier one."""
        arrives_s = request.arrival_s if arrival_s is None else arrival_s
        request.server_s = self._per_request_s
        self._arrivals.add(request, arrives_s + self._per_request_s)

    def take_over(self, request: Request, now_s: float) -> None:
        """Let a request that has emitted tokens elsewhere run on here from `now_s` on.

        Raises ValueError if it lacks a seat or KV blocks.
        """
        self.clock.advance_to(now_s)
        if not self.scheduler.take_over(request):
            raise ValueError(f"there is no room to take over {request.request_id!r}")
        self.clients.watch(request)
        self._grouped.take_in(request)

    def run(self, until_s: float = math.inf) -> None:
        """Run all steps that begin before `until_s`; by default, until every request has ended."""
        self._arrivals.run(until_s)

    def run_until_end(self, until_s: float) -> list[Request]:
        """Run steps that begin before `until_s` until one ends requests, and return these."""
        num_before = len(self.ended)
        while len(self.ended) == num_before and self._arrivals.run_once(until_s):
            pass
        return self.ended[num_before:]

    @property
    def known_until_s(self) -> float:
        """Return the time up to which it has been simulated, if nothing more is sent to it."""
        if self.engine.has_work:
            return self.clock.now_s()
        entering = self._arrivals.entering
        return max(entering[0][0], self.clock.now_s()) if entering else math.inf

    def fail(self, fails_s: float) -> list[Request]:
        """Run until it fails; return the requests that were on their way and never reached it."""
        self.run(fails_s)
        self.clients.leave(fails_s)
        self.ended += self.engine.take_ended()
        entering = self._arrivals.entering
        on_their_way = [request for _, request in entering]
        entering.clear()
        return on_their_way

    def _run_some(self, next_s: float) -> None:
        if self._may_group and self._grouped.run(next_s):
            self.ended += self.engine.take_ended()
            return
        record = self.engine.step()
        if self._on_step is not None:
            self._on_step(record)
        if self._on_row is None:
            self.ended += record.ended
        else:
            self._tell(record.row(), record.ended)

    def _tell(self, row: StepRow, ended: Sequence[Request]) -> None:
        self.ended += ended
        assert self._on_row is not None
        self._on_row(row, ended)


def _biased(model: LatencyModel, bias: float) -> LatencyModel:
    if bias == 1:
        return model
    if not 0 < bias < math.inf:
        raise ValueError(f"bias must be a positive, finite factor, not {bias!r}")
    if not isinstance(model, FittedModel):
        raise ValueError(f"only a fitted model can be off by a bias, not a {type(model).__name__}")
    return scaled(model, 1 / bias)


def make_requests(trace: Trace, capacity_tokens: int) -> list[Request]:
    """Make the requests as a client would send them, without their output lengths.

    One with siblings is the first of its group, and is sent for all of them.
    """
    longest = max(r.num_output_tokens for r in trace.requests)
    requests = [
        Request(
            request_id=r.request_id,
            arrival_s=r.arrival_s,
            num_prompt_tokens=r.num_prompt_tokens,
            max_tokens=output_limit(
                r.num_prompt_tokens, r.num_output_tokens, longest, capacity_tokens
            ),
            slo=r.slo,
            priority=r.priority,
            on_infeasible=r.on_infeasible,
            tier=r.tier,
            tenant=r.tenant,
            lora_id=r.lora_id,
            session_id=r.session_id,
            program_s=r.program_s,
            prefix_hashes=r.prefix_hashes,
            prefix_block_tokens=trace.prefix_block_tokens,
        )
        for r in trace.requests
    ]
    for request, r in zip(requests, trace.requests, strict=True):
        fan_out(request, r.n)
    return requests


def output_limit(
    num_prompt_tokens: int, num_output_tokens: int, longest: int, capacity_tokens: int
) -> int:
    """Return the limit on output tokens with which a client sends a request.

    It is the `longest` output of the whole trace, as far as the KV cache allows, and never less
    than what the request will emit.
    """
    return max(num_output_tokens, min(longest, capacity_tokens - num_prompt_tokens))


def members_of(request: Request) -> Sequence[Request]:
    """Return a request with its siblings, if it has any."""
    return (request,) if request.group is None else request.group.members


def output_lengths(trace: Trace, requests: Iterable[Request]) -> dict[str, int]:
    """Return the true number of output tokens by request id, also of the siblings of `requests`.

    `requests` are those of the trace, in its order.
    """
    return {
        member.request_id: r.num_output_tokens
        for request, r in zip(requests, trace.requests, strict=True)
        for member in members_of(request)
    }
