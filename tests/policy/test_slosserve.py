"""slosserve against budgets counted by hand, in the paper's unit: prefill tokens banked.

With T = 5 ms + 50 µs a token, a step of one TPOT of 50 ms has (50 - 5) / 0.05 = 900 tokens.  With
100 decodes, it banks 800 of them for prompts: 8,000 until 0.5 s from now.
"""

from __future__ import annotations

import math

import pytest
from views import R, flat_model, view_of

from slosched.core import SLO, BatchShape, EndReason, Limits, SchedulerOutput
from slosched.kv import PrefixCaching
from slosched.perfmodel.model import FittedModel
from slosched.policy.published.slosserve.policy import Admission, SLOsServe
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, TraceRequest

DECODES = [R(f"d{i}", 100, due_s=0.05, out=1) for i in range(100)]


def decide(requests: list[R], **options: float) -> SchedulerOutput:
    return SLOsServe(margin=0).schedule(view_of(requests, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "is_admitted"), [(7999, True), (8001, False)])
def test_a_prompt_must_fit_into_the_bank_until_it_is_due(tokens: int, is_admitted: bool) -> None:
    output = decide([*DECODES, R("p", tokens, due_s=0.5)])
    assert ("p" in output.num_scheduled_tokens) == is_admitted
    assert output.rejected == ({} if is_admitted else {"p": EndReason.INFEASIBLE})


class Bent(FittedModel):
    """A step of one token takes 10 ms, and n tokens `begin_s` + 50 µs · n, if that is longer."""

    form = "bent"

    def __init__(self, begin_s: float) -> None:
        super().__init__()
        self.begin_s = begin_s

    def parameters(self) -> dict[str, object]:
        return {"begin_s": self.begin_s}

    def predict(self, shape: BatchShape) -> float:
        tokens = shape.num_tokens
        return max(0.01, self.begin_s + 50e-6 * tokens) if shape.num_prefill_tokens > 1 else 0.01


@pytest.mark.parametrize(
    ("begin_s", "tokens", "is_admitted"),
    [(0.0, 190, True), (0.0, 210, False), (0.02, 3500, True), (0.02, 3570, False)],
)
def test_short_prompts_cost_what_their_tokens_cost_in_full_steps(
    begin_s: float, tokens: int, is_admitted: bool
) -> None:
    """Until 0.5 s steps of 50 ms bank 0.4 s, in 40 ms each for the tokens of a full step.

    Those are 1,000, so that 10,000 fit, of which 9,800 are promised.  Alone, 200 tokens take no
    longer than a step without any.  If n tokens take 20 ms + 50 µs · n, a full step has 600, and
    32 prompts of 100 take 213 ms of the bank.  Alone, each would take 25 - 10 ms: 480 ms in all.
    """
    old = [R(f"o{i}", 201, 0.5, done=1) for i in range(49)]
    if begin_s:
        old = [R(f"o{i}", 101, 0.5, done=1) for i in range(32)]
    limits = Limits(max_num_batched_tokens=2048, max_num_seqs=1000)
    view = view_of([*old, R("p", tokens, 0.5)], Bent(begin_s), limits=limits)
    assert ("p" not in SLOsServe(margin=0).schedule(view).rejected) == is_admitted


def test_the_prompts_of_a_burst_start_in_one_step() -> None:
    """Until 0.05 s a step has 800 tokens for prompts: 30 of 26 tokens, but not another."""
    burst = [R(f"p{i}", 26, 0.05 + 1e-6 * i) for i in range(32)]
    output = decide([*DECODES, *burst])
    assert {name for name in output.num_scheduled_tokens if name[0] == "p"} == {
        f"p{i}" for i in range(30)
    }
    assert output.rejected == dict.fromkeys(("p30", "p31"), EndReason.INFEASIBLE)


def test_a_burst_of_short_prompts_is_served_as_soon_as_the_device_can() -> None:
    """100 prompts of 100 tokens take 10,000 · 20 µs and a few constants of 5 ms."""
    slo = SLO(ttft_s=0.3, tpot_s=0.05)
    lines = [TraceRequest(f"r{i}", 0.0, 100, 2, slo) for i in range(100)]
    model = flat_model(per_token_s=20e-6)
    requests = simulate(Trace.of(lines, "burst"), SLOsServe(prior_output_tokens=2), model)
    in_time = [r for r in requests if r.token_times_s and r.token_times_s[0] <= slo.ttft_s]
    assert len(in_time) == 100


