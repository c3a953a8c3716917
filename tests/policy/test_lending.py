"""Decodes that are far ahead lend their KV blocks to prompts, with times added up by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scored import num_good
from views import R, decode, flat_model, view_of

from slosched.batch import BatchBuilder
from slosched.core import SLO, DeadlineRule, Limits, Request, RequestStatus
from slosched.perfmodel import load_model
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.lending import lend
from slosched.policy.kit.punctual import by_deadline
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import synthesize
from slosched.workload.slo import Tiers

MODEL = flat_model()
"""5 ms + 50 us a token: to compute 300 tokens anew takes 20 ms."""


def lent(
    prompts: Sequence[Request],
    running: Sequence[Request],
    rule: DeadlineRule = DeadlineRule.MEAN_TPOT,
    num_blocks: int = 1000,
) -> set[str]:
    """Return whose blocks are lent in a cache of blocks of one token."""
    limits = Limits(deadline_rule=rule)
    view = view_of([*prompts, *running], MODEL, limits=limits, num_blocks=num_blocks)
    batch = BatchBuilder(view)
    timed = by_deadline((r, MODEL.predict_prefill(r.num_uncomputed_tokens)) for r in prompts)
    lend(batch, view, timed, list(running))
    return set(batch.preempted)


def prompt(
    name: str = "p", tokens: int = 500, due_s: float = 0.2, arrival_s: float = -1.0
) -> Request:
    """Return a prompt that has waited for most of its TTFT; 500 tokens take 30 ms."""
    return R(name, tokens, due_s, arrival_s=arrival_s).request()


def decodes(tpot_s: float = 0.05) -> list[Request]:
    """Return decodes that hold 897 blocks; two are ahead by more than 100 times 20 ms."""
    slacks_ms = {"near": 1900, "far": 5000, "further": 9000}
    return [decode(name, 300, slack_ms, tpot_s) for name, slack_ms in slacks_ms.items()]


def test_the_decode_that_is_furthest_ahead_lends_first_and_no_more_do_than_are_needed() -> None:
    assert lent([prompt(tokens=100)], decodes()) == set()
    assert lent([prompt(tokens=300)], decodes()) == {"further"}
    assert lent([prompt(tokens=500)], decodes()) == {"far", "further"}


def test_nothing_is_lent_in_vain() -> None:
    """The third decode is not far enough ahead, so that there is no room for 800 tokens."""
    assert lent([prompt(tokens=800)], decodes()) == set()


def test_blocks_are_lent_to_new_prompts_that_are_due_soon_but_not_late() -> None:
    assert lent([prompt(arrival_s=0.0)], decodes()) == set()
    assert lent([prompt(due_s=0.02)], decodes()) == set()


def test_nobody_gets_ahead_under_tbt() -> None:
    assert lent([prompt()], decodes(), DeadlineRule.ENVELOPE) == {"far", "further"}
    assert lent([prompt()], decodes(), DeadlineRule.TBT) == set()


def test_the_cache_has_to_be_large_enough_for_all_in_turns() -> None:
    """A step of all takes 5.15 ms, so that a decode needs 16 % of its blocks at a TPOT of 32 ms.

    That is 147 of 900, and 129 of the prompt at 20 ms: more than 180.
    """
    tight = replace(prompt().slo, tpot_s=0.02)
    hasty, patient = prompt(), prompt()
    hasty.slo = tight
    assert lent([patient], decodes(tpot_s=0.032)) == {"far", "further"}
    assert lent([hasty], decodes(tpot_s=0.032)) == set()


def test_there_has_to_be_time_for_all_prompts_and_what_is_computed_anew() -> None:
    """Decodes take 10 % of the time.  Half of the rest is 87 ms until the prompt is due."""
    other = prompt("other", tokens=1000, due_s=0.21)  # 55 ms
    assert lent([prompt(), other], decodes()) == {"far", "further"}
    other = prompt("other", tokens=1300, due_s=0.21)  # 70 ms
    assert lent([prompt(), other], decodes()) == set()


def test_who_has_lent_gets_blocks_again_before_it_is_due_and_before_new_prompts() -> None:
    back = decode("back", 300, slack_ms=75)
    back.status, back.num_computed_tokens, back.num_preemptions = RequestStatus.WAITING, 0, 1
    assert lent([back], decodes()) == {"further"}
    assert lent([back, prompt(tokens=400)], decodes()) == {"far", "further"}
    back.deadline_s = 1.0
    assert lent([back], decodes()) == set()


def test_at_most_eight_decodes_lend_in_one_step() -> None:
    """Each lends 49 blocks, and each of 15 prompts wants 60, or 900 in all."""
    running = [decode(f"d{i:02}", 50, slack_ms=9000 + i, tpot_s=0.5) for i in range(20)]
    prompts = [prompt(f"p{i}", 60, due_s=2 + i, arrival_s=-40.0) for i in range(15)]
    names = lent(prompts, running, num_blocks=20 * 49)
    assert len(names) == 8
    assert names == {f"d{i:02}" for i in range(12, 20)}


def test_goodput_lends_only_where_nearly_all_ask_for_the_same_tpot() -> None:
    def preempted(tpot_s: float) -> set[str]:
        hasty, other = prompt("hasty", 250), prompt("other", 250)
        other.slo = replace(other.slo, tpot_s=tpot_s)
        view = view_of([hasty, other, *decodes()], MODEL, num_blocks=1000)
        return set(Goodput().schedule(view).preempted)

    assert preempted(0.05) == {"far", "further"}
    assert preempted(0.1) == set()


def test_long_answers_in_a_small_cache_take_turns() -> None:
    """Answers of 800 tokens in 21,856: 129 are in time, and 110 if no blocks are lent to prompts."""
    trace = synthesize("servegen_r1", num_requests=150, seed=4).scaled_to(3.0)
    trace = trace.with_slo(Tiers((SLO(5.0, 0.1),), (1.0,)))
    model, config = load_model("l40s/llama-3.1-8b"), SimulationConfig(Limits(), num_blocks=1366)
    assert num_good(make_policy("goodput"), trace, model, config) >= 122
