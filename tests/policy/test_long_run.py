"""Which prompts are too long for the device while more arrive than it has time for."""

from __future__ import annotations

import math

import pytest
from scored import num_good
from views import R, flat_model, view_of

from slosched.core import NO_SLO, SLO, DeadlineRule, EndReason, Limits, Request, SchedulerView
from slosched.perfmodel import load_model
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.arrivals import Arrivals
from slosched.policy.kit.long_run import LongRun
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.punctual import Order, Supply
from slosched.policy.kit.shortage import Shortage
from slosched.policy.kit.unkeepable import Kept
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import synthesize
from slosched.workload.slo import Tiers

MODEL = flat_model()
"""5 ms + 50 us a token: a step of 50 ms has time for 900 tokens."""
NOW_S = 1.0
MIXED = [200] * 20 + [1000] * 14 + [3000] * 6


def arrived(lengths: list[int], num_ended: int = 20) -> tuple[Arrivals, list[Request]]:
    """Return what is known of prompts that came in the last second; some emitted ten tokens."""
    num = len(lengths)
    prompts = [Request(f"r{i}", i / num, n, 512, SLO(5.0, 0.05)) for i, n in enumerate(lengths)]
    arrivals = Arrivals()
    arrivals.see(prompts)
    for ended in prompts[:num_ended]:
        ended.num_output_tokens, ended.end_reason, ended.end_s = 10, EndReason.LENGTH, NOW_S
    return arrivals, prompts


def at(now_s: float) -> tuple[Pace, SchedulerView]:
    """Return the pace of a decode that asks for 50 ms, and what a step sees."""
    view = view_of([R("d", 11, 9.0, out=1)], MODEL, now_s=now_s)
    return Pace.of(view.running, MODEL, now_s), view


def longest(lengths: list[int], num_ended: int = 20) -> float:
    return LongRun(arrived(lengths, num_ended)[0]).most_tokens(*at(NOW_S), Kept())


def test_if_there_is_time_for_all_that_arrive_none_is_too_long() -> None:
    """8,000 tokens came in the second, and in steps of 50 ms more than 17,000 go through."""
    assert longest([200] * 40) == math.inf


def test_the_shortest_go_through_for_which_there_is_time() -> None:
    """Of 36,000 tokens 17,700 go through: 20 prompts of 200 and 13 of 1,000."""
    assert longest(MIXED) == 1000


@pytest.mark.parametrize(("num_arrivals", "num_ended"), [(40, 15), (15, 15)])
def test_too_few_requests_say_nothing(num_arrivals: int, num_ended: int) -> None:
    """As long as 16 have not ended, nobody knows what answers take."""
    assert longest([3000] * num_arrivals, num_ended) == math.inf


def test_once_no_more_arrive_there_is_time_for_all() -> None:
    """The 36,000 tokens are those of 2.1 seconds then.  It is not looked at in every step."""
    arrivals, _ = arrived(MIXED)
    long_run = LongRun(arrivals)
    assert long_run.most_tokens(*at(NOW_S), Kept()) == 1000
    assert long_run.most_tokens(*at(1.06), Kept()) == 1000
    assert long_run.most_tokens(*at(2.1), Kept()) == math.inf


def test_best_effort_and_tpots_that_are_not_kept_take_no_time() -> None:
    """Without the six prompts of 3,000 tokens there is time for the others."""
    lengths = [200] * 20 + [900] * 12 + [3000] * 6

    def longest(slo: SLO, kept: Kept) -> float:
        arrivals, of_slo = Arrivals(), [SLO(5.0, 0.05)] * 32 + [slo] * 6
        prompts = [
            Request(f"r{i}", i / 38, n, 512, slo)
            for i, (n, slo) in enumerate(zip(lengths, of_slo, strict=True))
        ]
        arrivals.see(prompts)
        for ended in prompts[:20]:
            ended.num_output_tokens, ended.end_reason, ended.end_s = 10, EndReason.LENGTH, NOW_S
        return LongRun(arrivals).most_tokens(*at(NOW_S), kept)

    assert longest(SLO(5.0, 0.02), Kept()) < math.inf
    assert longest(SLO(5.0, 0.02), Kept(0.04)) == math.inf
    assert longest(NO_SLO, Kept()) == math.inf


