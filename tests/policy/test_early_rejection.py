"""early_rejection against loads computed by hand: T = 5 ms + 0.5 ms a token, TPOT 10 ms.

A prompt of n tokens takes 5 + n / 2 ms alone, a step of n decodes as long; 10 decodes just fit.
"""

from __future__ import annotations

import pytest
from factories import make_model
from views import R, flat_model, view_of

from slosched.core import SLO, DeadlineRule, EndReason, Limits, Request, RequestStatus
from slosched.metrics import RequestRecord, summarize
from slosched.policy import EarlyRejection, Sarathi
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import synthesize

MODEL = flat_model(5e-3, 0.5e-3)


def refused(policy: EarlyRejection, waiting: list[R], now_s: float = 0.0) -> set[str]:
    return set(policy.schedule(view_of(waiting, MODEL, now_s=now_s)).rejected)


def decoding(policy: EarlyRejection, num: int, slowdown: float = 1.0) -> list[Request]:
    """Return requests that were admitted at 0 and got their first token as predicted.

    Each takes 5.5 ms after the one before it, times `slowdown`.
    """
    view = view_of([R(f"d{i}", 1, due_s=1.0, tpot_s=0.01) for i in range(num)], MODEL)
    assert not policy.schedule(view).rejected
    for i, request in enumerate(view.waiting, start=1):
        request.status, request.num_output_tokens = RequestStatus.RUNNING, 1
        request.token_times_s.append(slowdown * i * 5.5e-3)
    return list(view.waiting)


@pytest.mark.parametrize(("tokens", "is_taken"), [(189, True), (191, False)])
def test_a_prompt_must_be_done_in_the_time_promised(tokens: int, is_taken: bool) -> None:
    """The prompt takes 5 + 190 / 2 = 100 ms."""
    policy = EarlyRejection(Sarathi())
    assert refused(policy, [R("p", tokens, due_s=0.1)]) == (set() if is_taken else {"p"})


def test_those_before_it_come_first_and_the_refused_do_not_count() -> None:
    """The first takes 55 ms; the next would end at 110 ms, too late; the last ends at 55 + 44.5 =
    99.5 ms."""
    policy = EarlyRejection(Sarathi())
    waiting = [R(name, tokens, due_s=0.1) for name, tokens in (("a", 100), ("b", 100), ("c", 79))]
    output = policy.schedule(view_of(waiting, MODEL))
    assert output.rejected == {"b": EndReason.INFEASIBLE}
    assert output.num_scheduled_tokens == {"a": 100, "c": 79}


def test_what_it_has_waited_already_counts() -> None:
    waiting = [R("p", 100, due_s=0.1)]
    assert not refused(EarlyRejection(Sarathi()), waiting, now_s=0.044)
    assert refused(EarlyRejection(Sarathi()), waiting, now_s=0.046)
    output = EarlyRejection(Sarathi()).schedule(view_of(waiting, MODEL, now_s=0.2))
    assert output.rejected == {"p": EndReason.EXPIRED}


@pytest.mark.parametrize(("max_load", "is_taken"), [(0.5, False), (0.6, True)])
def test_the_load_may_be_up_to_what_is_said(max_load: float, is_taken: bool) -> None:
    policy = EarlyRejection(Sarathi(), max_load=max_load)
    assert refused(policy, [R("p", 100, due_s=0.1)]) == (set() if is_taken else {"p"})


@pytest.mark.parametrize(("num_decodes", "is_taken"), [(9, True), (10, False)])
def test_a_step_of_all_decodes_must_keep_the_tightest_tpot(
    num_decodes: int, is_taken: bool
) -> None:
    """With the new request a step takes 10 ms, or 10.5 ms; its own TPOT is not the tightest."""
    policy = EarlyRejection(Sarathi())
    decoding(policy, num_decodes)
    new = R("p", 100, due_s=1.1, tpot_s=0.1, arrival_s=0.1)
    assert refused(policy, [new], now_s=0.1) == (set() if is_taken else {"p"})


@pytest.mark.parametrize(("tokens", "is_taken"), [(3700, False), (4000, True)])
def test_decodes_are_gone_after_the_time_that_decoding_takes(tokens: int, is_taken: bool) -> None:
    """The last of ten has decoded for 2 s at 2.055 s; the prompt is done at 1.955 or 2.105 s."""
    policy = EarlyRejection(Sarathi(), prior_decode_s=2.0)
    decoding(policy, 10)
    new = R("p", tokens, due_s=10.1, tpot_s=0.1, arrival_s=0.1)
    assert refused(policy, [new], now_s=0.1) == (set() if is_taken else {"p"})


