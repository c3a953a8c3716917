"""past_future against peaks of KV use computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from factories import make_model
from views import R, view_of

from slosched.core import SLO
from slosched.policy import FCFS, PastFuture
from slosched.policy.published.past_future import peak_tokens
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import synthesize


@pytest.mark.parametrize(
    ("known", "left", "peak"),
    [
        # after 10 steps, when the shortest ends: 600 + 3 · 10
        ([100, 200, 300], [30, 20, 10], 630),
        # when only two are left, after 400 steps: 20 + 2 · 400
        ([300, 10, 10], [1, 400, 500], 820),
        ([10, 300], [500, 1], 510),  # at the end of the last one
        ([7], [5], 12),
    ],
)
def test_the_peak_is_just_before_one_ends(known: list[int], left: list[int], peak: int) -> None:
    """The peak is the largest, over k, of left_k · k + known tokens of the k requests with most
    left."""
    known_tokens, tokens_left = np.array(known, float), np.array(left, float)
    assert peak_tokens(known_tokens, tokens_left) == peak
    emptier = np.zeros(len(known))
    assert peak_tokens(known_tokens, np.stack((emptier, tokens_left))) == peak
    grown = [
        sum(k + step for k, n in zip(known, left, strict=True) if n >= step)
        for step in range(max(left) + 1)
    ]
    assert max(grown) == peak


def through(num_blocks: int, waiting: list[R], **options: float) -> list[str]:
    """Return the requests that start next to a decode of 100 tokens, which has emitted one; outputs
    have 50."""
    policy = PastFuture(FCFS(), prior_output_tokens=50, **options)  # type: ignore[arg-type]
    view = view_of([R("d", 100, due_s=1.0, out=1), *waiting], num_blocks=num_blocks)
    assert policy.schedule(view).num_scheduled_tokens.keys() == {
        "d",
        *(r.request_id for r in policy.gate(view).through),
    }
    return [r.request_id for r in policy.gate(view).through]


def test_a_request_starts_if_the_cache_will_hold_both_at_their_fullest() -> None:
    """49 and 50 tokens are left, of 100 and 200: (100 + 49) + (200 + 49) = 398."""
    waiting = [R("p", 200, due_s=1.0)]
    assert through(399, waiting, reserve=0) == ["p"]
    assert through(398, waiting, reserve=0) == []
    assert through(442, waiting, reserve=0.1) == []
    assert through(443, waiting, reserve=0.1) == ["p"]  # 398.7 of 443 blocks


def test_the_first_that_does_not_fit_holds_up_those_behind_it() -> None:
    waiting = [R("small", 20, 1.0), R("large", 500, 1.0), R("tiny", 1, 1.0)]
    assert through(600, waiting) == ["small"]
    assert through(1000, waiting) == ["small", "large", "tiny"]


def test_an_output_limit_bounds_what_is_expected() -> None:
    """At most 5 tokens: (100 + 5) + (200 + 5); 49 more for the one alone is less."""
    waiting = [R("p", 200, due_s=1.0, max_tokens=5)]
    assert through(311, waiting, reserve=0) == ["p"]
    assert through(310, waiting, reserve=0) == []


def test_with_nobody_there_the_first_starts_whatever_it_may_become() -> None:
    policy = PastFuture(FCFS(), prior_output_tokens=10_000)
    view = view_of([R("a", 90, 1.0), R("b", 1, 1.0)], num_blocks=100)
    assert policy.schedule(view).num_scheduled_tokens == {"a": 90}


def test_it_spares_preemptions_and_learns_the_lengths() -> None:
    """Outputs have 300 tokens where 10 were expected; the cache holds a dozen requests."""
    trace = synthesize(
        "poisson", num_requests=120, prompt=100, output=300, slo=SLO(5.0, 0.5), rate=20.0, seed=3
    )
    config = SimulationConfig(num_blocks=300)
    preempted = {}
    for spec in ("fcfs", "fcfs+past_future:prior_output_tokens=10"):
        requests = simulate(trace, make_policy(spec), make_model(), config)
        preempted[spec] = sum(r.num_preemptions for r in requests)
    plain, wrapped = preempted
    assert preempted[plain] > 100
    assert preempted[wrapped] < 0.3 * preempted[plain]


@pytest.mark.parametrize("option", ["reserve=1", "num_draws=0", "prior_output_tokens=0"])
def test_nonsense_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=r"must be|at least 1"):
        make_policy(f"fcfs+past_future:{option}")
