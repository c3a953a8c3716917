"""vtc against counters kept by hand: w_p = 1 a prompt token, w_q = 2 an output token."""

from __future__ import annotations

import pytest
from views import R, flat_model, view_of

from slosched.core import SLO, EndReason
from slosched.policy.kit.drop import Drop
from slosched.policy.published.vtc import VTC, Client
from slosched.simulator.drafts import SimulatedDrafts
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.testing import check_policy
from slosched.workload import Trace, TraceRequest

A, B = (1.0, 0.05), (2.0, 0.05)
"""Two clients, which have two different SLOs of TTFT and TPOT."""


def a(name: str, tokens: int, **fields: int) -> R:
    return R(name, tokens, due_s=1.0, **fields)


def b(name: str, tokens: int, **fields: int) -> R:
    return R(name, tokens, due_s=2.0, **fields)


def test_turns_go_to_the_least_counter_and_prompts_are_paid_when_they_start() -> None:
    """A starts (both 0), then B (100 : 0), then B again (100 : 60), then A (100 : 120)."""
    policy = VTC(token_budget=250)
    queue = [a("a1", 100), a("a2", 100), b("b1", 60), b("b2", 60)]
    output = policy.schedule(view_of(queue))
    assert list(output.num_scheduled_tokens.items()) == [
        ("a1", 100),
        ("b1", 60),
        ("b2", 60),
        ("a2", 30),
    ]
    # a1, b1 and b2 are whole, so each emits a token; a2 has paid for all of its prompt.
    assert policy._counters == {A: 100 + 2 + 100, B: 60 + 2 + 60 + 2}


def test_outputs_are_paid_for_and_a_prompt_only_once() -> None:
    policy = VTC(token_budget=512)
    policy.schedule(view_of([a("a1", 600)]))
    assert policy._counters == {A: 600}
    policy.schedule(view_of([a("a1", 600, done=512)]))
    assert policy._counters == {A: 602}
    for out in (1, 2, 3):
        policy.schedule(view_of([a("a1", 600 + out, out=out)]))
    assert policy._counters == {A: 608}


def test_who_idled_has_no_credit() -> None:
    """B comes when A has been served 602 and waits: it is lifted to 602, not ahead by 602."""
    policy = VTC(token_budget=512)
    policy.schedule(view_of([a("a1", 300), a("a2", 300), a("a3", 300)]))
    assert policy._counters == {A: 602}
    waiting = [a("a2", 300, done=212), a("a3", 300), b("b1", 600)]
    policy.schedule(view_of(waiting))
    # a2's 88, a3 (a tie: it came first), and 124 of b1; a2 and a3 emit a token.
    assert policy._counters == {A: 602 + 300 + 4, B: 602 + 600}


def test_if_nobody_waits_the_counter_is_that_of_who_left_last() -> None:
    policy = VTC(token_budget=512)
    policy.schedule(view_of([a("a1", 100)]))
    policy.schedule(view_of([b("b1", 40)]))
    assert policy._counters == {A: 102, B: 102 + 40 + 2}


def test_who_does_not_fit_keeps_the_others_out() -> None:
    queue = [a("a1", 100), b("b1", 10)]
    assert VTC().schedule(view_of(queue, num_blocks=99)).is_empty


@pytest.mark.parametrize(
    ("client", "first_two"),
    [(Client.PRIORITY, ["x1", "y1"]), (Client.LORA, ["x1", "z1"]), (Client.TIER, ["x1", "y1"])],
)
def test_what_a_client_is(client: Client, first_two: list[str]) -> None:
    """The second start goes to another client than the first."""
    queue = [
        R("x1", 10, due_s=1.0, lora_id="p"),
        R("y1", 10, due_s=2.0, lora_id="p", priority=1),
        R("z1", 10, due_s=1.0, lora_id="q"),
    ]
    output = VTC(client=client).schedule(view_of(queue))
    assert list(output.num_scheduled_tokens)[:2] == first_two


def test_two_clients_get_the_same_though_one_asks_for_three_times_as_much() -> None:
    """While both wait, by the paper's bound of 2 * max(w_p * prompt, w_q * tokens in the cache)."""
    lines = [
        TraceRequest(f"{kind}{i}", 0.0, 200, 20, slo)
        for kind, num, slo in (("a", 150, SLO(*A)), ("b", 50, SLO(*B)))
        for i in range(num)
    ]
    config = SimulationConfig(num_blocks=100)  # of 16 tokens
    requests = simulate(Trace.of(lines, "unequal"), VTC(), flat_model(), config)
    until_s = max(r.token_times_s[0] for r in requests if r.request_id.startswith("b"))
    served = {"a": 0.0, "b": 0.0}
    for request in requests:
        times_s = request.token_times_s
        num_out = sum(t <= until_s for t in times_s)
        served[request.request_id[0]] += 200 * (times_s[0] <= until_s) + 2 * num_out
    assert served["b"] > 10_000
    assert abs(served["a"] - served["b"]) <= 2 * max(200, 2 * 1600)
    assert abs(served["a"] - served["b"]) < 0.1 * served["b"]


def test_tokens_of_accepted_drafts_are_paid_for() -> None:
    """Of 3 drafts half are accepted one after the other; each client has emitted what it paid."""
    lines = [
        TraceRequest(f"{kind}{i}", 0.5 * i, 100, 60, slo)
        for kind, slo in (("a", SLO(*A)), ("b", SLO(*B)))
        for i in range(3)
    ]
    policy = VTC()
    config = SimulationConfig(drafts=SimulatedDrafts(3, 0.5))
    requests = simulate(Trace.of(lines, "drafted"), policy, flat_model(), config)
    assert any(len(set(r.token_times_s)) < 60 for r in requests), "drafts were accepted"
    policy.schedule(view_of([]))  # the tokens of the last step are known now
    assert policy._counters == {A: 3 * (100 + 2 * 60), B: 3 * (100 + 2 * 60)}


def test_clients_without_number_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slosched.policy.published.vtc._MOST_CLIENTS", 10)
    policy = VTC(client=Client.PRIORITY)
    for i in range(100):
        often = [] if i % 3 else [a(f"often{i}", 50, priority=-1)]
        policy.schedule(view_of([*often, a(f"once{i}", 10, priority=i)]))
        assert len(policy._counters) <= 12
    assert -1 in policy._counters, "who was served most is remembered"
    crowd = [a(f"crowd{i}", 10, priority=1000 + i) for i in range(30)]
    assert len(policy.schedule(view_of(crowd)).num_scheduled_tokens) == 30
    assert {1000 + i for i in range(30)} <= policy._counters.keys()


def test_dropping_is_an_option() -> None:
    queue = [R("p", 100, due_s=-0.1), R("q", 100, due_s=1.0)]
    assert not VTC().schedule(view_of(queue)).rejected
    assert VTC(drop=Drop.EXPIRED).schedule(view_of(queue)).rejected == {"p": EndReason.EXPIRED}


def test_reset_forgets_who_was_served() -> None:
    policy = VTC()
    policy.schedule(view_of([a("a1", 100)]))
    policy.reset()
    assert not policy._counters


def test_it_obeys_the_laws_with_a_small_budget() -> None:
    check_policy(
        lambda: VTC(token_budget=24, client=Client.PRIORITY),
        max_examples=12,
        conserves_work=False,
    )


@pytest.mark.parametrize("option", ["prompt_price", "output_price"])
def test_a_negative_price_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 0, not -1"):
        VTC(**{option: -1.0})
