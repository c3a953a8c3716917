"""The laws that every policy must obey, for our tests and for those of your own policy.

    from slosched.testing import check_policy

    def test_my_policy_obeys_the_laws() -> None:
        check_policy(MyPolicy)

`check_policy` plays random scenarios (hypothesis) on a simulated device and raises LawBrokenError,
or the engine's own error, with the smallest scenario that it found.  Needs `hypothesis`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slosched.core import (
    SLO,
    DeadlineRule,
    EndReason,
    Limits,
    Policy,
    PreemptionMode,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    SloschedError,
)
from slosched.engine.checked_memory import CheckedMemory
from slosched.engine.disturbances import UNDISTURBED, Disturbances
from slosched.engine.loop import Engine, StepRecord
from slosched.engine.overlap import OverlappedEngine
from slosched.engine.scheduling_time import SimulatedDevice
from slosched.engine.simulate import SimulationConfig, simulate
from slosched.engine.simulated import SimulatedExecutor, VirtualClock
from slosched.kv import NO_PREFIX_HOST, HostWrites, KVCache, PrefixCaching, PrefixHost
from slosched.perfmodel import LinearCoefficients, LinearModel
from slosched.scheduler import Scheduler
from slosched.workload import Trace, TraceRequest

_TICK_S = 2.0**-12
"""Every time in a scenario is a multiple of this power of two, so that sums of times are exact and
shifting all of them changes no comparison."""
_ALL_DISTURBANCES = Disturbances(0.1, 0.2, tail=0.1, stall_s=64 * _TICK_S, stall_every_s=0.25)


class LawBrokenError(SloschedError, AssertionError):
    """A policy, or the machinery under it, did what none may do."""


@dataclass(frozen=True)
class ScenarioRequest:
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    slo: SLO
    abort_at_step: int | None = None
    """The step before which its client goes away."""
    prefix_hashes: tuple[int, ...] = ()
    """Of blocks of `Scenario.prefix_block_tokens` tokens."""


@dataclass(frozen=True)
class Scenario:
    """A small workload on a small replica."""

    requests: tuple[ScenarioRequest, ...]
    num_blocks: int
    block_size: int
    num_host_blocks: int
    limits: Limits
    max_tokens: int
    disturbances: Disturbances = UNDISTURBED
    """Of the simulated device, in `simulated`."""
    prefix_cache: PrefixCaching = PrefixCaching.OFF
    prefix_host: PrefixHost = NO_PREFIX_HOST
    prefix_block_tokens: int | None = None
    overlap: bool = False
    """Whether each step is planned while the one before it runs, in `play`."""

    def shifted(self, seconds: float) -> Scenario:
        """The same scenario, later."""
        return replace(
            self,
            requests=tuple(replace(r, arrival_s=r.arrival_s + seconds) for r in self.requests),
        )

    def empty_cache(self) -> KVCache:
        index = self.prefix_cache.new_index()
        return KVCache(
            *(self.num_blocks, self.block_size, self.num_host_blocks, index, self.prefix_host)
        )

    def simulated(
        self, policy: Policy, on_step: Callable[[StepRecord], None] | None = None
    ) -> list[Request]:
        """What becomes of the requests in the simulator, where no client goes away."""
        lines = [
            TraceRequest(
                *(f"r{i}", r.arrival_s, r.num_prompt_tokens, r.num_output_tokens, r.slo),
                prefix_hashes=r.prefix_hashes,
            )
            for i, r in enumerate(self.requests)
        ]
        config = SimulationConfig(
            *(self.limits, self.num_blocks, self.block_size, self.num_host_blocks),
            prefix_cache=self.prefix_cache,
            prefix_host=self.prefix_host,
            disturbances=self.disturbances,
        )
        trace = Trace.of(lines, "scenario", prefix_block_tokens=self.prefix_block_tokens)
        return simulate(trace, policy, device_model(), config, on_step=on_step)


@dataclass
class Run:
    """What a scenario came to: every decision, and the requests at their end."""

    requests: list[Request]
    decisions: list[tuple[float, SchedulerOutput]] = field(default_factory=list)


def device_model() -> LinearModel:
    """A device on which a scenario's SLOs are sometimes met and sometimes not."""
    return LinearModel(
        LinearCoefficients(
            per_token_s=_TICK_S,
            per_attention_s=_TICK_S / 256,
            per_context_s=_TICK_S / 64,
            per_tile_s=4 * _TICK_S,
            any_decode_s=_TICK_S,
            per_swapped_block_s=_TICK_S,
            constant_s=8 * _TICK_S,
        )
    )


