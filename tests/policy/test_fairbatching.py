"""fairbatching against examples computed by hand with its own form of latency model."""

from __future__ import annotations

import pytest
from factories import make_model
from views import begun, decode, prompt, view_of

from slosched.core import Request, SchedulerOutput
from slosched.policy import FairBatching
from slosched.policy.kit.deadlines import Deadlines

MODEL = make_model(
    per_token_s=50e-6,
    per_attention_s=0,
    per_context_s=1e-6,
    per_tile_s=0,
    any_decode_s=0,
    constant_s=5e-3,
)
"""T = a + b · new tokens + c · context = 5 ms + 0.05 n + 0.001 Σ context of the decodes."""


def plan(*requests: Request, **options: object) -> SchedulerOutput:
    return FairBatching(**options).schedule(view_of(requests, model=MODEL))


def d(name: str, slack_ms: float, tpot_ms: float = 50.01) -> Request:
    """Return a decode with 1,000 tokens of context, which takes 1.05 ms."""
    return decode(name, 1000, slack_ms, tpot_ms / 1e3)


# Budget max(40, 50.01) = 50.01 ms; urgent below 50.01 + 50.01: d1 and d2, which take 7.1 ms.
# That leaves 42.91 ms, 858 tokens of a prompt (7.1 + 42.9 = 50.0), and no time for d3.
def test_a_decode_that_is_ahead_lends_its_step_to_a_prompt() -> None:
    output = plan(d("d3", 200), d("d2", 80), d("d1", 40), prompt("p", 5000, 500))
    assert list(output.num_scheduled_tokens.items()) == [("d1", 1), ("d2", 1), ("p", 858)]


def test_it_is_served_last_where_time_is_left() -> None:
    """The others take 7.1 + 100 · 0.05 = 12.1 ms, and d3 makes it 13.15 ms."""
    output = plan(d("d3", 200), d("d2", 80), d("d1", 40), prompt("p", 100, 500))
    assert list(output.num_scheduled_tokens) == ["d1", "d2", "p", "d3"]


def test_the_time_is_the_slack_where_that_is_more_than_the_tpot() -> None:
    """The budget is 120.01 ms.  Only d1 is urgent (below 170.02 ms) and takes 6.05 ms; 113.96 /
    0.05 = 2,279."""
    output = plan(d("d1", 120.01), d("d2", 300), prompt("p", 5000, 500))
    assert output.num_scheduled_tokens == {"d1": 1, "p": 2279}


def test_prompts_run_in_order_of_slack_begun_or_not() -> None:
    requests = (prompt("late", 100, 300), begun("mid", 400, 200, 200), prompt("soon", 100, 100))
    output = plan(*requests)
    assert list(output.num_scheduled_tokens) == ["soon", "mid", "late"]


def test_without_decodes_only_tokens_are_a_limit() -> None:
    assert plan(prompt("p", 50_000, 10)).num_scheduled_tokens == {"p": 50_000}


def test_more_urgent_decodes_than_there_is_time_for() -> None:
    """All are late, so the budget is the TPOT.  5 + 42 · 1.05 = 49.1 ms fit, but 43 take 50.15 ms.
    The first ones run.

    A prompt gets the 0.91 ms that are left.
    """
    output = plan(*(d(f"d{i}", -100 + i) for i in range(60)), prompt("p", 100, 500))
    assert list(output.num_scheduled_tokens) == [*(f"d{i}" for i in range(42)), "p"]
    assert output.num_scheduled_tokens["p"] == 18


def test_a_step_too_short_for_anybody_serves_decodes_all_the_same() -> None:
    """The TPOT is 4 ms, but a step takes 6.05 ms."""
    output = plan(d("d1", -5, tpot_ms=4), prompt("p", 100, 500))
    assert output.num_scheduled_tokens == {"d1": 1}


def test_a_margin_is_left_unused() -> None:
    """0.9 · 50.01 = 45.009 ms, minus 7.1 ms: 758 tokens."""
    output = plan(d("d2", 80), d("d1", 40), prompt("p", 5000, 500), margin=0.1)
    assert output.num_scheduled_tokens == {"d1": 1, "d2": 1, "p": 758}


@pytest.mark.parametrize(("deadlines", "is_served"), [("envelope", False), ("run", True)])
def test_an_early_first_token_banks_slack_in_the_envelope(deadlines: str, is_served: bool) -> None:
    """It arrived at -0.26 s, with its first token at -10 ms.  Its next is due at 40 ms, or at 790
    ms in the envelope."""
    early = d("early", 40)
    early.arrival_s = -0.26
    other = d("other", 30)
    output = plan(other, early, prompt("p", 5000, 500), deadlines=Deadlines(deadlines))
    assert ("early" in output.num_scheduled_tokens) is is_served


def test_a_decode_that_is_not_urgent_makes_room_for_one_that_is() -> None:
    """Both hold 62 blocks, there are no others, and each needs a new one."""
    requests = (decode("ahead", 993, 900), decode("urgent", 993, 10))
    output = FairBatching().schedule(view_of(requests, model=MODEL, num_blocks=124, block_size=16))
    assert output.num_scheduled_tokens == {"urgent": 1}
    assert output.preempted == ("ahead",)


def test_a_decode_that_is_not_urgent_waits_for_a_block() -> None:
    requests = (decode("urgent", 1000, 10), decode("ahead", 993, 900))
    output = FairBatching().schedule(
        view_of(requests, model=MODEL, num_blocks=63 + 62, block_size=16)
    )
    assert output.num_scheduled_tokens == {"urgent": 1}
    assert not output.preempted


def test_it_asks_for_a_latency_model() -> None:
    with pytest.raises(ValueError, match="latency model"):
        FairBatching().schedule(view_of([d("d1", 40)], model=None))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"margin must be in \[0, 1\), not 1"):
        FairBatching(margin=1)
