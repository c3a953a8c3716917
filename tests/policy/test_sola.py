"""sola against states and constraints computed by hand, with T = 5 ms + 50 us a token.

The time is 1 s.  The decode has taken 250 ms for 10 tokens of 50 ms, so p_TPOT is one half.
"""

from __future__ import annotations

import pytest
from views import R, view_of

from slosched.core import SLO, EndReason, Limits, Request, SchedulerOutput, SchedulerView
from slosched.metrics import RequestRecord, summarize
from slosched.perfmodel import load_model
from slosched.policy import SOLA
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import synthesize

NOW_S = 1.0
DECODE = R("d", 100, due_s=1.055, out=11)
"""A decode that is due in 55 ms: a step of 1,000 tokens, its own among them."""


def decide(requests: list[R], *, began_s: float = 0.75, **options: object) -> SchedulerOutput:
    """Return the plan; `began_s` is when the decodes got their first token."""
    view = view_of(requests, now_s=NOW_S)
    for request in view.running:
        request.token_times_s += [began_s] * request.num_output_tokens
    return SOLA(**options).schedule(view)  # type: ignore[arg-type]


def waiting(name: str, tokens: int, passed_s: float, ttft_s: float = 1.0) -> R:
    arrival_s = NOW_S - passed_s
    return R(name, tokens, due_s=arrival_s + ttft_s, arrival_s=arrival_s)


@pytest.mark.parametrize(("passed_s", "chunk"), [(0.51, 960), (0.49, 511)])
def test_the_promise_in_more_danger_is_optimized(passed_s: float, chunk: int) -> None:
    """999 tokens fit before the decode is due, that is 15 tiles; otherwise the budget is 512."""
    planned = decide([DECODE, waiting("p", 2000, passed_s)]).num_scheduled_tokens
    assert planned == {"d": 1, "p": chunk}


@pytest.mark.parametrize(("passed_s", "chunk"), [(0.51, 960), (0.49, 511)])
def test_who_has_a_token_is_in_no_danger_of_its_ttft(passed_s: float, chunk: int) -> None:
    """It arrived ten TTFTs ago, lost its KV cache, and its next token is due in 5 s."""
    back = Request("back", -9.0, 100, 500, SLO(1.0, 0.5), deadline_s=6.0)
    back.num_output_tokens, back.num_preemptions, back.token_times_s = 1, 1, [0.9]
    view = view_of([DECODE, waiting("p", 2000, passed_s), back], now_s=NOW_S)
    view.running[0].token_times_s += [0.75] * 11
    planned = SOLA().schedule(view).num_scheduled_tokens
    assert planned == {"d": 1, "p": chunk}


@pytest.mark.parametrize(("began_s", "chunk"), [(0.745, 511), (0.755, 960)])
def test_the_state_of_decodes_is_their_time_per_token(began_s: float, chunk: int) -> None:
    queue = [DECODE, waiting("p", 2000, passed_s=0.5)]
    assert decide(queue, began_s=began_s).num_scheduled_tokens["p"] == chunk


def test_a_decode_of_one_token_has_no_time_per_token_yet() -> None:
    queue = [R("d", 100, due_s=1.055, out=1), waiting("p", 2000, passed_s=0.01)]
    assert decide(queue, began_s=0.0).num_scheduled_tokens["p"] == 960


def test_prompt_tokens_are_whole_tiles_unless_they_are_all_that_is_left() -> None:
    """7 * 128 = 896 <= 999."""
    queue = [DECODE, waiting("p", 2000, 0.6)]
    assert decide(queue, tile_tokens=128).num_scheduled_tokens["p"] == 896
    assert decide([DECODE, waiting("p", 998, 0.6)]).num_scheduled_tokens["p"] == 998


