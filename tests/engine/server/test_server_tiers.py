"""Tiers, tenants and SLOs that cannot be kept, over HTTP: T = 5 ms + 0.05 ms a token."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from live_server import Live, live
from views import FLAT

from slosched.core import SLO, OnInfeasible
from slosched.policy import EDF, FCFS, Door, Goodput
from slosched.policy.door import Refuse
from slosched.policy.spec import make_policy
from slosched.workload.service_tier import ServiceTier

GOLD = ServiceTier("gold", SLO(10.0, 5.0))
"""An SLO that is kept even on a busy machine."""
BATCH = ServiceTier("batch", SLO(0.001, 1.0), OnInfeasible.RELEGATE)
"""An SLO that is never kept."""


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    policy = Door(EDF(), refuse=Refuse.UNKEEPABLE)
    with live(policy, model=FLAT, tiers=(GOLD, BATCH), default_slo=SLO(9.0, 4.0)) as running:
        yield running


def judged(server: Live) -> SLO:
    """Return the SLO by which the latest request was judged."""
    return server.worker.records[-1].slo


def completed(server: Live, headers: dict[str, str] | None = None, **body: object) -> object:
    """Send a request that succeeds; return its `service_tier` as the answer names it."""
    status, answer = server.post_with(headers or {}, prompt="abcd", max_tokens=2, **body)
    assert status == 200, answer
    return answer.get("service_tier")


def test_the_body_names_a_tier(server: Live) -> None:
    assert completed(server, service_tier="gold") == "gold"
    assert judged(server) == GOLD.slo


@pytest.mark.parametrize("name", ["x-llm-d-inference-objective", "x-gateway-inference-objective"])
def test_a_header_of_llm_d_names_a_tier(server: Live, name: str) -> None:
    assert completed(server, {name: "gold"}) == "gold"
    assert completed(server, {name: "batch"}, service_tier="gold") == "gold"
    assert completed(server, {name: "gold"}, service_tier="auto") == "gold"


def test_its_own_times_replace_those_of_its_tier(server: Live) -> None:
    completed(server, service_tier="gold", slo_ttft_ms=8000)
    assert judged(server) == SLO(8.0, 5.0)


def test_without_a_tier_the_server_promises(server: Live) -> None:
    assert completed(server) is None
    assert judged(server) == SLO(9.0, 4.0)


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        ({}, {"service_tier": "glod"}, "service_tier"),
        ({}, {"service_tier": 1}, "service_tier"),
        ({"x-llm-d-inference-objective": "x"}, {}, "x-llm-d-inference-objective"),
        ({}, {"on_infeasible": "later"}, "on_infeasible"),
    ],
)
def test_a_tier_that_is_none_is_a_400_that_lists_them(
    server: Live, headers: dict[str, str], body: dict[str, object], param: str
) -> None:
    status, answer = server.post_with(headers, prompt="abcd", **body)
    assert (status, answer["error"]["param"]) == (400, param)
    if param != "on_infeasible" and body != {"service_tier": 1}:
        assert "gold, batch" in answer["error"]["message"]


def test_a_tier_named_default_is_for_requests_that_name_none() -> None:
    with live(tiers=(ServiceTier("default", SLO(7.0, 3.0)), GOLD)) as running:
        assert completed(running) == "default"
        assert completed(running, service_tier="default") == "default"
        assert judged(running) == SLO(7.0, 3.0)


def test_a_server_without_tiers_says_so() -> None:
    with live() as running:
        status, answer = running.post_with({}, prompt="abcd", service_tier="gold")
        assert status == 400
        assert "it has none (--tier)" in answer["error"]["message"]
        assert completed(running, {"x-llm-d-inference-objective": "gold"}) is None


def test_metrics_count_by_tier() -> None:
    policy = Door(EDF(), refuse=Refuse.UNKEEPABLE)
    with live(policy, model=FLAT, tiers=(GOLD, BATCH)) as running:
        assert counts(running, "tier")["gold"] == (0, 0, 0)
        completed(running, service_tier="gold")
        completed(running, service_tier="batch")
        completed(running)
        assert counts(running, "tier") == {"gold": (1, 1, 0), "batch": (1, 0, 1)}
        assert counts(running, "tenant") == {}


def test_metrics_count_by_tenant() -> None:
    policy = Door(EDF(), refuse=Refuse.UNKEEPABLE)
    tenants = {"secret": "acme", "other": "b"}
    with live(policy, model=FLAT, tiers=(GOLD, BATCH), tenants=tenants) as running:
        completed(running, {"authorization": "Bearer secret"}, service_tier="gold")
        completed(running, {"authorization": "Bearer secret"}, service_tier="batch")
        assert counts(running, "tenant") == {"acme": (2, 1, 1), "b": (0, 0, 0)}


def test_a_tenant_that_only_a_header_names_becomes_no_series() -> None:
    """Else each client could make as many series as it likes."""
    with live(FCFS()) as running:
        completed(running, {"x-llm-d-inference-fairness-id": "acme"})
        assert running.worker.records[-1].tenant == "acme"
        assert counts(running, "tenant") == {}


def counts(server: Live, kind: str) -> dict[str, tuple[int, ...]]:
    """Return the requests of each tier (tenant): ended, good, relegated."""
    text = server.get("/metrics")[1]
    found: dict[str, list[int]] = {}
    for name in ("requests_ended", "good_requests", "requests_relegated"):
        pattern = rf'^slosched:{kind}_{name}_total\{{[^}}]*{kind}="(\w+)"\}} (\d+)'
        for named, value in re.findall(pattern, text, re.MULTILINE):
            found.setdefault(named, []).append(int(value))
    return {named: tuple(values) for named, values in found.items()}


@pytest.mark.parametrize(
    ("asked", "status", "is_best_effort"),
    [
        ({}, 429, False),
        ({"on_infeasible": "relegate"}, 200, True),
        ({"slo_best_effort": True}, 200, True),
        ({"on_infeasible": "serve"}, 200, False),
    ],
)
@pytest.mark.parametrize("policy", ["goodput+door", "edf:drop=infeasible"])
def test_what_becomes_of_an_slo_that_cannot_be_kept(
    policy: str, asked: dict[str, object], status: int, is_best_effort: bool
) -> None:
    """It is refused on arrival or, by a policy without a door, in the next step.

    In any case it is judged by the SLO that it asked for.
    """
    with live(make_policy(policy), model=FLAT) as running:
        body = {"prompt": "abcd", "max_tokens": 2, "slo_ttft_ms": 1, "slo_tpot_ms": 1000}
        got, _, headers = running.post(**body, **asked)
        assert got == status
        assert ("x-slo-best-effort" in headers) == is_best_effort
        running.worker.begin_drain(5)
        assert running.worker.wait_stopped(5)
        assert judged(running) == SLO(0.001, 1.0)
        assert running.num_held_blocks == 0


def test_the_server_and_the_tier_say_what_becomes_of_it() -> None:
    strict = ServiceTier("strict", SLO(0.001, 1.0), OnInfeasible.REJECT)
    with live(
        Door(Goodput()),
        model=FLAT,
        tiers=(strict,),
        default_slo=SLO(0.001, 1.0),
        on_infeasible=OnInfeasible.RELEGATE,
    ) as running:
        completed(running)
        assert running.post(prompt="abcd", service_tier="strict")[0] == 429
        completed(running, service_tier="strict", on_infeasible="serve")


@pytest.mark.parametrize(
    ("tenants", "headers", "tenant"),
    [
        ({"secret": "acme"}, {"authorization": "Bearer secret"}, "acme"),
        (
            {"secret": "acme", "other": "b"},
            {"authorization": "Bearer other", "x-llm-d-inference-fairness-id": "acme"},
            "b",
        ),
        ({}, {"x-llm-d-inference-fairness-id": "acme"}, "acme"),
        ({}, {"x-gateway-inference-fairness-id": "acme"}, "acme"),
        ({}, {}, None),
    ],
)
def test_a_key_or_else_a_header_names_the_tenant(
    tenants: dict[str, str], headers: dict[str, str], tenant: str | None
) -> None:
    with live(FCFS(), tenants=tenants) as running:
        completed(running, headers)
        assert running.worker.records[-1].tenant == tenant


def test_the_keys_of_tenants_are_api_keys() -> None:
    with live(FCFS(), tenants={"secret": "acme"}, api_keys=("common",)) as running:
        assert running.post_with({"authorization": "Bearer wrong"}, prompt="a")[0] == 401
        completed(running, {"authorization": "Bearer common"})
        assert running.worker.records[-1].tenant is None


@pytest.mark.parametrize("policy", ["goodput+door", "edf:drop=infeasible"])
def test_all_answers_to_a_prompt_are_relegated_together(policy: str) -> None:
    with live(make_policy(policy), model=FLAT) as running:
        body = {"prompt": "abcd", "max_tokens": 3, "slo_ttft_ms": 1, "n": 3}
        status, answer, headers = running.post(**body, on_infeasible="relegate")
        assert (status, headers["x-slo-best-effort"]) == (200, "true")
        assert len(answer["choices"]) == 3
        running.worker.begin_drain(5)
        assert running.worker.wait_stopped(5)
        assert running.num_held_blocks == 0
