"""Replay a trace through the step loop in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from slosched.core import LatencyModel, Limits, Policy, Request
from slosched.engine.loop import Engine, StepRecord
from slosched.engine.overlap import OverlappedEngine
from slosched.kv import NO_PREFIX_HOST, KVCache, PrefixCaching, PrefixHost
from slosched.perfmodel import FittedModel, OnlineModel, scaled
from slosched.scheduler import Scheduler
from slosched.simulator.clients import Clients, WatchedByClients
from slosched.simulator.disturbances import UNDISTURBED, Disturbances
from slosched.simulator.grouped import GroupedSteps, OnRow
from slosched.simulator.open_loop import play_open_loop
from slosched.simulator.rehearsal import rehearse_in_line
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
    seed: int = 0

    @property
    def kv_tokens(self) -> int:
        """Return the tokens that the device's KV cache can hold."""
        return self.num_blocks * self.block_size


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
    """Replay `trace` open loop until every request has ended; return them in order of arrival.

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
    policy.reset()
    rehearse_in_line(policy)
    clock = VirtualClock()
    kv = KVCache(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        num_host_blocks=config.num_host_blocks,
        prefix_index=config.prefix_cache.new_index(),
        prefix_host=config.prefix_host,
    )
    predictor = _biased(scheduler_model or model, config.bias)
    if config.online:
        predictor = OnlineModel(predictor)
    if config.schedule_s:
        policy = TakesTime(policy, clock, config.schedule_s)
    scheduler = Scheduler(policy, kv, config.limits, predictor)
    lengths = {r.request_id: r.num_output_tokens for r in trace.requests}
    clients = Clients(scheduler, config.client_timeout_s)
    device_clock = VirtualClock() if config.overlap else clock
    executor = SimulatedExecutor(model, device_clock, lengths, config.disturbances, config.seed)
    watched = WatchedByClients(executor, device_clock, clients)
    if config.overlap:
        device = SimulatedDevice(watched, device_clock, clock)
        engine: Engine = OverlappedEngine(scheduler, device, clock)
    else:
        engine = Engine(scheduler, watched, clock)
    grouped = GroupedSteps(engine, executor, clock, clients, on_row)
    requests = make_requests(trace, capacity_tokens=config.num_blocks * config.block_size)
    enter_s = [request.arrival_s + config.per_request_s for request in requests]

    def run_some(next_s: float) -> None:
        if on_step is None and not config.overlap and grouped.run(next_s):
            return
        record = engine.step()
        if on_step is not None:
            on_step(record)
        if on_row is not None:
            on_row(record.row(), record.ended)

    play_open_loop(requests, enter_s, engine, clients, clock, run_some)
    return requests


def _biased(model: LatencyModel, bias: float) -> LatencyModel:
    if bias == 1:
        return model
    if not 0 < bias < math.inf:
        raise ValueError(f"bias must be a positive, finite factor, not {bias!r}")
    if not isinstance(model, FittedModel):
        raise ValueError(f"only a fitted model can be off by a bias, not a {type(model).__name__}")
    return scaled(model, 1 / bias)


def make_requests(trace: Trace, capacity_tokens: int) -> list[Request]:
    """Make the requests as a client would send them, without their output lengths."""
    longest = max(r.num_output_tokens for r in trace.requests)
    return [
        Request(
            request_id=r.request_id,
            arrival_s=r.arrival_s,
            num_prompt_tokens=r.num_prompt_tokens,
            max_tokens=max(
                r.num_output_tokens, min(longest, capacity_tokens - r.num_prompt_tokens)
            ),
            slo=r.slo,
            priority=r.priority,
            lora_id=r.lora_id,
            prefix_hashes=r.prefix_hashes,
            prefix_block_tokens=trace.prefix_block_tokens,
        )
        for r in trace.requests
    ]