def test_it_learns_how_long_prompts_take_and_how_long_decodes_last() -> None:
    policy = EarlyRejection(Sarathi())
    (old,) = decoding(policy, 1, slowdown=2.0)  # its first token came at 11 ms
    old.token_times_s.append(0.411)
    old.num_output_tokens, old.end_reason = 2, EndReason.STOP
    old.status = RequestStatus.FINISHED
    late = [R("p", 91, due_s=1.1, arrival_s=1.0)]  # 50.5 ms, which become 101
    assert refused(policy, late, now_s=1.0) == {"p"}
    assert policy._seen.decode_s == pytest.approx(0.4)
    assert not refused(policy, [R("q", 89, due_s=1.1, arrival_s=1.0)], now_s=1.0)
    policy.reset()
    assert not refused(policy, late, now_s=1.0)


@pytest.mark.parametrize(("now_s", "is_taken"), [(10.01, False), (10.02, True)])
def test_who_refuses_everybody_forgets_after_ten_seconds_why(now_s: float, is_taken: bool) -> None:
    """A first token that took twice as long as predicted came at 11 ms, and no other one since."""
    policy = EarlyRejection(Sarathi())
    (old,) = decoding(policy, 1, slowdown=2.0)
    assert refused(policy, [R("p", 91, due_s=0.12, arrival_s=0.02)], now_s=0.02) == {"p"}
    old.status, old.end_reason = RequestStatus.FINISHED, EndReason.STOP
    again = [R("q", 91, due_s=now_s + 0.1, arrival_s=now_s)]
    assert refused(policy, again, now_s=now_s) == (set() if is_taken else {"q"})


def test_who_was_taken_on_is_not_refused_any_more() -> None:
    policy = EarlyRejection(Sarathi())
    narrow = Limits(max_num_batched_tokens=10)
    waiting = [R("a", 100, due_s=0.2), R("b", 100, due_s=0.2)]
    assert policy.schedule(view_of(waiting, MODEL, limits=narrow)).num_scheduled_tokens == {"a": 10}
    later = view_of(waiting[1:], MODEL, now_s=0.9, limits=narrow)
    assert policy.schedule(later).num_scheduled_tokens == {"b": 10}


def test_a_burst_is_judged_a_part_at_a_time() -> None:
    """The other requests are held back, not rejected."""
    policy = EarlyRejection(Sarathi(token_budget=10_000))
    burst = [R(f"r{i}", 1, due_s=100.0, tpot_s=1.0) for i in range(100)]
    output = policy.schedule(view_of(burst, MODEL))
    assert list(output.num_scheduled_tokens) == [f"r{i}" for i in range(64)]
    assert not output.rejected
    assert len(policy.schedule(view_of(burst, MODEL)).num_scheduled_tokens) == 100


def test_in_overload_it_is_what_a_policy_that_refuses_nobody_lacks() -> None:
    trace = synthesize(
        "poisson", num_requests=400, prompt=800, output=60, slo=SLO(0.5, 0.05), rate=40.0, seed=5
    )
    attained = {}
    for spec in ("sarathi", "sarathi+early_rejection"):
        requests = simulate(trace, make_policy(spec), make_model())
        records = [RequestRecord.from_request(r) for r in requests]
        attained[spec] = summarize(records, DeadlineRule.MEAN_TPOT).attainment
    assert attained["sarathi"] < 0.3
    assert attained["sarathi+early_rejection"] > attained["sarathi"] + 0.2


def test_planning_beside_grouped_decodes_changes_nothing() -> None:
    trace = synthesize(
        "poisson", num_requests=120, prompt=800, output=60, slo=SLO(0.5, 0.05), rate=30.0, seed=5
    )
    policy = make_policy("edf:drop=infeasible+early_rejection+past_future")
    config = SimulationConfig(num_blocks=1500)
    grouped = simulate(trace, policy, make_model(), config)
    one_by_one = simulate(trace, policy, make_model(), config, on_step=lambda _: None)
    assert [r.token_times_s for r in grouped] == [r.token_times_s for r in one_by_one]
    assert {r.end_reason for r in grouped} >= {EndReason.INFEASIBLE, EndReason.STOP}


def test_it_asks_for_a_latency_model() -> None:
    bare = view_of([R("p", 10, 1.0)], model=None)
    with pytest.raises(ValueError, match="latency model"):
        EarlyRejection(Sarathi()).schedule(bare)


@pytest.mark.parametrize("option", ["max_load", "prior_decode_s"])
def test_nonsense_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be positive, not 0"):
        make_policy(f"sarathi+early_rejection:{option}=0")
