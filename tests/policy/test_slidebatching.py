"""slidebatching against examples computed by hand with an additive latency model, as xLLM's is."""

from __future__ import annotations

import pytest
from factories import make_model
from views import begun, decode, prompt, view_of

from slosched.core import Limits, Request, SchedulerOutput
from slosched.policy import SlideBatching
from slosched.policy.spec import make_policy

MODEL = make_model(
    per_token_s=50e-6,
    per_attention_s=0,
    per_context_s=1e-6,
    per_tile_s=0,
    any_decode_s=0,
    constant_s=5e-3,
)
"""T = 5 ms + 0.05 per token + 0.001 per token of the decodes' context.

So c0, a step of one token, is 5.051 ms; a prompt of n tokens has e = 0.05 n - 0.051; two decodes of
1,000 tokens of context take 7.1 ms, and have e = 1.0245 each, one alone 0.999.
"""


def plan(*requests: Request, **options: object) -> SchedulerOutput:
    return SlideBatching(**options).schedule(view_of(requests, model=MODEL))


def first(output: SchedulerOutput) -> str:
    return next(iter(output.num_scheduled_tokens))


# e: 2.049 for the decodes, 49.949 and 4.949 for the prompts, 56.947 in all.
# Step max(40.01, 0.65 · 50) = 40.01; Φ = 56.947 · 40.01 / (40.01 - 5.051) = 65.2.
# Only d1 is urgent; then by deadline d2, long, short.  7.1 + 658 · 0.05 = 40.0 ms.
def test_a_short_queue_is_served_by_deadline() -> None:
    requests = (prompt("short", 100, 500), prompt("long", 1000, 300))
    output = plan(decode("d2", 1000, 80), decode("d1", 1000, 40.01), *requests)
    assert list(output.num_scheduled_tokens.items()) == [("d1", 1), ("d2", 1), ("long", 658)]


# Step 400.  Ten long ones and the short: E = 499.49 + 9.949 = 509.4, Φ = 509.4 · 400 / 394.95
# = 516 ms: all are urgent, and the short one is the densest.  Three: E = 159.8, Φ = 161.8: nobody
# is.  Ten, with alpha one half: 258 ms: nobody is.
@pytest.mark.parametrize(
    ("num_long", "alpha", "served_first"),
    [(10, 1.0, "short"), (3, 1.0, "long0"), (10, 0.5, "long0")],
)
def test_the_line_slides_with_the_queue(num_long: int, alpha: float, served_first: str) -> None:
    longs = [prompt(f"long{i}", 1000, 400) for i in range(num_long)]
    output = plan(*longs, prompt("short", 200, 450), alpha=alpha)
    assert first(output) == served_first


def test_what_is_cached_of_a_waiting_prompt_costs_nothing() -> None:
    """As with ten long ones above, of 2,800 more tokens that are in the prefix cache."""
    cached = prompt("cached", 3000, 450)
    cached.num_computed_tokens = 2800
    assert first(plan(*[prompt(f"long{i}", 1000, 400) for i in range(10)], cached)) == "cached"


def test_a_prompt_whose_adapter_finds_no_slot_keeps_nobody_out() -> None:
    requests = [decode("d1", 1000, 100), prompt("p", 100, 200), decode("d2", 1000, 300)]
    for request, lora_id in zip(requests, ("x", "y", "x"), strict=True):
        request.lora_id = lora_id
    view = view_of(requests, MODEL, limits=Limits(max_loras=1))
    assert list(SlideBatching().schedule(view).num_scheduled_tokens) == ["d1", "d2"]


def test_an_urgent_decode_goes_before_urgent_prompts() -> None:
    longs = [prompt(f"long{i}", 1000, 400) for i in range(10)]
    assert first(plan(*longs, decode("d", 1000, 405))) == "d"


# e: 149.949 + 99.949 + 0.999 = 250.9; step 160.01, Φ = 250.9 · 160.01 / 154.96 = 259 ms.
# Urgent are the prompts, the shorter first: 105 ms; 1,100 tokens of the other make 160.
def test_a_decode_that_is_ahead_waits() -> None:
    requests = (prompt("p1", 3000, 160.01), prompt("p2", 2000, 200))
    output = plan(decode("d", 1000, 300), *requests)
    assert list(output.num_scheduled_tokens.items()) == [("p2", 2000), ("p1", 1100)]


