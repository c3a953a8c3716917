"""While prompts lack seats no decode gives way, so that decodes leave theirs sooner."""

from __future__ import annotations

import math

from scored import num_good
from views import R, view_of

from slosched.core import SLO, Limits
from slosched.perfmodel import load_model
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.prompt_pack import PromptPack
from slosched.policy.kit.punctual import Order
from slosched.policy.kit.shortage import Shortage
from slosched.simulator.simulate import SimulationConfig
from slosched.workload.synthetic import synthesize


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


class GivesWay(Goodput):
    """A policy whose decodes give way however few seats there are."""

    def give_way(self, shortage: Shortage, order: Order, pack: PromptPack) -> None:
        with_seats = shortage.supply._replace(num_free_seats=math.inf)
        super().give_way(shortage._replace(supply=with_seats), order, pack)


def test_more_are_in_time_if_none_gives_way_while_seats_are_short() -> None:
    """1,200 conversations come in 22 s to a mixture of experts with 256 seats."""
    trace = synthesize("azure_conv", num_requests=1200, rate=55.0, slo=SLO(5.0, 0.1))
    model, config = load_model("h100/gpt-oss-120b-tp2"), SimulationConfig(num_blocks=60_000)
    ours, other = (num_good(each, trace, model, config) for each in (Goodput(), GivesWay()))
    assert ours >= other + 20