def test_when_a_sixteenth_of_the_arrivals_is_new_the_answer_is_looked_for_anew() -> None:
    arrivals, _ = arrived([200] * 40)
    long_run = LongRun(arrivals)
    assert long_run.most_tokens(*at(NOW_S), Kept()) == math.inf
    arrivals.see([Request("later", NOW_S, 30_000, 512, SLO(5.0, 0.05))])
    assert long_run.most_tokens(*at(NOW_S), Kept()) == math.inf
    arrivals.see([Request("last", NOW_S, 30_000, 512, SLO(5.0, 0.05))])
    assert long_run.most_tokens(*at(NOW_S), Kept()) == 200


def test_who_is_too_long_goes_behind_those_in_time_unless_it_has_begun() -> None:
    arrivals, prompts = arrived(MIXED)
    short, late = prompts[20], prompts[21]
    begun, paused, waiting = prompts[37:]
    begun.status = view_of([R("b", 3000, 9.0, done=64)], MODEL).running[0].status
    paused.num_preemptions = 1
    order = Order([waiting, begun, short, paused], [late])
    assert LongRun(arrivals).long_last(order, *at(NOW_S), Kept()) == (
        [begun, short, paused],
        [waiting, late],
    )


def test_without_a_tpot_of_decodes_that_of_the_arrivals_limits_steps() -> None:
    arrivals, _ = arrived(MIXED)
    view = view_of([], MODEL, now_s=NOW_S)
    pace = Pace.of((), MODEL, NOW_S)
    assert pace.tpot_s == math.inf
    assert LongRun(arrivals).most_tokens(pace, view, Kept()) == 1000


def test_in_an_overload_more_requests_are_good_if_those_that_are_too_long_go_last() -> None:
    """Under `envelope`, which lets a request make up for its TPOT if its first token is early."""

    class ServesLongOnes(Goodput):
        def reset(self) -> None:
            super().reset()
            self._long_run = NoneIs(self._arrivals)

    class NoneIs(LongRun):
        def long_last(self, order: Order, *_: object) -> Order:
            return order

    trace = synthesize("azure_conv", num_requests=800, seed=3).scaled_to(46.0)
    slos = tuple(SLO(2.0, tpot_s) for tpot_s in (0.010, 0.015, 0.025, 0.050))
    trace = trace.with_slo(Tiers(slos, (0.25,) * 4))
    config = SimulationConfig(Limits(deadline_rule=DeadlineRule.ENVELOPE), num_blocks=27_000)
    model = load_model("h200/llama-3.1-8b")
    ours = num_good(Goodput(), trace, model, config)
    assert ours > num_good(ServesLongOnes(), trace, model, config) + 60


def test_long_prompts_do_not_go_last_if_length_must_not_count() -> None:
    arrivals, prompts = arrived(MIXED)
    limits = Limits(deadline_rule=DeadlineRule.MEAN_TPOT)

    def order(policy: Goodput) -> list[str]:
        policy._long_run = LongRun(arrivals)
        view = view_of([R("d", 11, 9.0, out=1)], MODEL, now_s=NOW_S, limits=limits)
        pace = Pace.of(view.running, MODEL, NOW_S)
        timed = [(prompts[39], 0.15), (prompts[20], 0.05)]
        shortage = Shortage(view, view.running, timed, Supply(NOW_S), pace)
        return [r.request_id for r in policy.order(shortage).in_time]

    assert order(Goodput()) == ["r20"]
    assert order(Goodput(fairness=0.5)) == ["r39", "r20"]
    assert order(Goodput(ageing=0.5)) == ["r39", "r20"]
