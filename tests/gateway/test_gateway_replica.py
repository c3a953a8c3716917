"""What a router knows of a real replica: exact counts of its own, and forecasts that age."""

from __future__ import annotations

import math

import pytest

from slosched.core import NO_SLO, SLO, OnInfeasible, Request
from slosched.fleet.routers import ROUTERS
from slosched.fleet.spec import make_router
from slosched.gateway.asked_promises import AskedPromises, Latest, Tier
from slosched.gateway.config import GatewayConfig
from slosched.gateway.forecast import Forecast, grid_tokens
from slosched.gateway.replica import LiveReplica


class Clock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


def request(num_tokens: int = 100, ttft_s: float = math.inf) -> Request:
    return Request("", 0.0, num_tokens, max_tokens=1, slo=SLO(ttft_s, math.inf))


def forecast(wait_s: float = 0.0, num_requests: int = 0, slo: SLO = NO_SLO) -> Forecast:
    """Make one of a device that takes a millisecond a token and 20 ms a decode."""
    lengths = [10, 100, 1000]
    alone_s = [length / 1000 for length in lengths]
    likely_s = [each + wait_s for each in alone_s]
    least_s = [each / 2 for each in likely_s]
    reject = OnInfeasible.REJECT
    return Forecast(lengths, alone_s, likely_s, least_s, 0.05, 0.02, slo, reject, num_requests)


def replica(clock: Clock, said: Forecast | None = None) -> LiveReplica:
    found = LiveReplica(0, "http://a:1", clock)
    if said is not None:
        found.learn(found.begin_poll(), said.num_requests, [said])
    found.mark_up()
    return found


def test_times_between_two_lengths_are_interpolated() -> None:
    found = forecast()
    assert found.at(found.alone_s, 55) == pytest.approx(0.055)
    assert found.at(found.alone_s, 100) == pytest.approx(0.1)
    assert found.at(found.alone_s, 3) == pytest.approx(0.01)
    assert found.at(found.alone_s, 4000) == pytest.approx(4.0)


@pytest.mark.parametrize("context", [1, 2, 16, 17, 4096, 10**6, 10**12])
def test_the_lengths_to_ask_about_grow_up_to_the_context(context: int) -> None:
    lengths = grid_tokens(context)
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == max(1, context - 1)
    assert len(lengths) <= 16


def test_an_answer_of_the_quote_endpoint_is_read() -> None:
    quote = {
        "object": "quote",
        "prompt_tokens": 10,
        "ttft_ms": {"p10": 5.0, "p50": 10.0},
        "tpot_ms": {"p50": 20.0},
        "alone_ms": {"ttft": 8.0, "tpot": 15.0},
        "promised_ms": {"ttft": 1000.0, "tpot": None},
        "num_requests_running": 2,
        "num_requests_waiting": 1,
    }
    found = Forecast.of({"object": "list", "data": [quote, {**quote, "prompt_tokens": 20}]})
    assert list(found.lengths_tokens) == [10, 20]
    assert (found.alone_s[0], found.likely_s[0], found.least_s[0]) == (0.008, 0.01, 0.005)
    assert found.slo == SLO(ttft_s=1.0, tpot_s=math.inf)
    assert found.num_requests == 3
    assert found.on_infeasible is OnInfeasible.REJECT
    assert Forecast.of({**quote, "on_infeasible": "serve"}).on_infeasible is OnInfeasible.SERVE
    assert Forecast.of(quote).lengths_tokens == [10]
    with pytest.raises(LookupError):
        Forecast.of({"object": "list", "data": []})


def test_own_requests_are_counted_exactly_and_those_of_others_by_the_last_poll() -> None:
    one = replica(Clock())
    first = one.send(request(30))
    begin = one.begin_poll()
    second = one.send(request(50))
    one.learn(begin, 4)  # one of the four is our first
    assert (one.num_requests, one.num_prompt_tokens, one.num_waiting_tokens) == (5, 80, 80)
    one.begin(first)
    one.begin(first)
    assert (one.num_requests, one.num_prompt_tokens, one.num_waiting_tokens) == (5, 80, 50)
    one.end(first)
    one.end(second)
    assert (one.num_in_flight, one.num_prompt_tokens, one.num_waiting_tokens) == (0, 0, 0)
    assert one.num_requests == 3


def test_a_wait_shrinks_as_time_passes_and_grows_by_what_is_sent() -> None:
    clock = Clock()
    one = replica(clock, forecast(wait_s=0.5, num_requests=1))
    assert one.expected_ttft_s(request()) == pytest.approx(0.6)
    clock.time_s = 0.2
    assert one.expected_ttft_s(request()) == pytest.approx(0.4)
    sent = one.send(request(300))
    assert one.expected_ttft_s(request()) == pytest.approx(0.7)
    one.begin(sent)
    assert one.expected_ttft_s(request()) == pytest.approx(0.4)
    clock.time_s = 9.0
    assert one.expected_ttft_s(request()) == pytest.approx(0.1)


