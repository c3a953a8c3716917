"""Play one scenario to its end, and check every step of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slosched.core import EndReason, Policy, Request, SchedulerOutput, fan_out
from slosched.engine.checked_memory import CheckedMemory
from slosched.engine.loop import Engine
from slosched.engine.overlap import OverlappedEngine
from slosched.kv import KVCache
from slosched.scheduler import Scheduler
from slosched.simulator.drafts import AcceptedDrafts
from slosched.simulator.scheduling_time import SimulatedDevice
from slosched.simulator.simulated import SimulatedExecutor, VirtualClock
from slosched.testing.plans import PlanLaw, Watched, check_ends, require
from slosched.testing.scenario import Scenario, ScenarioRequest, device_model


@dataclass
class Run:
    """The result of playing a scenario: every decision, and the requests at their end."""

    requests: list[Request]
    decisions: list[tuple[float, SchedulerOutput]] = field(default_factory=list)


def play(
    policy: Policy,
    scenario: Scenario,
    name: Callable[[int], str] = "r{}".format,
    kv: KVCache | None = None,
    laws: Sequence[PlanLaw] = (),
) -> Run:
    """Run a scenario to its end and check every step; `laws` are additional laws for each plan."""
    policy.reset()
    kv = kv or scenario.empty_cache()
    watched = Watched(policy, kv, laws)
    clock = VirtualClock()
    drafts = scenario.drafts
    speculation = None if drafts is None else drafts.speculation()
    scheduler = Scheduler(watched, kv, scenario.limits, device_model(), speculation)
    groups = [_make(r, name(i), scenario) for i, r in enumerate(scenario.requests)]
    lengths = {
        request.request_id: source.num_output_tokens
        for group, source in zip(groups, scenario.requests, strict=True)
        for request in group
    }
    accepted = None if drafts is None else AcceptedDrafts(drafts.acceptance)
    engine = _engine(scheduler, clock, lengths, accepted, overlap=scenario.overlap)
    ended: list[str] = []
    next_arrival = 0
    step, most_steps = 0, _most_steps(scenario)
    while next_arrival < len(groups) or engine.has_work:
        if not engine.has_work:
            clock.advance_to(groups[next_arrival][0].arrival_s)
        while next_arrival < len(groups) and groups[next_arrival][0].arrival_s <= clock.now_s():
            scheduler.add_request(groups[next_arrival][0])
            next_arrival += 1
        for group, source in zip(groups, scenario.requests, strict=True):
            if source.abort_at_step == step:
                scheduler.end(group[-1].request_id, EndReason.CLIENT, clock.now_s())
        ended += [r.request_id for r in engine.step().ended]
        kv.check()
        step += 1
        require(step <= most_steps, f"after {step} steps no end is in sight")
    requests = [request for group in groups for request in group]
    check_ends(requests, ended, lengths, with_drafts=drafts is not None)
    require(
        kv.num_free_blocks == kv.num_blocks and kv.num_free_host_blocks == kv.num_host_blocks,
        "KV blocks are still held after the last request has ended",
    )
    return Run(requests, watched.decisions)


def _most_steps(scenario: Scenario) -> int:
    """Return more steps than any policy needs that makes progress, even with many preemptions."""
    num_tokens = sum(r.n * (r.num_prompt_tokens + scenario.max_tokens) for r in scenario.requests)
    return 100 + 20 * num_tokens


def _engine(
    scheduler: Scheduler,
    clock: VirtualClock,
    lengths: dict[str, int],
    accepted: AcceptedDrafts | None,
    *,
    overlap: bool,
) -> Engine:
    block_size, device_clock = scheduler.kv.block_size, VirtualClock() if overlap else clock
    executor = SimulatedExecutor(device_model(), device_clock, lengths, accepted=accepted)
    checked = CheckedMemory(executor, block_size, scheduler.kv.window_tokens)
    if not overlap:
        return Engine(scheduler, checked, clock)
    return OverlappedEngine(scheduler, SimulatedDevice(checked, device_clock, clock), clock)


def _make(source: ScenarioRequest, request_id: str, scenario: Scenario) -> tuple[Request, ...]:
    """Return a request and its siblings, if it has any."""
    request = Request(
        request_id=request_id,
        arrival_s=source.arrival_s,
        num_prompt_tokens=source.num_prompt_tokens,
        max_tokens=scenario.max_tokens,
        slo=source.slo,
        prefix_hashes=source.prefix_hashes,
        prefix_block_tokens=scenario.prefix_block_tokens,
    )
    return fan_out(request, source.n)
