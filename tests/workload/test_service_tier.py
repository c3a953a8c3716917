"""Service tiers on the command line."""

from __future__ import annotations

import math

import pytest

from slosched.core import SLO, OnInfeasible
from slosched.workload import Tiers, synthesize
from slosched.workload.service_tier import ServiceTier, parse_service_tier


def test_a_tier_has_times_and_says_what_to_do_if_they_cannot_be_kept() -> None:
    tier = parse_service_tier("gold=ttft:300ms,tpot:0.03,e2e:20s")
    assert tier == ServiceTier("gold", SLO(0.3, 0.03, 20.0))
    batch = parse_service_tier("batch = ttft:30s, best-effort, min-share:0.1")
    assert batch == ServiceTier("batch", SLO(30.0, math.inf), OnInfeasible.RELEGATE, 0.1)
    served = parse_service_tier("free=on-infeasible:serve")
    assert served == ServiceTier("free", on_infeasible=OnInfeasible.SERVE)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gold", "it has no name"),
        ("=ttft:1s", "the name '' must be letters"),
        ("a b=ttft:1s", "the name 'a b' must be letters"),
        ("gold=ttft:soon", "'soon' is not a duration"),
        ("gold=tttf:1s", "did you mean ttft"),
        ("gold=ttft:1s,ttft:2s", "two parts ttft"),
        ("gold=min-share:10", "between 0 and 1"),
        ("gold=ttft:1s,best-effort:no", "best-effort stands alone, without 'no'"),
        ("gold=on-infeasible:drop", "must be one of reject, relegate, serve, not 'drop'"),
    ],
)
def test_anything_else_is_refused_with_the_reason(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_service_tier(text)


def test_tiers_of_a_trace_give_their_names_to_the_requests_that_draw_them() -> None:
    fast, slow = SLO(0.3, 0.03), SLO(30.0, 1.0)
    rule = Tiers((fast, slow), (0.5, 0.5), names=("gold", "batch"))
    requests = synthesize("poisson", num_requests=50, slo=rule).requests
    assert {(r.tier, r.slo) for r in requests} == {("gold", fast), ("batch", slow)}
