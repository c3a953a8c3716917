"""Quotes against times computed by hand: T = 5 ms + 0.05 ms a token, so 100 tokens take 10 ms."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from views import FLAT, R

from slosched.core import (
    NO_SLO,
    SLO,
    BatchShape,
    DeadlineRule,
    EndReason,
    LatencyModel,
    PromptOrder,
    Refusal,
    Request,
    SchedulerOutput,
)
from slosched.evaluate.comparison import kv_capacity_tokens
from slosched.perfmodel import load_model
from slosched.policy import Door
from slosched.policy.door import Refuse
from slosched.policy.kit import Quoter, Speed, Spread
from slosched.policy.kit.quotes.spread import SpreadByTTFT
from slosched.policy.spec import make_policy
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Proportional, Tiers, Trace, synthesize


def waiting(name: str, tokens: int, due_s: float = 1.0, arrival_s: float = 0.0) -> Request:
    return R(name, tokens, due_s, arrival_s=arrival_s).request()


def expected_ttft_s(order: PromptOrder, new: Request) -> float:
    """Return the TTFT expected of `new` behind 100 tokens due at 1 s and 300 tokens due at 3 s."""
    quoter = Quoter(lambda: order)
    for request in (waiting("a", 100, 1.0), waiting("b", 300, 3.0)):
        quoter.add(quoter.expect(request, FLAT))
    return quoter.expect(new, FLAT).ttft_s


def test_those_before_it_in_the_policys_order_come_first() -> None:
    """The new prompt takes 15 ms; those before it take 10 ms and 20 ms."""
    new = waiting("c", 200, due_s=2.0)
    assert expected_ttft_s(PromptOrder.ARRIVAL, new) == pytest.approx(0.045)
    assert expected_ttft_s(PromptOrder.DEADLINE, new) == pytest.approx(0.025)


def test_shorter_ones_that_arrive_later_overtake_it_where_the_shortest_comes_first() -> None:
    """Since the first, one prompt of 20 ms has arrived within a second: 98 % of the speed is left."""
    new = waiting("c", 400)
    assert expected_ttft_s(PromptOrder.LENGTH, new) == pytest.approx(0.055 / 0.98)


@pytest.mark.parametrize(("num_before", "most"), [(1, 1.0), (4, 2.0)])
def test_long_prompts_that_came_at_once_are_no_steady_stream(num_before: int, most: float) -> None:
    """Each takes more than a second, so that as a stream they would leave nothing of the device."""
    quoter = Quoter(lambda: PromptOrder.LENGTH)
    for i in range(num_before):
        quoter.add(quoter.expect(waiting(f"{i}", 24_000), FLAT))
    new = quoter.expect(waiting("new", 24_100), FLAT)
    alone_s = num_before * 1.205 + 1.21
    assert alone_s * 0.99 <= new.ttft_s <= alone_s * most * 1.01


@pytest.mark.parametrize(
    ("order", "is_one_late"),
    [(PromptOrder.LENGTH, True), (PromptOrder.ARRIVAL, False), (PromptOrder.DEADLINE, False)],
)
def test_a_new_prompt_makes_those_late_that_go_behind_it(
    order: PromptOrder, *, is_one_late: bool
) -> None:
    """By length, one has 25 ms to spare that needs 30 ms more now, and one has enough."""
    quoter = Quoter(lambda: order)
    for request in (
        waiting("short", 300, 0.3),
        waiting("tight", 1000, 0.1),
        waiting("ample", 1100, 0.9),
        waiting("far", 1200, 100.0),
    ):
        quoter.add(quoter.expect(request, FLAT))
    new = quoter.expect(waiting("new", 500, due_s=1.0), FLAT)
    displaced = quoter.displaced(new)
    assert (0.7 < displaced.num_late <= 1) == is_one_late
    if is_one_late:
        others_s = 300 / 512 * FLAT.predict_prefill(512) + 0.055 + 0.06
        assert displaced.last_s == pytest.approx((others_s + 0.03) / (1 - 0.005), rel=0.01)
    else:
        assert displaced.num_late == 0


@pytest.mark.parametrize("order", [PromptOrder.LENGTH, PromptOrder.PUNCTUAL])
@pytest.mark.parametrize(
    ("others_due_s", "is_in_time"), [(0.2, False), (0.28, False), (0.32, True)]
)
def test_shorter_prompts_go_first_by_deadline_only_if_all_can_be_in_time(
    order: PromptOrder, others_due_s: float, *, is_in_time: bool
) -> None:
    """Ten shorter prompts take 240 ms, and a new one, due in 100 ms, takes 55 ms."""
    quoter = Quoter(lambda: order)
    for i in range(10):
        quoter.add(quoter.expect(waiting(f"{i}", 400, others_due_s), FLAT))
    chance = quoter.expect(waiting("new", 1000, due_s=0.1), FLAT).in_time
    assert (chance > 0.5) == (is_in_time and order is PromptOrder.PUNCTUAL)


def test_a_step_at_leisure_does_not_show_how_fast_the_device_is() -> None:
    assert likely_after_slow_steps_s(is_at_leisure=True) == pytest.approx(0.01)
    assert likely_after_slow_steps_s(is_at_leisure=False) > 0.05


def test_best_effort_that_is_left_over_shows_it_only_where_it_goes_by_arrival() -> None:
    by_length_s = likely_after_slow_steps_s(PromptOrder.LENGTH, best_effort=True)
    assert by_length_s == pytest.approx(0.01)
    assert likely_after_slow_steps_s(best_effort=True) > 0.05


def test_a_long_prompt_that_has_begun_goes_first_only_where_it_is_not_by_length() -> None:
    """100 of its 20,000 tokens are computed; a prompt of 100 tokens takes 10 ms alone."""
    for order in PromptOrder:
        quoter = Quoter(lambda order=order: order)  # type: ignore[misc]
        quoter.add(quoter.expect(waiting("a", 20_000, 9.0), FLAT))
        quoter.note_step(0.0, FLAT, SchedulerOutput({"a": 100}), 0)
        ahead_s = 0.0 if order.is_by_length else 1.0
        new = quoter.expect(waiting("b", 100, due_s=9.0), FLAT)
        assert new.ahead_s == pytest.approx(ahead_s)


def test_best_effort_goes_first_only_where_it_goes_by_arrival() -> None:
    for order in (PromptOrder.LENGTH, PromptOrder.DEADLINE, PromptOrder.ARRIVAL):
        quoter = Quoter(lambda order=order: order)  # type: ignore[misc]
        begun = relegated("a", 1900)
        quoter.add(quoter.expect(begun, FLAT))
        quoter.note_step(0.0, FLAT, SchedulerOutput({"a": 100}), 0)
        ahead_s = 0.095 if order is PromptOrder.ARRIVAL else 0.0
        assert quoter.expect(waiting("b", 100), FLAT).ttft_s == pytest.approx(0.01 + ahead_s)


class Crowded(Request):
    """A request of which another one arrives whenever somebody looks at it."""

    quoter: Quoter
    num_arrived = 0

    @property
    def is_best_effort(self) -> bool:
        Crowded.num_arrived += 1
        request = waiting(f"late {self.num_arrived}", 100)
        self.quoter.add(Quoter(lambda: PromptOrder.LENGTH).expect(request, FLAT))
        return False


def test_requests_may_arrive_while_a_step_is_noted() -> None:
    quoter = Quoter(lambda: PromptOrder.LENGTH)
    Crowded.quoter = quoter
    for name in ("a", "b"):
        quoter.add(quoter.expect(Crowded(name, 0.0, 100, 10, SLO(1.0, 0.05)), FLAT))
    for i in range(3):
        quoter.note_step(float(i), FLAT, SchedulerOutput({"a": 10}), 0)
    assert quoter.expect(waiting("c", 100), FLAT).ttft_s > 0.01


def relegated(name: str, tokens: int) -> Request:
    request = waiting(name, tokens)
    request.asked_slo, request.slo = request.slo, NO_SLO
    return request


def likely_after_slow_steps_s(
    order: PromptOrder = PromptOrder.ARRIVAL,
    *,
    is_at_leisure: bool = False,
    best_effort: bool = False,
) -> float:
    """Return what is expected of 100 tokens, 10 ms alone, after a hundred steps of a second.

    Each did a tenth of a second of prefills and left a prompt over.
    """
    quoter = Quoter(lambda: order)
    for i in range(100):
        done = waiting(f"done {i}", 2000, arrival_s=i)
        left = (relegated if best_effort else waiting)(f"left {i}", 2000)
        for request in (done, left):
            quoter.add(quoter.expect(request, FLAT))
        plan = SchedulerOutput({done.request_id: 2000}, is_at_leisure=is_at_leisure)
        quoter.note_step(float(i), FLAT, plan, 0)
        left.end_reason, left.status = EndReason.CLIENT, EndReason.CLIENT.status
        quoter.look(FLAT)
    return quoter.expect(waiting("new", 100, arrival_s=100.0), FLAT).likely_s


def test_a_request_that_has_gone_is_not_waited_for() -> None:
    quoter = Quoter(lambda: PromptOrder.ARRIVAL)
    gone, new = waiting("a", 1900), waiting("b", 100)
    quoter.add(quoter.expect(gone, FLAT))
    assert quoter.expect(new, FLAT).ttft_s == pytest.approx(0.11)
    gone.end_reason, gone.status = EndReason.CLIENT, EndReason.CLIENT.status
    quoter.look(FLAT)
    assert quoter.expect(new, FLAT).ttft_s == pytest.approx(0.01)


@pytest.mark.parametrize("order", PromptOrder)
def test_the_time_until_a_prompt_comes_to_an_idle_device_teaches_nothing(
    order: PromptOrder,
) -> None:
    """Every minute a step of 10 ms computes a prompt beside a decode, and nothing else is done."""
    quoter = Quoter(lambda: order)
    step = BatchShape()
    step.add(99, 0)
    step.add_decodes([100])
    for i in range(10):
        now_s, name = 60.0 * i, f"{i}"
        quoter.look(FLAT)
        quoter.add(quoter.expect(waiting(name, 100, now_s + 1, arrival_s=now_s), FLAT))
        quoter.note_step(now_s, FLAT, SchedulerOutput({name: 100}, shape=step), num_decodes=1)
    new = quoter.expect(waiting("new", 100, 601.0, arrival_s=600.0), FLAT)
    assert (new.ttft_s, new.tpot_s) == pytest.approx((0.01, 0.01), rel=1e-3)


def test_the_speed_of_a_long_wait_is_that_of_a_long_time_past() -> None:
    """Half a second at a tenth of the speed, after a minute at full speed."""
    speed = Speed(first=1.0, first_s=0.05)
    for amount in [0.1] * 600 + [0.005] * 10:
        speed.observe(amount, 0.1 if amount == 0.1 else 0.05)
    short_s, long_s = speed.seconds_for(0.05), speed.seconds_for(20.0)
    assert short_s > 0.05 / 0.5
    assert long_s < 20.0 / 0.9


def test_what_overtakes_takes_its_part_of_the_speed_and_never_all_of_it() -> None:
    speed = Speed(first=1.0, first_s=100.0)
    assert speed.seconds_for(0.1, overtaking=0.5) == pytest.approx(0.2)
    assert speed.seconds_for(0.1, overtaking=5.0) == pytest.approx(0.1 / 0.02)


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
def test_a_quantile_covers_its_share_also_after_the_errors_have_changed(level: float) -> None:
    """The ratios double in the middle; each quantile is judged by what was quoted before."""
    drawn, spread, num_below = random.Random(1), Spread(), 0
    for i in range(2000):
        ratio = drawn.lognormvariate(0, 0.5) * (1 if i < 1000 else 2)
        num_below += ratio <= spread.factors[level]
        spread.observe(ratio, spread.factors)
    assert num_below / 2000 == pytest.approx(level, abs=0.02)


def test_each_ttft_that_is_promised_has_quantiles_of_its_own_once_enough_is_known_of_it() -> None:
    spreads = SpreadByTTFT()
    everybody = spreads.at(1.0)
    for _ in range(31):
        spreads.observe(1.0, spreads.at(0.5).factors, 0.5)
        spreads.observe(8.0, spreads.at(10.0).factors, 10.0)
    assert spreads.at(0.5) is spreads.at(10.0) is spreads.at(math.inf) is everybody
    spreads.observe(1.0, everybody.factors, 0.5)
    spreads.observe(8.0, everybody.factors, 11.0)
    assert spreads.at(0.5).factors[0.9] <= 2.5
    assert spreads.at(9.5).factors[0.9] == 8.0
    assert spreads.at(0.0) is spreads.at(3.0) is everybody


def test_where_all_are_promised_the_same_all_have_the_same_quantiles() -> None:
    drawn, spreads, alike = random.Random(1), SpreadByTTFT(), Spread()
    for _ in range(300):
        ratio = drawn.lognormvariate(0, 0.5)
        spreads.observe(ratio, spreads.at(1.0).factors, 1.0)
        alike.observe(ratio, alike.factors)
        assert spreads.at(1.0).factors == alike.factors


class Noting(Door):
    """A door that refuses nothing and notes the quote of 90 % of each request that arrives."""

    def reset(self) -> None:
        super().reset()
        self.quoted_s: dict[str, float] = {}

    def judge(self, request: Request, model: LatencyModel, rule: DeadlineRule) -> Refusal | None:
        self.quoted_s[request.request_id] = self.quote(request, model).ttft_s[0.9]
        return super().judge(request, model, rule)


def are_below(spec: str, device: str, trace: Trace) -> list[tuple[SLO, bool]]:
    """Return for each first token whether it came by the time that the quote of 90 % had said."""
    model = load_model(f"{device}/llama-3.1-8b")
    config = SimulationConfig(
        num_blocks=kv_capacity_tokens(model) // 16,
        disturbances=Disturbances(noise=0.05),
        online=True,
    )
    policy = Noting(make_policy(spec), refuse=Refuse.NOTHING)
    return [
        (r.slo, r.token_times_s[0] - r.arrival_s <= policy.quoted_s[r.request_id])
        for r in simulate(trace, policy, model, config)
        if r.token_times_s
    ]


def share_below(spec: str, kind: str, device: str, rate: float, num_requests: int) -> float:
    """Return the share of first tokens that came in time, where a TTFT grows with the prompt."""
    predict = load_model(f"{device}/llama-3.1-8b").predict_prefill
    trace = synthesize(kind, num_requests=num_requests, rate=rate, seed=3)
    in_time = are_below(spec, device, trace.with_slo(Proportional(predict, 2.0, 0.05, 1.0)))
    return statistics.mean(is_below for _, is_below in in_time)


@pytest.mark.parametrize(
    ("spec", "load"),
    [
        ("goodput", 0.8),
        ("edf:drop=infeasible", 2.0),
        pytest.param("goodput", 2.0, marks=pytest.mark.slow),
        pytest.param("edf:drop=infeasible", 0.8, marks=pytest.mark.slow),
    ],
)
def test_nine_of_ten_first_tokens_come_by_the_quote_of_90_percent(spec: str, load: float) -> None:
    """At load 1 about 1 % of the requests are late."""
    covered = share_below(spec, "azure_conv", "l40s", 4 * load, num_requests=1000)
    assert covered == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize("spec", ["goodput", "edf:drop=infeasible"])
def test_it_holds_for_each_of_several_promises(spec: str) -> None:
    """Who was promised less time goes first, and those with more time wait the longer."""
    tiers = (SLO(0.5, 0.05), SLO(2.0, 0.05), SLO(10.0, 0.1))
    trace = synthesize("azure_conv", num_requests=1500, rate=6, seed=3)
    in_time = are_below(spec, "l40s", trace.with_slo(Tiers(tiers, (0.3, 0.4, 0.3))))
    for tier in tiers:
        covered = statistics.mean(is_below for slo, is_below in in_time if slo == tier)
        assert covered == pytest.approx(0.9, abs=0.05), tier


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.8, 1.0, 1.3, 2.0])
@pytest.mark.parametrize(
    ("kind", "device", "rate"), [("azure_conv", "h100", 20), ("azure_code", "h100", 12)]
)
@pytest.mark.parametrize("spec", ["sarathi:drop=infeasible", "edf:drop=infeasible", "goodput"])
def test_it_holds_on_other_devices_and_traces(
    spec: str, kind: str, device: str, rate: float, load: float
) -> None:
    """In long queues, which bursts leave behind, errors are known too late to be corrected."""
    covered = share_below(spec, kind, device, rate * load, num_requests=1500)
    assert covered == pytest.approx(0.9, abs=0.07)
