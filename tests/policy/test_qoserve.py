"""qoserve against examples computed by hand with the coefficients that its authors published."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import make_model
from views import R, begun, decode, prompt, view_of

from slosched.core import SLO, BatchShape, DeadlineRule, Limits, Request
from slosched.perfmodel.model import FittedModel
from slosched.policy import QoServe
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import synthesize


class A100(FittedModel):
    """Llama-3-8B on an A100 as in `deadline_scheduler.py` at 72339db: two lines, in ms.

    up to 512 tokens: 14.936 + 0.0588 n + 0.0225 p + 0.0363 d + 0.000111 Σdecode context
    + 0.000755 prior context; above: 5.004 + 0.0272 n + 0.0686 p - 0.0414 d + …
    """

    form = "published"

    def parameters(self) -> dict[str, object]:
        return {}

    def predict(self, shape: BatchShape) -> float:
        prior = shape.prefill_context_tokens - shape.num_prefill_tokens
        small = (14.936e-3, 5.882475e-05, 2.247956e-05, 3.634519e-05, 1.111258e-07, 7.554773e-07)
        large = (5.004e-3, 2.719050e-05, 6.863043e-05, -4.143993e-05, 1.663409e-07, 2.727223e-06)
        terms = (
            1,
            shape.num_tokens,
            shape.num_prefill_tokens,
            shape.num_decodes,
            shape.decode_context_tokens,
            prior,
        )
        line = small if shape.num_tokens <= 512 else large
        return sum(c * term for c, term in zip(line, terms, strict=True))


def decodes(slack_ms: float) -> list[Request]:
    return [decode(f"d{i}", 1000, slack_ms + i) for i in range(32)]


# 32 decodes of 1,000 tokens of context, p = n - 32:
#   n <= 512: 14.936 + 1.163 + 3.556 = 19.655 ms, + 0.05882 n + 0.02248 p
#   n  > 512:  5.004 - 1.326 + 5.323 =  9.001 ms, + 0.02719 n + 0.06863 p
#   n = 128: 29.34, 256: 39.75, 512: 60.56, 768: 80.40 ms; times 1.2: 35.2, 47.7, 72.7, 96.5 ms
@pytest.mark.parametrize(
    ("slack_ms", "chunk"),
    [(-5, 96), (30, 96), (47, 96), (48, 224), (72, 224), (75, 480), (96, 480), (97, 736)],
)
def test_the_chunk_is_the_largest_that_the_slack_has_time_for(slack_ms: float, chunk: int) -> None:
    view = view_of([*decodes(slack_ms), prompt("p", 5000, 6000)], model=A100())
    planned = QoServe().schedule(view).num_scheduled_tokens
    assert len(planned) == 33
    assert planned["p"] == chunk


@pytest.mark.parametrize(("rule", "chunk"), [("envelope", 736), ("mean_tpot", 96)])
def test_tokens_after_a_late_first_one_are_due_from_that_one_on(rule: str, chunk: int) -> None:
    """The second tokens are due 97 ms from now if counted from the first, which was a second late.

    The envelope counts them from when it was due.
    """
    limits = Limits(max_num_batched_tokens=100_000, deadline_rule=DeadlineRule(rule))
    late = decodes(97)
    for request in late:
        request.deadline_s -= 1.0
    view = view_of([*late, prompt("p", 5000, 6000)], model=A100(), limits=limits)
    assert QoServe().schedule(view).num_scheduled_tokens["p"] == chunk


def test_the_context_of_the_first_prompt_counts() -> None:
    """10,000 tokens before it cost 7.55 ms: 512 tokens take 68.1 ms, times 1.2 81.7 > 75 ms."""
    requests = (*decodes(75), begun("p", 15_000, 10_000, 6000))
    assert QoServe().schedule(view_of(requests, model=A100())).num_scheduled_tokens["p"] == 224


def test_without_safety_the_prediction_is_taken_as_it_is() -> None:
    """512 tokens take 60.6 ms, which is within 62 ms only without the factor of 1.2."""
    view = view_of([*decodes(62), prompt("p", 5000, 6000)], model=A100())
    assert QoServe(safety=1.0).schedule(view).num_scheduled_tokens["p"] == 480


def test_without_decodes_a_step_is_as_large_as_the_grid() -> None:
    view = view_of([prompt("p", 5000, 6000)], model=A100())
    assert QoServe().schedule(view).num_scheduled_tokens == {"p": 2552}


def test_little_memory_keeps_steps_small() -> None:
    """1,500 blocks of 16 hold 24,000 tokens, fewer than 32,000."""
    view = view_of([prompt("p", 5000, 6000)], model=A100(), num_blocks=1500, block_size=16)
    assert QoServe().schedule(view).num_scheduled_tokens == {"p": 512}


@pytest.mark.parametrize(("alpha_s_per_token", "first"), [(0.0, "long"), (0.008, "short")])
def test_alpha_blends_deadline_and_length(alpha_s_per_token: float, first: str) -> None:
    """6 s + 8 ms · 1,000 = 14 s against 10 s + 8 ms · 100 = 10.8 s."""
    view = view_of([prompt("long", 1000, 6000), prompt("short", 100, 10_000)], model=A100())
    plan = QoServe(alpha_s_per_token=alpha_s_per_token).schedule(view)
    assert next(iter(plan.num_scheduled_tokens)) == first


@pytest.mark.parametrize(("slack_ms", "first"), [(1990, "b"), (2010, "a")])
def test_a_hopeless_prompt_is_relegated(slack_ms: float, first: str) -> None:
    """17,000 tokens at 8,500 a second take 2 s."""
    policy = QoServe(alpha_s_per_token=0.0)
    requests = (prompt("a", 17_000, slack_ms), prompt("b", 17_000, 9000))
    plan = policy.schedule(view_of(requests, model=A100()))
    assert next(iter(plan.num_scheduled_tokens)) == first
    kept = QoServe(alpha_s_per_token=0.0, relegate=False).schedule(view_of(requests, model=A100()))
    assert next(iter(kept.num_scheduled_tokens)) == "a"


@pytest.mark.parametrize(("slack_ms", "first"), [(1999, "b"), (2001, "a")])
def test_a_prompt_that_is_partly_cached_is_hopeless_by_its_other_tokens(
    slack_ms: float, first: str
) -> None:
    """It has not begun although 3,000 of its tokens are in the prefix cache."""
    requests = (prompt("a", 20_000, slack_ms), prompt("b", 17_000, 9000))
    requests[0].num_computed_tokens = 3000
    plan = QoServe(alpha_s_per_token=0.0).schedule(view_of(requests, model=A100()))
    assert next(iter(plan.num_scheduled_tokens)) == first


def test_a_prompt_that_has_begun_is_not_relegated() -> None:
    requests = (begun("a", 17_000, 100, 1000), prompt("b", 17_000, 9000))
    plan = QoServe(alpha_s_per_token=0.0).schedule(view_of(requests, model=A100()))
    assert next(iter(plan.num_scheduled_tokens)) == "a"


def test_the_prefill_rate_is_learnt() -> None:
    """1,000 tokens in 1 ms: 0.995 · 100 + 0.005 · 1,000,000 = 5,099.5 tokens a second.

    4,000 tokens then take 0.78 s, less than the 1 s left; at 100 a second they take 40 s.
    """
    policy = QoServe(alpha_s_per_token=0.0, prefill_tokens_per_s=100)
    waiting = [prompt("a", 4000, 1001, ttft_s=1.001), prompt("b", 4000, 50_000, ttft_s=50.0)]
    now = view_of(waiting, model=A100(), now_s=0.001)
    assert next(iter(policy.schedule(now).num_scheduled_tokens)) == "b"
    policy.reset()
    policy.schedule(view_of([prompt("first", 1000, 60_000)], model=A100()))
    assert next(iter(policy.schedule(now).num_scheduled_tokens)) == "a"


def test_the_prefill_rate_is_not_that_of_another_policys_steps() -> None:
    """Turns of a class stand between 1,000 steps of 2,552 tokens, so that they come every 10 s.

    At 8,500 tokens a second, 17,000 take 2 s; at 255 a second they take 67 s.
    """
    policy = QoServe(alpha_s_per_token=0.0)
    for i in range(1000):
        long = view_of([R("long", 20_000, due_s=1e6)], model=A100(), now_s=10.0 * i)
        policy.schedule(replace(long, follows_another=True))
    requests = [
        R(name, 17_000, due_s=10_000 + slack_s) for name, slack_s in (("a", 2.01), ("b", 300))
    ]
    view = view_of(requests, model=A100(), now_s=10_000.0)
    plan = policy.schedule(replace(view, follows_another=True))
    assert next(iter(plan.num_scheduled_tokens)) == "a"


def test_the_prefill_rate_is_not_that_of_a_device_without_work() -> None:
    """Each prompt ends with its first token, and the next one comes 10 s later.

    At 8,500 tokens a second, 17,000 take 2 s; at 100 a second, as long as the gaps, they take 170 s.
    """
    policy = QoServe(alpha_s_per_token=0.0)
    for i in range(1000):
        now_s = 10.0 * i
        alone = R(f"{i}", 1000, due_s=now_s + 60, arrival_s=now_s)
        policy.schedule(view_of([alone], model=A100(), now_s=now_s))
    requests = [
        R(name, 17_000, due_s=10_000 + slack_s, arrival_s=10_000)
        for name, slack_s in (("a", 2.01), ("b", 300))
    ]
    plan = policy.schedule(view_of(requests, model=A100(), now_s=10_000.0))
    assert next(iter(plan.num_scheduled_tokens)) == "a"


def test_it_asks_for_a_latency_model() -> None:
    with pytest.raises(ValueError, match="latency model"):
        QoServe().schedule(view_of([prompt("p", 10, 1000)], model=None))


@pytest.mark.parametrize("field", ["safety", "max_step_tokens", "alpha_s_per_token"])
def test_nonsense_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be"):
        make_policy(f"qoserve:{field}=-1")


def test_planning_beside_grouped_decodes_changes_nothing() -> None:
    """The laws' scenarios are too small for the grid of chunk sizes to matter."""
    trace = synthesize(
        "poisson", num_requests=90, prompt=800, output=60, slo=SLO(0.5, 0.025), rate=40.0, seed=5
    )
    policy = QoServe(alpha_s_per_token=0.001)
    config = SimulationConfig(Limits(max_num_batched_tokens=8192))
    grouped = simulate(trace, policy, make_model(), config)
    one_by_one = simulate(trace, policy, make_model(), config, on_step=lambda _: None)
    assert [r.token_times_s for r in grouped] == [r.token_times_s for r in one_by_one]
