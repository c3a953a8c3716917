"""Promises that leave prompts no time: late gaps let them through, or else the promise is broken."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from views import decode, flat_model, prompt, view_of

from slosched.core import SLO, DeadlineRule, EndReason, Limits, Request
from slosched.evaluate.capacity import Outcomes
from slosched.perfmodel import load_model
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.late_gaps import LateGaps, num_due_soon, starving_tpot_s
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.stays import Stays
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, TraceRequest

MODEL = flat_model()
"""5 ms + 50 us a token: a decode takes 5.05 ms, and 8.25 with a tile of 64 prompt tokens."""
STRICT_S, LOOSE_S = 0.006, 0.050
"""A TPOT that leaves prompts no time, and one that does."""
LIMITS = Limits(deadline_rule=DeadlineRule.TBT, max_num_batched_tokens=1000)


def strict(name: str, *late_gaps: int, tokens: int = 2, tpot_s: float = STRICT_S) -> Request:
    """Return a decode that is due now in a TPOT, with so many tokens of which these came late."""
    request = decode(name, 11, 1000 * tpot_s, tpot_s)
    gaps_s = [0.100 if i in late_gaps else 0.005 for i in range(1, tokens)]
    request.token_times_s[:] = [-sum(gaps_s[i:]) for i in range(tokens)]
    request.num_output_tokens = tokens
    request.num_computed_tokens = 10 + tokens - 1
    return request


def patient(name: str) -> Request:
    """Return a decode without a TPOT, of so few tokens that no gap of it might be late."""
    return replace(strict(name), slo=SLO(1.0, math.inf), deadline_s=math.inf, max_tokens=50)


def ended(num: int, num_tokens: int) -> list[Request]:
    requests = []
    for i in range(num):
        request = Request(f"ended{i}", 0.0, 10, 5000, SLO(1.0, 0.05))
        request.num_output_tokens, request.end_reason = num_tokens, EndReason.STOP
        requests.append(request)
    return requests


def pace_of(*decodes: Request) -> Pace:
    return Pace.of(sorted(decodes, key=lambda r: r.deadline_s), MODEL, 0.0)


def after(num_ended: int, num_tokens: int) -> Stays:
    """Return what is known after so many requests have ended with so many tokens."""
    stays = Stays()
    stays.watch(ended(num_ended, num_tokens))
    return stays


def test_a_tpot_without_time_for_a_tile_beside_one_decode_starves_prompts() -> None:
    assert starving_tpot_s(pace_of(strict("d")), MODEL) == STRICT_S
    assert starving_tpot_s(pace_of(strict("d"), strict("e", tpot_s=LOOSE_S)), MODEL) == STRICT_S
    assert starving_tpot_s(pace_of(strict("d", tpot_s=0.0082)), MODEL) == 0.0082
    assert starving_tpot_s(pace_of(strict("d", tpot_s=0.0083)), MODEL) is None
    assert starving_tpot_s(pace_of(), MODEL) is None


def test_a_tpot_that_not_even_one_decode_keeps_alone_starves_nobody() -> None:
    assert starving_tpot_s(pace_of(strict("d", tpot_s=0.005)), MODEL) is None
    loose = strict("e", tpot_s=LOOSE_S)
    assert starving_tpot_s(pace_of(strict("d", tpot_s=0.005), loose), MODEL) is None


@pytest.mark.parametrize(
    ("decodes", "limit_s"),
    [
        pytest.param([strict("d")], math.inf, id="200 tokens will come, one may be late"),
        pytest.param([strict("d", 1)], 0.006, id="one was late"),
        pytest.param([strict("d", 1, 2, tokens=3)], math.inf, id="it is lost"),
        pytest.param([strict("d", 1, tokens=201)], math.inf, id="200 gaps, two may be late"),
        pytest.param([strict("d", 1, tpot_s=0.005)], math.inf, id="not kept"),
        pytest.param([strict("d"), strict("e", 1, tpot_s=0.008)], 0.008, id="one of two"),
        pytest.param([patient("d")], math.inf, id="it has no TPOT"),
    ],
)
def test_a_step_ends_before_a_decode_is_due_that_can_afford_no_late_gap(
    decodes: list[Request], limit_s: float
) -> None:
    view = view_of(decodes, MODEL, limits=LIMITS)
    gaps = LateGaps(after(20, 200))
    for _ in range(2):  # What was counted is not counted again.
        assert gaps.limits_s(decodes, STRICT_S, view, 0.0)[0] == pytest.approx(limit_s)


def test_a_gap_that_was_foreseen_shorter_counts_when_it_is_over() -> None:
    """A step is planned while one runs, whose token is expected 5 ms after the last one."""
    gaps, view = LateGaps(after(20, 200)), view_of([], MODEL, limits=LIMITS)

    def limit_s() -> float:
        return gaps.limits_s([request], STRICT_S, view, 0.0)[0]

    request = strict("d", tokens=3)
    request.num_output_placeholders = 1
    assert limit_s() == math.inf, "200 tokens will come, one may be late"
    request.token_times_s[-1] += 0.020
    request.num_output_placeholders = 0
    assert limit_s() == STRICT_S
    late = request.token_times_s[-1] + 0.020
    request.token_times_s.append(late)
    request.num_output_tokens, request.num_output_placeholders = 4, 1
    assert limit_s() == math.inf, "two are late, so that it is lost"
    request.token_times_s[-1] -= 0.015
    request.num_output_placeholders = 0
    assert limit_s() == STRICT_S, "it was faster than foreseen"


def test_while_few_requests_have_ended_only_tokens_that_came_count() -> None:
    view = view_of([], MODEL, limits=LIMITS)
    gaps = LateGaps(after(3, 200))
    assert gaps.limits_s([strict("d", tokens=100)], STRICT_S, view, 0.0)[0] == STRICT_S
    assert gaps.limits_s([strict("e", tokens=101)], STRICT_S, view, 0.0) == [math.inf]


def test_so_many_decodes_may_be_given_up() -> None:
    decodes = [strict("d", 1), strict("e", 1, tpot_s=0.008), strict("f", 1, tpot_s=0.050)]
    gaps, view = LateGaps(after(20, 200)), view_of([], MODEL, limits=LIMITS)
    limits_s = gaps.limits_s(decodes, STRICT_S, view, 0.0)
    assert limits_s == pytest.approx([0.006, 0.008, 0.050, math.inf])


def test_prompts_are_due_soon_if_a_step_of_decodes_makes_them_late() -> None:
    """10 ms of its own, 6 of the step before, and 5.05 of the decode in both."""
    pace = pace_of(strict("d"))
    timed = [(prompt("p", 100, slack_ms), 0.010) for slack_ms in (26.0, 26.2, 36.2)]
    assert [num_due_soon([t], pace, 0.006, 0.0, 1000) for t in timed] == [1, 0, 0]
    assert num_due_soon(timed, pace, 0.006, 0.0, 1000) == 3, "each waits for those before it"
    assert num_due_soon(timed, pace, 0.006, 0.0, 150) == 1, "the others come a step later"


def planned(*requests: Request) -> dict[str, int]:
    policy = Goodput()
    policy._arrivals.stays.watch(ended(20, 200))
    view = view_of(requests, MODEL, limits=LIMITS)
    return dict(policy.schedule(view).num_scheduled_tokens)


def test_a_prompt_waits_until_it_is_due_and_then_goes_whole() -> None:
    """A step of 6 ms has time for a few tokens of it."""
    assert planned(strict("d"), prompt("p", 500, 900.0))["p"] < 10
    assert planned(strict("d"), prompt("p", 500, 45.0)) == {"d": 1, "p": 500}


def test_a_decode_without_a_tpot_keeps_no_prompt_from_its_time() -> None:
    assert planned(strict("d"), patient("e"), prompt("p", 500, 45.0))["p"] == 500


def test_one_prompt_is_not_worth_one_decode_but_two_are() -> None:
    at_its_limit = strict("d", 1)
    two = prompt("p", 400, 42.0), prompt("q", 90, 42.0)
    assert planned(at_its_limit, two[0])["p"] < 10
    assert planned(at_its_limit, *two) == {"d": 1, "p": 400, "q": 90}


@pytest.mark.parametrize("rule", [DeadlineRule.TBT, DeadlineRule.MEAN_TPOT])
def test_who_asks_for_a_tpot_that_starves_prompts_stops_nobody_else(rule: DeadlineRule) -> None:
    """On an A30 a decode takes 21.5 ms, 25.3 with a tile; half of the requests ask for 23 ms."""
    draws, at_s, requests = random.Random(5), 0.0, []
    for i in range(150):
        tpot_s = draws.choice([0.023, 0.1])
        num_prompt, num_output = draws.randint(100, 600), draws.randint(150, 300)
        requests.append(TraceRequest(str(i), at_s, num_prompt, num_output, SLO(1.0, tpot_s)))
        at_s += draws.expovariate(0.5)
    config = SimulationConfig(Limits(deadline_rule=rule))
    trace, model = Trace.of(requests, "t"), load_model("a30/llama-3.1-8b")
    done = simulate(trace, Goodput(), model, config)
    good = Outcomes.of(done, rule).good
    others = [g for g, r in zip(good, done, strict=True) if r.slo.tpot_s == 0.1]
    assert sum(others) >= 0.95 * len(others)
    one_by_one = simulate(trace, Goodput(), model, config, on_step=lambda _: None)
    assert [r.token_times_s for r in done] == [r.token_times_s for r in one_by_one]