def test_what_new_quotes_know_of_is_not_counted_twice() -> None:
    clock = Clock()
    one = replica(clock, forecast())
    one.send(request(300))
    begin = one.begin_poll()
    one.send(request(200))
    one.learn(begin, 1, [forecast(wait_s=0.3, num_requests=1)])
    assert one.expected_ttft_s(request()) == pytest.approx(0.1 + 0.3 + 0.2)


def test_a_request_is_judged_by_the_quotes_for_its_promise_or_the_one_most_like_it() -> None:
    one = replica(Clock(), forecast())
    waits_s = {10.0: 4.0, 0.5: 0.1, 2.0: 1.0}
    one.learn(
        one.begin_poll(),
        3,
        [forecast(wait, 3, SLO(ttft, math.inf)) for ttft, wait in waits_s.items()],
    )
    for ttft_s, wait_s in {**waits_s, 0.3: 0.1, 3.0: 1.0, 60.0: 4.0}.items():
        asked = request(100, ttft_s)
        assert one.expected_ttft_s(asked) == pytest.approx(0.1 + wait_s)
        is_told = ttft_s in waits_s
        assert one.least_ttft_s(asked) == pytest.approx((0.01 + wait_s) / 2 if is_told else 0.01)
    assert one.expected_ttft_s(request(100)) == pytest.approx(4.1)
    assert one.forecast is not None
    assert one.forecast.slo.ttft_s == 10


def test_the_latest_promises_are_remembered_until_nobody_asks_for_them() -> None:
    clock = Clock()
    latest = Latest[float](3, clock)
    for ttft_s in (1.0, 2.0, 3.0, 1.0, 4.0):
        latest.note(ttft_s)
    assert latest.all() == [3.0, 1.0, 4.0]
    clock.time_s = 9.0
    latest.note(3.0)
    clock.time_s = 11.0
    assert latest.all() == [3.0]


def test_no_promise_is_asked_about_that_no_server_makes() -> None:
    asked = AskedPromises()
    for ttft_s in (1.0, math.inf, 2.0):
        asked.note_ttft(ttft_s)
    assert asked.ttfts_but(2.0) == [1.0]
    for name in ("gold", "x" * 10_000):
        asked.note_tier(Tier("service_tier", name))
    assert asked.tiers == [("service_tier", "gold")]


def test_a_replica_without_requests_is_as_fast_as_its_device_however_slow_it_was() -> None:
    one = replica(Clock(), forecast(wait_s=8.0))
    assert one.expected_ttft_s(request()) == pytest.approx(0.1)
    assert one.expected_tpot_s() == 0.02
    one.send(request())
    assert one.expected_ttft_s(request()) > 8.0
    assert one.expected_tpot_s() == 0.05


@pytest.mark.parametrize(("caches_prefixes", "least_s"), [(False, 0.1), (True, 0.01)])
@pytest.mark.parametrize("num_others", [0, 1])
def test_where_prefixes_are_cached_a_lucky_prompt_has_only_the_wait_before_it(
    caches_prefixes: bool, least_s: float, num_others: int
) -> None:
    """The router would refuse a long conversation whose last message is new, and little else."""
    one = LiveReplica(0, "http://a:1", Clock())
    one.introduce([{"id": "x"}], 4.0, None, caches_prefixes=caches_prefixes)
    said = forecast(wait_s=0.5 * num_others, num_requests=num_others)
    one.learn(one.begin_poll(), said.num_requests, [said])
    assert one.alone_ttft_s(request(100)) == pytest.approx(least_s)
    least_s = (least_s + 0.5) / 2 if num_others else least_s
    assert one.least_ttft_s(request(100)) == pytest.approx(least_s)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_takes_real_replicas(name: str) -> None:
    """All spread requests, and those that look at queues or times begin with the idle replica."""
    clock = Clock()
    busy, idle = replica(clock, forecast(wait_s=5.0, num_requests=9)), replica(clock, forecast())
    router = make_router(name)
    chosen = []
    for _ in range(64):
        one = request()
        one.slo = SLO(ttft_s=1.0, tpot_s=0.1)
        chosen.append(router.route(one, [busy, idle]))
        chosen[-1].send(one)
    assert set(chosen) == {busy, idle}
    if name not in ("round_robin", "least_tokens", "prefix_affine"):
        assert chosen[0] is idle


@pytest.mark.parametrize("name", ["poll_interval_s", "connect_timeout_s", "poll_timeout_s"])
def test_times_of_the_configuration_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive seconds, not 0"):
        GatewayConfig(**{name: 0})