@pytest.mark.parametrize(("tokens", "is_admitted"), [(2990, True), (3000, False)])
def test_a_prompt_must_not_break_the_promise_to_another(tokens: int, is_admitted: bool) -> None:
    """Both would fit alone, but the first was admitted with its tokens first.

    From 0.25 s on the newcomer is one more decode, so the bank until 0.5 s is 5 * 800 + 5 * 799 =
    7,995 tokens, of which 5,000 are promised.
    """
    queue = [*DECODES, R("old", 5001, due_s=0.5, done=1), R("new", tokens, due_s=0.25)]
    output = decide(queue)
    assert ("new" in output.num_scheduled_tokens) == is_admitted
    assert "old" not in output.rejected


@pytest.mark.parametrize(("num_decodes", "is_admitted"), [(99, True), (100, False)])
def test_no_more_decodes_than_a_step_of_one_tpot_holds(num_decodes: int, is_admitted: bool) -> None:
    """(10.02 - 5) / 0.05 = 100.4 tokens, however late the prompt is due."""
    decodes = [R(f"d{i}", 100, 0.01002, 0.01002, out=1) for i in range(num_decodes)]
    policy = SLOsServe(margin=0, prior_output_tokens=5000)
    output = policy.schedule(view_of([*decodes, R("p", 10, 10.0, 0.01002)]))
    assert ("p" not in output.rejected) == is_admitted


