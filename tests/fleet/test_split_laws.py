"""Prefill and decode pools obey their laws, whatever runs in the engines."""

from __future__ import annotations

from functools import partial

import pytest

from slosched.core import Request
from slosched.fleet.pooled import PooledReplica
from slosched.policy.spec import make_policy
from slosched.testing.plans import LawBrokenError
from slosched.testing.split_laws import check_split


@pytest.mark.parametrize("policy", ["fcfs", "goodput", "vllm_v1"])
def test_the_laws_hold(policy: str) -> None:
    check_split(partial(make_policy, policy), max_examples=15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["fcfs", "goodput", "vllm_v1", "slo_aware", "edf:drop=expired", "sglang"]
)
def test_the_laws_hold_in_many_pools(policy: str) -> None:
    check_split(partial(make_policy, policy), max_examples=200)


def test_a_leak_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget_to_free(replica: PooledReplica, _request: Request) -> None:
        replica.num_in_transfer -= 1

    monkeypatch.setattr(PooledReplica, "free", forget_to_free)
    with pytest.raises(LawBrokenError, match="holds KV blocks"):
        check_split(partial(make_policy, "fcfs"), max_examples=15, shrink=False)
