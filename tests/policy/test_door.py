"""The door: T = 5 ms + 0.05 ms a token, so a prompt of 100 tokens takes 10 ms, a decode 5.05 ms."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from factories import make_scheduler
from views import FLAT, R, view_of

from slosched.core import (
    NO_SLO,
    SLO,
    DeadlineRule,
    EndReason,
    Limits,
    OnInfeasible,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    StepResult,
    fan_out,
)
from slosched.evaluate.comparison import kv_capacity_tokens
from slosched.metrics import RequestRecord, is_good, summarize
from slosched.perfmodel import load_model
from slosched.policy import EDF, FCFS, Door, Goodput
from slosched.policy.door import Refuse
from slosched.policy.kit.drop import Drop
from slosched.policy.spec import PolicySpecError, make_policy
from slosched.scheduler import Scheduler
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Proportional, Trace, TraceRequest, synthesize


def scheduler(refuse: Refuse = Refuse.LATE, limits: Limits | None = None) -> Scheduler:
    door = Door(FCFS(), refuse=refuse)
    return make_scheduler(door, num_blocks=10_000, limits=limits, model=FLAT)


def arrived(
    name: str = "r", tokens: int = 100, ttft_s: float = 1.0, tpot_s: float = 0.05, **said: bool
) -> Request:
    request = R(name, tokens, due_s=ttft_s, tpot_s=tpot_s, max_tokens=50).request()
    if said.get("best_effort"):
        request.on_infeasible = OnInfeasible.RELEGATE
    return request


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "promise"),
    [(0.009, 0.05, "TTFT"), (1.0, 0.005, "TPOT"), (0.011, 0.0051, None)],
)
def test_what_not_even_an_empty_device_could_keep_is_refused_on_arrival(
    ttft_s: float, tpot_s: float, promise: str | None
) -> None:
    replica = scheduler(Refuse.UNKEEPABLE)
    request = arrived(ttft_s=ttft_s, tpot_s=tpot_s)
    refusal = replica.judge(request)
    assert (refusal and refusal.promise) == promise
    replica.queue(request, refusal)
    assert request.status is (RequestStatus.REJECTED if promise else RequestStatus.WAITING)
    if refusal is not None:
        assert (request.end_reason, request.end_s) == (EndReason.UNKEEPABLE, request.arrival_s)
        assert refusal.expected_s > refusal.promised_s
        assert refusal.retry_after_s is None


@pytest.mark.parametrize(("ttft_s", "promise"), [(1.0, None), (0.011, "TPOT")])
def test_under_envelope_what_is_left_of_the_ttft_makes_up_for_a_tpot(
    ttft_s: float, promise: str | None
) -> None:
    """The prompt takes 10 ms and a decode more than 5 ms: its TPOT of 3 ms lacks 2."""
    replica = scheduler(Refuse.UNKEEPABLE, Limits(deadline_rule=DeadlineRule.ENVELOPE))
    refusal = replica.judge(arrived(ttft_s=ttft_s, tpot_s=0.003))
    assert (refusal and refusal.promise) == promise


def test_who_is_served_though_late_still_stands_before_those_that_come_later() -> None:
    """1,900 tokens take 100 ms; their promise has expired when the first step is planned."""
    door = Door(FCFS(drop=Drop.EXPIRED), refuse=Refuse.NOTHING)
    replica = make_scheduler(door, num_blocks=10_000, model=FLAT)
    late = arrived("late", tokens=1900, ttft_s=0.5, best_effort=True)
    replica.add_request(late)
    replica.schedule(now_s=1.0)
    assert (late.status, late.slo) == (RequestStatus.WAITING, NO_SLO)
    new = R("new", 100, due_s=2.0, arrival_s=1.0).request()
    assert door.quote(new, FLAT).ttft_s[0.5] == pytest.approx(0.11)


def test_a_tpot_counts_only_where_there_is_a_second_token() -> None:
    request = arrived(tpot_s=0.001)
    request.max_tokens = 1
    assert scheduler().judge(request) is None


def test_many_answers_are_judged_together_and_their_siblings_not_again() -> None:
    """A step of 128 decodes takes 11.4 ms; 70 take 8.5 ms, 71 % of the time at 12 ms a token."""
    replica = scheduler()

    def answers(name: str, num: int, tpot_s: float) -> Request:
        request = arrived(name, tpot_s=tpot_s)
        fan_out(request, num)
        return request

    refusal = replica.judge(answers("never", 128, 0.011))
    assert refusal is not None
    assert (refusal.reason, refusal.promise) == (EndReason.UNKEEPABLE, "TPOT")
    possible = answers("possible", 70, 0.012)
    replica.add_request(possible)
    for now_s in (0.0, 0.02, 0.04):
        batch = replica.schedule(now_s)
        emitted = {c.request.request_id: 1 for c in batch.chunks if c.emits_token}
        replica.update(batch, StepResult(emitted), now_s + 0.02)
    assert len(emitted) == 70
    refusal = replica.judge(answers("another", 30, 0.012))
    assert refusal is not None
    assert (refusal.reason, refusal.promise) == (EndReason.OVERLOAD, "TPOT")
    assert replica.judge(arrived("single", tpot_s=0.012)) is None


def test_a_client_that_takes_best_effort_is_served_without_its_slo() -> None:
    replica = scheduler()
    request = arrived(ttft_s=0.001, best_effort=True)
    replica.add_request(request)
    assert (request.status, request.slo) == (RequestStatus.WAITING, NO_SLO)
    assert replica.schedule(0.0).chunks


def test_what_would_come_late_behind_the_others_is_refused_with_what_is_expected() -> None:
    """Eleven prompts take 6 ms each, a part of a step of 512 tokens; its own takes 10 ms alone."""
    replica = scheduler()
    for i in range(10):
        replica.add_request(arrived(f"first{i}"))
    assert replica.judge(arrived("in time", ttft_s=0.2)) is None
    refusal = replica.judge(arrived("late", ttft_s=0.05))
    share_s = 100 / 512 * FLAT.predict_prefill(512)
    assert refusal is not None
    assert refusal.reason is EndReason.OVERLOAD
    assert refusal.expected_s == pytest.approx(11 * share_s + 0.01)
    assert refusal.retry_after_s is not None
    replica.queue(arrived("late", ttft_s=0.05), refusal)
    assert [r.request_id for r in replica.take_ended()] == ["late"]


def test_refused_clients_come_again_one_after_the_other() -> None:
    """Each takes 10 ms, and they get 10 % of the device; the overload began with the first."""
    replica = scheduler()
    for i in range(10):
        replica.add_request(arrived(f"first{i}"))
    refusals = [replica.judge(arrived(f"late{i}", ttft_s=0.05)) for i in range(3)]
    waits_s = [refusal.retry_after_s for refusal in refusals if refusal is not None]
    assert waits_s == pytest.approx([5.0, 5 + 0.01 / 0.1, 5 + 0.02 / 0.1])


def test_where_none_is_judged_on_arrival_they_are_in_the_next_step() -> None:
    """An engine that does not ask the door, as vLLM, shows it new requests in a view."""
    requests = [arrived("short", ttft_s=0.5), arrived("never", ttft_s=0.004)]
    view = view_of(requests)
    policy = Door(EDF())
    for _ in range(2):  # a plan that is asked for twice is the same
        gate = policy.gate(view)
        assert gate.rejected == {"never": EndReason.UNKEEPABLE}
        assert [r.request_id for r in gate.through] == ["short"]
    output = policy.schedule(view)
    assert output.rejected == {"never": EndReason.UNKEEPABLE}
    assert output.num_scheduled_tokens == {"short": 100}


def test_the_work_of_prompts_that_start_before_they_are_judged_counts() -> None:
    """Of a hundred that come at once a step judges 16, and 80 start, which fill all seats.

    Each takes 10 ms alone.  The speed has to be that of all 80: together they take half the time.
    """
    door, limits = Door(FCFS()), Limits(max_num_batched_tokens=8000, max_num_seqs=80)
    requests = [R(f"r{i}", 100, due_s=1.0) for i in range(100)]
    output = door.schedule(view_of(requests, limits=limits))
    assert len(output.num_scheduled_tokens) == 80
    assert output.shape is not None
    took_s = FLAT.predict(output.shape)
    begun = [R(f"r{i}", 101, due_s=9.0, out=1) for i in range(80)]
    door.schedule(view_of([*begun, *requests[80:]], now_s=took_s, limits=limits))
    new = R("new", 100, due_s=9.0, arrival_s=took_s).request()
    behind_s = door.quote(new, FLAT).ttft_s[0.5]
    assert behind_s < 17 * 0.010, "16 wait before it"


class FailsOnce(FCFS):
    has_failed = False

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        if not self.has_failed:
            self.has_failed = True
            raise RuntimeError("a bug")
        return super().schedule(view)


@pytest.mark.parametrize("took_s", [0.08, 0.15])
def test_who_is_judged_in_a_step_has_waited_until_now_whatever_was_predicted(took_s: float) -> None:
    """A step of 1,900 tokens is to take 100 ms; a prompt that comes in it takes 10 ms after it."""
    door = Door(FCFS())
    door.schedule(view_of([R("long", 1900, due_s=10.0)]))
    new = R("new", 100, due_s=10.0, arrival_s=0.06)
    door.schedule(view_of([R("long", 1901, due_s=10.0, out=1), new], now_s=took_s))
    assert door.expected_ttft_s("new") == pytest.approx(took_s - 0.06 + 0.010, abs=0.002)


def test_a_request_that_began_when_the_inner_policy_raised_is_not_refused_later() -> None:
    """An engine that then plans the step by itself, as vLLM, may have begun it."""
    never, another = arrived("never", ttft_s=0.004), arrived("another", ttft_s=0.004)
    policy = Door(FailsOnce())
    with pytest.raises(RuntimeError, match="a bug"):
        policy.schedule(view_of([never, another]))
    never.num_computed_tokens, never.status = 50, RequestStatus.RUNNING
    output = policy.schedule(view_of([never, another]))
    assert output.rejected == {"another": EndReason.UNKEEPABLE}, "it still waits"
    assert output.num_scheduled_tokens == {"never": 50}


def test_what_a_turn_of_floors_computes_is_done_for_a_door_that_does_not_see_the_turn() -> None:
    """As many are good, within one in a hundred, as with the door around the floors."""
    rng = np.random.default_rng(0)
    arrivals_s = np.cumsum(rng.exponential(1 / 18, 600)).tolist()
    prompts, outputs = rng.integers(50, 3000, 600).tolist(), rng.integers(100, 600, 600).tolist()
    tenants = ["a" if drawn < 0.5 else "b" for drawn in rng.random(600)]
    slo = SLO(ttft_s=1.0, tpot_s=0.05)
    rows = [
        TraceRequest(f"r{i}", *lengths, slo, tenant=tenant)
        for i, (*lengths, tenant) in enumerate(
            zip(arrivals_s, prompts, outputs, tenants, strict=True)
        )
    ]
    model = load_model("h100/llama-3.1-8b")
    config = SimulationConfig(
        num_blocks=kv_capacity_tokens(model) // 16, disturbances=Disturbances(0.05), online=True
    )

    def num_good(spec: str) -> int:
        ended = simulate(Trace.of(rows, "two tenants"), make_policy(spec), model, config)
        return sum(is_good(RequestRecord.from_request(r), DeadlineRule.MEAN_TPOT) for r in ended)

    within = num_good("goodput+door+floors:tenants=a=0.5")
    assert within >= num_good("goodput+floors:tenants=a=0.5+door") - 6


def test_with_a_prefix_cache_it_is_judged_when_its_cached_tokens_are_known() -> None:
    """Of 1,000 tokens 900 are cached; the rest takes 10 ms."""
    request = arrived(tokens=1000, ttft_s=0.02)
    assert Door(FCFS()).judge(request, FLAT, DeadlineRule.MEAN_TPOT) is not None
    request.num_computed_tokens = 900
    assert Door(FCFS()).judge(request, FLAT, DeadlineRule.MEAN_TPOT) is None


@pytest.mark.parametrize("level", ["-0.1", "1", "20"])
def test_a_level_has_to_be_a_share(level: str) -> None:
    with pytest.raises(PolicySpecError, match=r"level must be in \[0, 1\)"):
        make_policy(f"edf+door:level={level}")


@cache
def replayed(
    spec: str, device: str = "h100", rate: float = 60.0, num_requests: int = 400
) -> list[RequestRecord]:
    """Return the records of three times the requests that the device can serve in time."""
    model = load_model(f"{device}/llama-3.1-8b")
    trace = synthesize("azure_conv", num_requests=num_requests, rate=rate, seed=5)
    trace = trace.with_slo(Proportional(model.predict_prefill, 2.0, 0.05, 1.0))
    config = SimulationConfig(
        num_blocks=kv_capacity_tokens(model) // 16,
        disturbances=Disturbances(noise=0.05),
        online=True,
    )
    requests = simulate(trace, make_policy(spec), model, config)
    return [RequestRecord.from_request(request) for request in requests]


def test_most_of_those_rejected_know_at_once_and_nearly_as_many_are_good() -> None:
    at_door, waited = replayed("goodput+door"), replayed("goodput")
    times_s = sorted(
        r.end_s - r.arrival_s
        for r in at_door
        if r.status is RequestStatus.REJECTED and r.end_s is not None
    )
    assert len(times_s) > 50
    assert times_s[len(times_s) // 2] == 0.0
    assert times_s[int(0.75 * len(times_s))] < 0.1
    num_good, num_good_waiting = (
        summarize(rs, DeadlineRule.MEAN_TPOT).num_good for rs in (at_door, waited)
    )
    assert num_good >= 0.95 * num_good_waiting


def test_prompts_of_one_length_do_not_overtake_each_other() -> None:
    """The model learns, so that the same prompt takes another time a step later."""
    model = load_model("h100/llama-3.1-8b")
    trace = synthesize("poisson", num_requests=900, rate=40.0, seed=7)
    alike = [replace(r, num_prompt_tokens=1024, num_output_tokens=128) for r in trace.requests]
    trace = Trace(tuple(alike), "prompts of one length").with_slo(SLO(2.0, 0.03))
    config = SimulationConfig(disturbances=Disturbances(noise=0.05), online=True)

    def num_good(spec: str) -> int:
        requests = simulate(trace, make_policy(spec), model, config)
        records = [RequestRecord.from_request(request) for request in requests]
        return summarize(records, DeadlineRule.MEAN_TPOT).num_good

    waiting, at_door = num_good("goodput"), num_good("goodput+door")
    assert waiting < 0.95 * len(trace)
    assert at_door >= 0.99 * waiting


@pytest.mark.parametrize(
    ("slo", "on_infeasible"),
    [(NO_SLO, OnInfeasible.REJECT), (SLO(ttft_s=0.01, tpot_s=0.05), OnInfeasible.RELEGATE)],
    ids=["without a promise", "refused and served all the same"],
)
def test_what_only_gets_what_others_leave_over_overtakes_nobody(
    slo: SLO, on_infeasible: OnInfeasible
) -> None:
    """In half a second a hundred shorter prompts come, four seconds of prefills."""
    replica = make_scheduler(
        Door(Goodput()), num_blocks=100_000, model=load_model("h100/llama-3.1-8b")
    )
    for i in range(100):
        request = R(f"r{i}", 2000, due_s=0.0, arrival_s=i / 200).request()
        request.slo, request.on_infeasible = slo, on_infeasible
        replica.add_request(request)
    new = R("new", 2100, due_s=1.5, tpot_s=0.05, arrival_s=0.5).request()
    assert replica.judge(new) is None


def test_short_prompts_that_come_at_once_share_steps() -> None:
    """Alone each of 500 takes 6 ms, most of which a step costs anyway: 3 s, but 1 s in full steps."""
    slo = SLO(ttft_s=2.0, tpot_s=0.1)
    trace = Trace.of([TraceRequest(f"r{i}", 0.0, 50, 10, slo) for i in range(500)], "at once")
    config = SimulationConfig(Limits(max_num_seqs=512), num_blocks=20_000)
    ended = simulate(trace, Door(Goodput()), load_model("h100/llama-3.1-8b"), config)
    assert all(is_good(RequestRecord.from_request(r), DeadlineRule.MEAN_TPOT) for r in ended)


def test_decodes_that_lent_their_blocks_do_not_stand_before_new_prompts() -> None:
    """They are computed anew when they are due; counted at once, they had 25 of these 80 refused."""
    trace = synthesize("servegen_r1", num_requests=80, seed=3).scaled_to(1.0)
    trace = trace.with_slo(SLO(ttft_s=5.0, tpot_s=0.1))
    model, config = load_model("l40s/llama-3.1-8b"), SimulationConfig(num_blocks=1366)

    def num_in_time(spec: str) -> int:
        ended = simulate(trace, make_policy(spec), model, config)
        return sum(is_good(RequestRecord.from_request(r), DeadlineRule.MEAN_TPOT) for r in ended)

    assert num_in_time("goodput+door") >= 0.98 * num_in_time("goodput")


def test_short_prompts_are_let_in_while_a_long_one_runs() -> None:
    """It takes an H100 14 s alone; each of the others takes 0.1 s, and has 5 s."""
    model = load_model("h100/llama-3.1-8b")
    long = TraceRequest("long", 0.0, 120_000, 8, SLO(60.0, 0.1))
    short = [TraceRequest(f"r{i}", 0.5 + i, 2_000, 8, SLO(5.0, 0.1)) for i in range(8)]
    trace = Trace((long, *short), "a long prompt and short ones")
    requests = simulate(trace, make_policy("goodput+door"), model, SimulationConfig())
    assert all(r.status is RequestStatus.FINISHED for r in requests)


def test_in_a_lasting_overload_hardly_anyone_is_let_in_and_rejected_later() -> None:
    """Who would make others late is refused instead of them."""

    def found(spec: str) -> tuple[int, int]:
        records = replayed(spec, "l40s", 12.0, 600)
        rejected = [r for r in records if r.status is RequestStatus.REJECTED]
        num_later = sum(r.end_reason is not EndReason.OVERLOAD for r in rejected)
        return num_later, sum(is_good(r, DeadlineRule.MEAN_TPOT) for r in records)

    (num_later, num_good), (others_later, others_good) = (
        found(spec) for spec in ("goodput+door", "goodput+door:busy_level=0")
    )
    assert num_later < 0.5 * others_later
    assert num_good >= 0.99 * others_good


def test_where_promises_differ_nobody_is_refused_for_those_who_have_time() -> None:
    """A third of the requests are due after a second, two or six, at 1.5 times the capacity.

    766 are good without the door, and 743 if it takes all shorter prompts to be served before.
    """

    def num_good(spec: str) -> int:
        model = load_model("l40s/llama-3.1-8b")
        trace = synthesize("azure_conv", num_requests=800, rate=6.0, seed=5)
        tiers = (SLO(1.0, 0.05), SLO(2.0, 0.075), SLO(6.0, 0.15))
        trace = Trace.of(
            [replace(r, slo=tiers[i % 3]) for i, r in enumerate(trace.requests)], "tiers"
        )
        config = SimulationConfig(
            num_blocks=kv_capacity_tokens(model) // 16,
            disturbances=Disturbances(noise=0.05),
            online=True,
        )
        played = simulate(trace, make_policy(spec), model, config)
        records = [RequestRecord.from_request(request) for request in played]
        return sum(is_good(record, DeadlineRule.MEAN_TPOT) for record in records)

    assert num_good("goodput+door") >= 0.99 * num_good("goodput")


def test_with_a_limit_on_late_ones_fewer_of_those_let_in_are_late() -> None:
    def num_late(spec: str) -> int:
        records = replayed(spec, "l40s", 12.0, 600)
        let_in = [r for r in records if r.end_reason is not EndReason.OVERLOAD]
        return sum(not is_good(r, DeadlineRule.MEAN_TPOT) for r in let_in)

    door = "goodput+door:busy_level=0"
    assert num_late(f"{door},most_late=0.02") < 0.7 * num_late(door)


@pytest.mark.parametrize("most_late", ["0", "-0.1", "1.5"])
def test_a_limit_on_late_ones_has_to_be_a_share(most_late: str) -> None:
    with pytest.raises(PolicySpecError, match="most_late must be in"):
        make_policy(f"edf+door:most_late={most_late}")


def test_a_device_that_was_stuck_and_is_well_again_gets_requests_again() -> None:
    """For ten seconds, in the middle of a burst, each step takes 200 times as long."""
    model = load_model("h100/llama-3.1-8b")
    trace = synthesize("azure_conv", num_requests=900, rate=25, seed=5)
    trace = trace.with_slo(Proportional(model.predict_prefill, 2.0, 0.05, 1.0))
    slowness = ((0.0, 1.0), (8.0, 200.0), (18.0, 1.0))
    config = SimulationConfig(disturbances=Disturbances(slowness=slowness), online=True)
    requests = simulate(trace, make_policy("goodput+door"), model, config)
    later = [r for r in requests if r.arrival_s > 30.0]
    assert len(later) > 100
    assert sum(r.status is RequestStatus.REJECTED for r in later) < 0.1 * len(later)
