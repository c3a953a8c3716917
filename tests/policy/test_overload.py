"""Overload that lasts: prompts go by length, and while seats are short no decode gives way."""

from __future__ import annotations

import math
from itertools import cycle

import pytest
from scored import num_good
from views import R, flat_model, view_of

from slosched.core import SLO, Limits
from slosched.perfmodel import load_model
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.overload import Overload
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.prompt_pack import PromptPack
from slosched.policy.kit.punctual import Order, Supply, best_order
from slosched.policy.kit.shortage import Shortage
from slosched.policy.kit.worth import Worth
from slosched.simulator.simulate import SimulationConfig
from slosched.workload.synthetic import synthesize

MODEL = flat_model()
LIMITS = Limits(max_num_batched_tokens=2048)
TOKENS_PER_S = 2048 / MODEL.predict_prefill(2048)


def shortage_at(now_s: float) -> Shortage:
    view = view_of([R("a", 500, 9.0)], now_s=now_s, limits=LIMITS)
    return Shortage(view, [], [], Supply(now_s), Pace.of([], MODEL, now_s))


@pytest.mark.parametrize(
    ("load", "ttfts_s", "tpots_s", "is_lasting"),
    [
        (1.3, [1.5], [0.05], True),
        (1.2, [1.5], [0.05], False),
        (1.3, [1.5, 2.9], [0.05], True),
        (1.3, [1.5, 3.1], [0.05], False),
        (1.3, [1.4], [0.05], False),
        (1.3, [1.5], [0.05, 0.1], False),
    ],
    ids=["too many", "a few too many", "TTFTs alike", "they differ", "they are short", "TPOTs"],
)
def test_it_lasts_while_too_many_arrive_that_ask_for_the_same(
    load: float, ttfts_s: list[float], tpots_s: list[float], is_lasting: bool
) -> None:
    """There is time for 19 prompts in a second, and so for 28.6 in 1.5."""
    num, tokens = 40, 1000
    worth = Worth()
    ttfts, tpots = cycle(ttfts_s), cycle(tpots_s)
    worth.see([R(f"r{i}", tokens, next(ttfts), tpot_s=next(tpots)).request() for i in range(num)])
    now_s = num * tokens / (load * TOKENS_PER_S)
    assert 1.5 * num / (load * now_s) == pytest.approx(28.6, abs=0.01)
    assert Overload(worth, 0.1).is_lasting(shortage_at(now_s)) == is_lasting


def test_prompts_go_by_length_only_if_one_is_late() -> None:
    long, short = R("long", 900, 1.0).request(), R("short", 100, 2.0).request()
    timed = [(long, 0.9), (short, 0.1)]
    assert best_order(timed, Supply(0.0), by_length=True) == Order([long, short], [])
    late = R("late", 950, 1.5).request()
    order = best_order([(long, 0.9), (late, 0.95), (short, 0.1)], Supply(0.0), by_length=True)
    assert order == Order([short, long], [late])


def test_no_decode_gives_way_while_prompts_lack_a_seat() -> None:
    """The prompts take all 600 tokens of a step if the decode, which has time, gives way."""
    prompts = [R("a", 519, 0.040), R("b", 81, 0.041), R("c", 900, 0.060)]
    requests = [R("decode", 11, 0.2, out=1), *prompts]
    enough, short = (
        view_of(requests, limits=Limits(max_num_batched_tokens=600, max_num_seqs=num))
        for num in (4, 2)
    )
    assert Goodput().schedule(enough).num_scheduled_tokens == {"a": 519, "b": 81}
    assert Goodput().schedule(short).num_scheduled_tokens == {"decode": 1, "b": 81}


class ByDeadline(Goodput):
    """A policy whose prompts go by deadline unless seats are scarce."""

    def order(self, shortage: Shortage) -> Order:
        return best_order(shortage.prompts, shortage.supply)


class GivesWay(Goodput):
    """A policy whose decodes give way however few seats there are."""

    def give_way(self, shortage: Shortage, order: Order, pack: PromptPack) -> None:
        with_seats = shortage.supply._replace(num_free_seats=math.inf)
        super().give_way(shortage._replace(supply=with_seats), order, pack)


def test_both_serve_more_in_an_overload_that_lasts() -> None:
    """600 conversations come in 10 s to a mixture of experts with 256 seats."""
    trace = synthesize("azure_conv", num_requests=600, rate=60.0, slo=SLO(5.0, 0.1))
    model, config = load_model("h100/gpt-oss-120b-tp2"), SimulationConfig(num_blocks=60_000)
    ours, *others = (
        num_good(policy, trace, model, config) for policy in (Goodput(), ByDeadline(), GivesWay())
    )
    assert ours >= 10 + max(others)
