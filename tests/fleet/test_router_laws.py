"""Every router obeys the laws of fleets, whatever runs in the engines."""

from __future__ import annotations

from functools import partial

import pytest

from slosched.fleet.routers import ROUTERS
from slosched.fleet.spec import make_router
from slosched.policy.spec import make_policy
from slosched.testing.router_laws import check_router


@pytest.mark.parametrize("policy", ["fcfs", "goodput"])
@pytest.mark.parametrize("router", ROUTERS)
def test_the_laws_hold(router: str, policy: str) -> None:
    check_router(partial(make_router, router), partial(make_policy, policy), max_examples=6)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm_v1", "slo_aware", "edf:drop=expired", "goodput+door"])
@pytest.mark.parametrize("router", ROUTERS)
def test_the_laws_hold_with_other_policies(router: str, policy: str) -> None:
    check_router(partial(make_router, router), partial(make_policy, policy), max_examples=100)