def test_a_step_always_lasts_a_share_of_the_tpot() -> None:
    """Slack 10 ms; 0.65 · 50.02 = 32.513: 6.05 + 529 · 0.05 = 32.5 ms."""
    output = plan(decode("d", 1000, 10, tpot_s=0.05002), prompt("p", 1000, 900, tpot_s=0.06))
    assert output.num_scheduled_tokens == {"d": 1, "p": 529}
    wider = plan(decode("d", 1000, 10, tpot_s=0.05002), prompt("p", 1000, 900), floor=1.0)
    assert wider.num_scheduled_tokens == {"d": 1, "p": 878}  # 0.05 s: 43.95 / 0.05, below it


def test_who_cannot_be_in_time_does_not_shrink_the_step() -> None:
    """`hopeless` needs 49.949 + 5.051 = 55 ms and has 40; `late` is due 3 ms before it can be done.

    The step is that of `d`: 60.01 ms.  After the decodes, 7.1 ms, it has time for 1,000 tokens,
    57.1 ms, but not for a cut of more than 50 tokens of `p`.
    """
    requests = (prompt("hopeless", 1000, 40), prompt("p", 2000, 5000))
    output = plan(decode("late", 1000, 3), decode("d", 1000, 60.01), *requests)
    assert list(output.num_scheduled_tokens.items()) == [
        ("late", 1),
        ("d", 1),
        ("hopeless", 1000),
        ("p", 58),
    ]


def test_small_cuts_are_not_made() -> None:
    """As before, but 58 tokens of `p` are a cut below 59."""
    requests = (prompt("hopeless", 1000, 40), prompt("p", 2000, 5000))
    decodes = (decode("late", 1000, 3), decode("d", 1000, 60.01))
    output = plan(*decodes, *requests, min_chunk_tokens=59)
    assert "p" not in output.num_scheduled_tokens


def test_with_nobody_in_time_a_step_has_no_limit() -> None:
    output = plan(decode("d", 1000, -10), prompt("p", 60_000, 100))
    assert output.num_scheduled_tokens == {"d": 1, "p": 60_000}


@pytest.mark.parametrize(("starved_after", "served_first"), [(1.0, "old"), (2.0, "new")])
def test_a_starved_prompt_goes_before_cheaper_ones(starved_after: float, served_first: str) -> None:
    """Overdue by 1.1 and 0.5 s, with a TTFT of 1 s."""
    requests = (prompt("new", 200, -500), prompt("old", 1000, -1100))
    assert first(plan(*requests, starved_after=starved_after)) == served_first


def test_the_end_of_the_order_is_evicted_for_a_decode() -> None:
    """Both hold 62 blocks, there are no others, and each needs a new one."""
    requests = (decode("ahead", 993, 900), decode("urgent", 993, 40))
    output = SlideBatching().schedule(view_of(requests, model=MODEL, num_blocks=124, block_size=16))
    assert output.num_scheduled_tokens == {"urgent": 1}
    assert output.preempted == ("ahead",)


def test_a_prompt_without_room_waits_and_those_behind_it() -> None:
    """20 free blocks hold 320 tokens, and the begun one still needs 10 of them."""
    requests = (begun("begun", 320, 160, 900), prompt("big", 300, 400), prompt("small", 16, 500))
    output = SlideBatching().schedule(view_of(requests, model=MODEL, num_blocks=30, block_size=16))
    assert output.num_scheduled_tokens == {"begun": 160}


def test_a_step_too_short_for_anybody_serves_decodes_all_the_same() -> None:
    """It is in time within 7 ms, but with a margin of one half the step is too short for its 6.05
    ms."""
    output = plan(decode("d", 1000, 7, tpot_s=0.001), prompt("p", 100, 5000), margin=0.5)
    assert output.num_scheduled_tokens == {"d": 1}


def test_it_asks_for_a_latency_model() -> None:
    with pytest.raises(ValueError, match="latency model"):
        SlideBatching().schedule(view_of([prompt("p", 10, 100)], model=None))


@pytest.mark.parametrize("option", ["alpha=-1", "floor=nan", "margin=1", "min_chunk_tokens=0"])
def test_nonsense_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option.split('=')[0]} must be"):
        make_policy(f"slidebatching:{option}")
