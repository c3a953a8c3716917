"""The Grafana dashboard and the alerts in deploy/ query what /metrics has after some traffic."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from live_server import live

from slosched.core import SLO
from slosched.policy import FCFS, Door
from slosched.workload.service_tier import ServiceTier

DEPLOY = Path(__file__).parents[3] / "deploy"
NAME = re.compile(r"\b(?:vllm|slosched):\w+")


@pytest.fixture(scope="module")
def shown() -> set[str]:
    """The names of all samples of a server that has served, and refused, requests of a tier and a tenant."""
    gold = ServiceTier("gold", SLO(10.0, 5.0))
    slo, key = SLO(20.0, 5.0), {"authorization": "Bearer secret"}
    with live(Door(FCFS()), default_slo=slo, tiers=(gold,), tenants={"secret": "acme"}) as server:
        assert server.post_with(key, prompt="abc", max_tokens=3, service_tier="gold")[0] == 200
        assert server.post_with(key, prompt="abc", max_tokens=3, slo_ttft_ms=0.001)[0] == 429
        lines = server.get("/metrics")[1].splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def test_every_query_of_the_dashboard_finds_its_metrics(shown: set[str]) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "slosched.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) > 10
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            names = NAME.findall(target["expr"])
            assert names, panel["title"]
            assert set(names) <= shown, panel["title"]


def test_every_alert_finds_its_metrics(shown: set[str]) -> None:
    names = NAME.findall((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    assert len(names) > 6
    assert set(names) <= shown


SIGNED_SUM = re.compile(r"slosched:(ttft_error|slack_when_scheduled)_seconds_sum")


def test_no_query_takes_the_rate_of_a_sum_that_may_fall() -> None:
    """Prometheus takes a fall for a restart of the counter."""
    for path in (DEPLOY / "grafana" / "slosched.json", DEPLOY / "prometheus" / "alerts.yaml"):
        assert not SIGNED_SUM.search(path.read_text()), path