@st.composite
def scenarios(draw: st.DrawFn, max_requests: int = 12) -> Scenario:
    """Random scenarios, many of them short of KV blocks, seats, tokens or time."""
    ttft_s = st.integers(min_value=8, max_value=1024).map(lambda n: n * _TICK_S)
    tpot_s = st.integers(min_value=4, max_value=128).map(lambda n: n * _TICK_S)
    gap_s = st.just(0.0) | st.integers(min_value=1, max_value=64).map(lambda n: n * _TICK_S)
    max_tokens = draw(st.integers(min_value=1, max_value=24))
    prefix_cache = draw(st.sampled_from(PrefixCaching))
    # Few different ones: most requests begin like another.
    hashes = st.lists(st.integers(0, 1), max_size=0 if prefix_cache is PrefixCaching.OFF else 6)
    arrival_s = 0.0
    requests = []
    for _ in range(draw(st.integers(min_value=1, max_value=max_requests))):
        arrival_s += draw(gap_s)
        requests.append(
            ScenarioRequest(
                arrival_s=arrival_s,
                num_prompt_tokens=draw(st.integers(min_value=1, max_value=48)),
                num_output_tokens=draw(st.integers(min_value=1, max_value=max_tokens)),
                slo=SLO(draw(ttft_s), draw(tpot_s)),
                abort_at_step=draw(st.none() | st.integers(min_value=0, max_value=30)),
                prefix_hashes=tuple(draw(hashes)),
            )
        )
    block_size = draw(st.sampled_from((1, 4, 16)))
    longest = -(-(max(r.num_prompt_tokens for r in requests) + max_tokens) // block_size)
    limits = Limits(
        max_num_batched_tokens=draw(st.integers(min_value=1, max_value=96)),
        max_num_seqs=draw(st.integers(min_value=1, max_value=8)),
        max_num_swapped_blocks=draw(st.none() | st.integers(min_value=0, max_value=2 * longest)),
        preemption_mode=draw(st.sampled_from(PreemptionMode)),
        deadline_rule=draw(st.sampled_from(DeadlineRule)),
    )
    return Scenario(
        requests=tuple(requests),
        num_blocks=draw(st.integers(min_value=max(1, longest - 1), max_value=3 * longest)),
        block_size=block_size,
        num_host_blocks=draw(st.sampled_from((0, longest, 8 * longest))),
        limits=limits,
        max_tokens=max_tokens,
        prefix_cache=prefix_cache,
        prefix_host=draw(prefix_hosts(longest, prefix_cache)),
        prefix_block_tokens=draw(st.sampled_from((8, 10, 16))),
        disturbances=draw(st.sampled_from((UNDISTURBED, _ALL_DISTURBANCES))),
        overlap=draw(st.booleans()),
    )


def prefix_hosts(num_blocks: int, prefix_cache: PrefixCaching) -> st.SearchStrategy[PrefixHost]:
    """Hosts for what the prefix cache evicts, if there is one: often none, or rather small."""
    if prefix_cache is PrefixCaching.OFF:
        return st.just(NO_PREFIX_HOST)
    sizes = st.sampled_from((0, 1, num_blocks, 8 * num_blocks))
    return st.builds(PrefixHost, sizes, st.sampled_from(HostWrites))


def check_policy(make_policy: Callable[[], Policy], *, max_examples: int = 100) -> None:
    """Raise if a policy breaks a law on any of `max_examples` random scenarios."""

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(scenarios())
    def laws_hold(scenario: Scenario) -> None:
        check_laws(make_policy, scenario)

    laws_hold()


def check_laws(make_policy: Callable[[], Policy], scenario: Scenario) -> None:
    """Play one scenario in several ways and compare them."""
    run = play(make_policy(), scenario)
    again = play(make_policy(), scenario)
    _require(run.decisions == again.decisions, "the same seed gave other decisions")
    later = play(make_policy(), scenario.shifted(1024.0))
    _require(
        [output for _, output in later.decisions] == [output for _, output in run.decisions],
        "shifting all times changed the decisions",
    )
    renamed = play(make_policy(), scenario, name=_backwards)
    names = {f"r{i}": _backwards(i) for i in range(len(scenario.requests))}
    _require(
        [_renamed(output, names) for _, output in run.decisions]
        == [_renamed(output, {}) for _, output in renamed.decisions],
        "renaming the requests changed the decisions",
    )
    in_groups = scenario.simulated(make_policy())
    one_by_one = scenario.simulated(make_policy(), on_step=lambda _: None)
    _require(
        [_fate(request) for request in in_groups] == [_fate(request) for request in one_by_one],
        "`schedule_beside` or `decodes_until_s` promised what `schedule` does not do",
    )


def play(
    policy: Policy,
    scenario: Scenario,
    name: Callable[[int], str] = "r{}".format,
    kv: KVCache | None = None,
) -> Run:
    """Run a scenario to its end and check every step of it."""
    policy.reset()
    kv = kv or scenario.empty_cache()
    watched = _Watched(policy, kv)
    clock = VirtualClock()
    scheduler = Scheduler(watched, kv, scenario.limits, device_model())
    requests = [_make(r, name(i), scenario) for i, r in enumerate(scenario.requests)]
    lengths = {
        request.request_id: source.num_output_tokens
        for request, source in zip(requests, scenario.requests, strict=True)
    }
    engine = _engine(scheduler, clock, lengths, scenario.overlap)
    ended: list[str] = []
    next_arrival = 0
    step = 0
    while next_arrival < len(requests) or engine.has_work:
        if not engine.has_work:
            clock.advance_to(requests[next_arrival].arrival_s)
        while next_arrival < len(requests) and (requests[next_arrival].arrival_s <= clock.now_s()):
            scheduler.add_request(requests[next_arrival])
            next_arrival += 1
        for request, source in zip(requests, scenario.requests, strict=True):
            if source.abort_at_step == step:
                scheduler.end(request.request_id, EndReason.CLIENT, clock.now_s())
        ended += [r.request_id for r in engine.step().ended]
        kv.check()
        step += 1
    _check_ends(requests, ended, lengths)
    _require(
        kv.num_free_blocks == kv.num_blocks and kv.num_free_host_blocks == kv.num_host_blocks,
        "KV blocks are still held after the last request has ended",
    )
    return Run(requests, watched.decisions)


def _engine(
    scheduler: Scheduler, clock: VirtualClock, lengths: dict[str, int], overlap: bool
) -> Engine:
    block_size, device_clock = scheduler.kv.block_size, VirtualClock() if overlap else clock
    executor = SimulatedExecutor(device_model(), device_clock, lengths)
    checked = CheckedMemory(executor, block_size)
    if not overlap:
        return Engine(scheduler, checked, clock)
    return OverlappedEngine(scheduler, SimulatedDevice(checked, device_clock, clock), clock)


def _make(source: ScenarioRequest, request_id: str, scenario: Scenario) -> Request:
    return Request(
        request_id=request_id,
        arrival_s=source.arrival_s,
        num_prompt_tokens=source.num_prompt_tokens,
        max_tokens=scenario.max_tokens,
        slo=source.slo,
        prefix_hashes=source.prefix_hashes,
        prefix_block_tokens=scenario.prefix_block_tokens,
    )


class _Watched(Policy):
    """Passes on what the policy decides, after checking it against what the policy saw."""

    def __init__(self, policy: Policy, kv: KVCache) -> None:
        self._policy = policy
        self._kv = kv
        self.decisions: list[tuple[float, SchedulerOutput]] = []

    def __repr__(self) -> str:
        return repr(self._policy)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        before = _picture(view)
        output = self._policy.schedule(view)
        _require(_picture(view) == before, "the policy changed its view")
        _check_plan(view, output, self._kv)
        self.decisions.append((view.now_s, output))
        return output


def _picture(view: SchedulerView) -> list[object]:
    """Everything a policy could have changed."""
    requests = (*view.waiting, *view.running, *view.swapped)
    return [
        view.kv.num_free_blocks,
        view.kv.num_free_host_blocks,
        *((r.request_id, r.status, r.num_computed_tokens, r.num_output_tokens) for r in requests),
        *((r.deadline_s, len(r.token_times_s), r.num_preemptions) for r in requests),
        *(view.kv.num_held_blocks(r.request_id) for r in requests),
    ]


def _check_plan(view: SchedulerView, output: SchedulerOutput, kv: KVCache) -> None:
    """A plan is legal: tokens, seats, blocks, 0 < n <= uncomputed.  Independent of Scheduler."""
    requests = {r.request_id: r for r in (*view.waiting, *view.running, *view.swapped)}
    leaving = {*output.preempted, *output.swapped_out, *output.rejected}
    running = {r.request_id for r in view.running} - leaving
    # What starters find in the cache counts once they hold it; then the bookkeeping is checked.
    tables = (table for name, table in kv.block_tables.items() if name not in leaving)
    held = len({block for table in tables for block in table})
    for request_id, n in output.num_scheduled_tokens.items():
        request = requests[request_id]
        _require(request_id not in leaving, "a request that leaves is scheduled")
        found = output.num_found_tokens.get(request_id, request.num_computed_tokens)
        computed = found - (request_id in output.repeated)
        _require(0 < n <= request.num_tokens - computed, f"{n} tokens are not uncomputed")
        block_size = view.kv.block_size
        has = max(view.kv.num_held_blocks(request_id), found // block_size)
        held += max(0, -(-(computed + n) // block_size) - has)
        running.add(request_id)
        if request.status is RequestStatus.SWAPPED:
            _require(request_id in output.swapped_in, "a swapped request runs from the host")
    limits = view.limits
    total = sum(output.num_scheduled_tokens.values())
    _require(total <= limits.max_num_batched_tokens, f"{total} tokens are too many")
    _require(len(running) <= limits.max_num_seqs, f"{len(running)} seats are too many")
    _require(held <= view.kv.num_blocks, f"{held} KV blocks are too many")
    if limits.max_num_swapped_blocks is not None:
        traffic = sum(view.kv.num_held_blocks(r) for r in output.swapped_out)
        traffic += sum(view.kv.num_held_host_blocks(r) for r in output.swapped_in)
        _require(traffic <= limits.max_num_swapped_blocks, f"{traffic} blocks are copied")


def _check_ends(requests: Sequence[Request], ended: Sequence[str], lengths: dict[str, int]) -> None:
    """Every request ends exactly once, and as it must."""
    _require(sorted(ended) == sorted(r.request_id for r in requests), "not every end came once")
    for request in requests:
        times = request.token_times_s
        _require(request.status.is_ended and request.end_reason is not None, "no end")
        _require(len(times) == request.num_output_tokens, "token times and tokens differ")
        _require(
            all(a < b for a, b in zip([request.arrival_s, *times], times, strict=False)),
            "token times do not increase from the arrival",
        )
        if request.status is RequestStatus.FINISHED:
            expected = min(lengths[request.request_id], request.max_tokens)
            _require(request.num_output_tokens == expected, "finished with a wrong length")
        if request.status is RequestStatus.REJECTED:
            _require(not times, "rejected after tokens came out")


def _backwards(index: int) -> str:
    """A name that sorts the other way round."""
    return f"z{999 - index}"


def _renamed(output: SchedulerOutput, names: dict[str, str]) -> list[object]:
    def new(request_ids: Sequence[str]) -> list[str]:
        return [names.get(request_id, request_id) for request_id in request_ids]

    return [
        list(
            zip(
                new(list(output.num_scheduled_tokens)),
                output.num_scheduled_tokens.values(),
                strict=True,
            )
        ),
        new(output.preempted),
        new(output.swapped_out),
        new(output.swapped_in),
        list(zip(new(list(output.rejected)), output.rejected.values(), strict=True)),
        list(
            zip(new(list(output.num_found_tokens)), output.num_found_tokens.values(), strict=True)
        ),
        sorted(new(sorted(output.repeated))),
    ]


def _fate(request: Request) -> tuple[object, ...]:
    times_s = tuple(request.token_times_s)
    return (times_s, request.end_reason, request.end_s, request.num_preemptions, request.num_swaps)


def _require(condition: bool, law: str) -> None:
    if not condition:
        raise LawBrokenError(law)