@pytest.mark.parametrize("admission", Admission)
def test_a_prefix_that_prompts_share_is_in_the_kv_cache_once(admission: Admission) -> None:
    """30 prompts of 1,000 tokens, 960 of which are the same, are 2,160 tokens, and 50 to emit."""
    slo = SLO(ttft_s=0.5, tpot_s=0.05)
    lines = [
        TraceRequest(f"r{i}", 0.02 * i, 1000, 50, slo, (*range(60), 1000 + i, 2000 + i, 3000 + i))
        for i in range(30)
    ]
    config = SimulationConfig(num_blocks=5000 // 16, prefix_cache=PrefixCaching.HASH)
    policy = SLOsServe(admission, prior_output_tokens=50)
    trace = Trace.of(lines, "shared", prefix_block_tokens=16)
    requests = simulate(trace, policy, flat_model(per_token_s=10e-6), config)
    assert not [r.request_id for r in requests if r.end_reason is EndReason.INFEASIBLE]
    assert not any(r.num_preemptions for r in requests)


@pytest.mark.parametrize(("num_blocks", "is_admitted"), [(288, True), (287, False)])
def test_the_kv_cache_must_hold_what_both_grow_to(num_blocks: int, is_admitted: bool) -> None:
    """Just before the decode ends, 49 tokens from now at 2.45 s: 149 and 100 + 39 tokens."""
    policy = SLOsServe(margin=0, prior_output_tokens=50)
    queue = [R("d", 100, due_s=0.05, out=1), R("p", 100, due_s=0.5)]
    output = policy.schedule(view_of(queue, num_blocks=num_blocks))
    assert ("p" not in output.rejected) == is_admitted


@pytest.mark.parametrize(("max_num_seqs", "is_admitted"), [(2, True), (1, False)])
def test_a_seat_must_be_free_when_it_is_due(max_num_seqs: int, is_admitted: bool) -> None:
    queue = [R("d", 100, due_s=0.05, out=1), R("p", 100, due_s=0.5)]
    output = decide(queue, limits=Limits(max_num_seqs=max_num_seqs))  # type: ignore[arg-type]
    assert ("p" not in output.rejected) == is_admitted


def test_the_margin_is_not_promised() -> None:
    """The margin, a tenth of 0.5 s, is 1,000 tokens."""
    for tokens, is_admitted in ((6999, True), (7001, False)):
        output = SLOsServe(margin=0.1).schedule(view_of([*DECODES, R("p", tokens, due_s=0.5)]))
        assert ("p" not in output.rejected) == is_admitted


def test_who_is_late_already_is_no_reason_to_refuse_another() -> None:
    queue = [*DECODES, R("late", 1001, due_s=-1.0, done=1), R("new", 6000, due_s=0.5)]
    assert not decide(queue).rejected
    assert "new" in decide([*queue[:-1], R("new", 7001, due_s=0.5)]).rejected  # 1000 are owed


def test_a_decode_ahead_of_its_pace_gives_way_to_a_prompt_that_is_due() -> None:
    """1,000 tokens take 55 ms alone and 55.05 ms with the decode, which is due in 300 ms."""
    ahead = R("d", 100, due_s=0.3, out=1)
    assert decide([ahead, R("p", 1001, 0.05502, done=1)]).num_scheduled_tokens == {"p": 1000}
    assert decide([ahead, R("p", 1001, 0.0552, done=1)]).num_scheduled_tokens == {"p": 1000, "d": 1}
    due = R("d", 100, due_s=0.1, out=1)  # due one TPOT after the step, so it has to be in it
    tokens = decide([due, R("p", 1001, 0.05502, done=1)]).num_scheduled_tokens
    assert tokens["d"] == 1
    assert tokens["p"] < 1000


@pytest.mark.parametrize(("chunk", "num_served"), [(1000, 99), (700, 200)])
def test_decodes_without_a_promise_come_after_prompts_that_have_one(
    chunk: int, num_served: int
) -> None:
    """Until 0.06 s there is time for fewer than 1,100 tokens."""
    free = [R(f"f{i}", 100, math.inf, math.inf, out=1) for i in range(200)]
    output = decide([*free, R("p", chunk, 0.06)])
    assert output.num_scheduled_tokens["p"] == chunk
    assert len(output.num_scheduled_tokens) == 1 + num_served


def test_what_was_admitted_is_never_dropped() -> None:
    policy = SLOsServe(margin=0)
    prompts = [R("a", 100, due_s=0.5), R("b", 100, due_s=0.6)]
    narrow = Limits(max_num_batched_tokens=50)
    assert policy.schedule(view_of(prompts, limits=narrow)).num_scheduled_tokens == {"a": 50}
    later = view_of([prompts[1], R("c", 100, due_s=0.6)], now_s=0.7)
    output = policy.schedule(later)
    assert output.num_scheduled_tokens == {"b": 100}
    assert output.rejected == {"c": EndReason.EXPIRED}
    policy.reset()
    assert set(policy.schedule(later).rejected) == {"b", "c"}


def test_who_was_promised_nothing_is_admitted() -> None:
    assert not decide([*DECODES, R("p", 50_000, math.inf, math.inf)]).rejected


@pytest.mark.parametrize("admission", Admission)
def test_best_effort_makes_way_for_what_is_promised(admission: Admission) -> None:
    """It fills the cache but for 400 tokens, and 12 prompts of 1,500 come while it emits."""
    slo = SLO(ttft_s=0.5, tpot_s=0.05)
    free = TraceRequest("free", 0.0, 2800, 1500)
    prompts = [TraceRequest(f"p{i}", 5 + i / 2, 1500, 40, slo) for i in range(12)]
    config = SimulationConfig(num_blocks=300)
    policy = SLOsServe(admission=admission, prior_output_tokens=40)
    first, *others = simulate(Trace.of([free, *prompts], "mixed"), policy, flat_model(), config)
    assert first.num_output_tokens == 1500
    assert first.num_preemptions > 0
    for request in others:
        assert request.token_times_s[0] - request.arrival_s <= slo.ttft_s
        assert request.num_preemptions == 0


def test_a_decode_without_a_promise_is_preempted_before_one_that_has_one() -> None:
    """Each needs a block of one token, there is none left, and the one that came last has to go."""
    free, kept = R("free", 50, math.inf, math.inf, out=1), R("kept", 50, 0.05, out=1)
    output = decide([free, kept], num_blocks=98)
    assert output.num_scheduled_tokens == {"kept": 1}
    assert set(output.preempted) == {"free"}


def test_every_promise_that_was_made_is_kept() -> None:
    """Twice the load that can be served, step times as predicted, all outputs as long as expected."""
    slo = SLO(ttft_s=1.0, tpot_s=0.05)
    lines = [TraceRequest(f"r{i}", i / 40, 500 + 97 * i % 1000, 50, slo) for i in range(400)]
    policy = SLOsServe(prior_output_tokens=50)
    config = SimulationConfig(num_blocks=20_000)
    requests = simulate(Trace.of(lines, "overload"), policy, flat_model(), config)
    admitted = [r for r in requests if r.token_times_s]
    assert 100 < len(admitted) < 350
    for request in admitted:
        first_s, last_s = request.token_times_s[0], request.token_times_s[-1]
        assert first_s - request.arrival_s <= slo.ttft_s
        assert (last_s - first_s) / 49 <= slo.tpot_s


def test_without_a_latency_model_it_says_so() -> None:
    bare = view_of([R("p", 10, 1.0)], model=None)
    with pytest.raises(ValueError, match="latency model"):
        SLOsServe().schedule(bare)


def test_an_impossible_margin_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\), not 1"):
        SLOsServe(margin=1)