def test_decodes_that_are_late_do_not_limit_the_step() -> None:
    """998 tokens fit besides both, 15 tiles.  If all are late, the least TPOT limits: 899 tokens,
    14 tiles."""
    late, prompt = R("late", 100, due_s=0.9, out=11), waiting("p", 2000, 0.6)
    assert decide([late, DECODE, prompt]).num_scheduled_tokens["p"] == 960
    assert decide([late, prompt]).num_scheduled_tokens["p"] == 896


def test_the_largest_share_of_a_promised_ttft_goes_first_and_the_hopeless_last() -> None:
    """(0.5 + 0.055) / 1 and (0.25 + 0.01) / 0.4; 0.1 s is too little for 10,000 tokens."""
    queue = [
        waiting("hopeless", 10_000, 0.9),
        waiting("long", 1000, 0.5),
        waiting("short", 100, 0.25, ttft_s=0.4),
    ]
    assert list(decide(queue).num_scheduled_tokens) == ["short", "long", "hopeless"]


@pytest.mark.parametrize(
    ("spare_s", "planned"),
    [(0.031, {"d": 1, "a": 511}), (0.03, {"d": 1}), (0.005, {"d": 1, "a": 511})],
)
def test_where_tpot_is_optimized_nobody_is_pushed_out(
    spare_s: float, planned: dict[str, int]
) -> None:
    """A step of 512 tokens takes 30.6 ms.  A prompt that cannot wait for the decode's 5.05 ms is
    lost.

    The other one has used more of its TTFT: 9 s of 10, instead of 5.05 ms of at most 36.
    """
    first = waiting("a", 2000, passed_s=9.0, ttft_s=10.0)
    other = waiting("b", 1, passed_s=0.0, ttft_s=0.00505 + spare_s)
    assert decide([DECODE, first, other], began_s=0.5).num_scheduled_tokens == planned


def test_with_decodes_for_the_whole_budget_prompts_wait() -> None:
    decodes = [R(f"d{i}", 100, due_s=1.3, out=11) for i in range(8)]
    queue = [*decodes, waiting("p", 100, 0.1)]
    assert "p" not in decide(queue, token_budget=8).num_scheduled_tokens
    assert decide(queue, token_budget=20).num_scheduled_tokens["p"] == 12


def test_dropping_is_an_option() -> None:
    queue = [DECODE, waiting("p", 10_000, 0.9)]
    assert not decide(queue).rejected
    assert make_policy("sola:drop=infeasible").schedule(_timed(queue)).rejected == {
        "p": EndReason.INFEASIBLE
    }


def _timed(requests: list[R]) -> SchedulerView:
    view = view_of(requests, now_s=NOW_S)
    for request in view.running:
        request.token_times_s += [0.75] * request.num_output_tokens
    return view


@pytest.mark.parametrize("token_budget", [512, 1024])
def test_it_serves_more_in_time_than_the_fixed_budget_it_stands_on(token_budget: int) -> None:
    """The load is beyond the knee of the fixed budget: 14 and 82 % with 512 and 1024 tokens."""
    model = load_model("h100/llama-3.1-8b")
    trace = synthesize(
        "poisson", num_requests=500, prompt=1000, output=100, slo=SLO(0.5, 0.03), rate=36.0, seed=5
    )
    config = SimulationConfig(Limits(max_num_batched_tokens=8192), num_blocks=20_000)
    attained = {}
    for name in ("sarathi", "sola"):
        requests = simulate(
            trace, make_policy(f"{name}:token_budget={token_budget}"), model, config
        )
        records = [RequestRecord.from_request(r) for r in requests]
        attained[name] = summarize(records, config.limits.deadline_rule).attainment
    assert attained["sarathi"] < 0.9
    assert attained["sola"] > attained["sarathi"] + 0.05


def test_it_asks_for_a_latency_model() -> None:
    bare = view_of([R("p", 10, 1.0)], model=None)
    with pytest.raises(ValueError, match="latency model"):
        SOLA().schedule(bare)


@pytest.mark.parametrize("option", ["tile_tokens", "token_budget"])
def test_nonsense_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 1, not 0"):
        make_policy(f"sola:{option}=0")
