"""Panels of Grafana dashboards, asked of a real Prometheus that scrapes a server under traffic.

Grafana itself is not needed: it draws what Prometheus answers to the queries of its panels.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import Server, serving
from prometheus_server import Prometheus, empty_queries, panels, prometheus

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DEVICE = "rtx4090/llama-3.1-8b"
OURS = Path(__file__).parents[2] / "deploy" / "grafana" / "slosched.json"
TIERS = {"gold": "ttft:2s,tpot:200ms", "batch": "ttft:30s,tpot:1s,best-effort,min-share:0.1"}
TENANTS = {"acme": "secret", "other": "hidden"}
NUM_REQUESTS = 240
NUM_CLIENTS = 12
LAST_S = 60.0
"""How far back the queries look: to before the first request."""


@dataclass(frozen=True)
class OfHistogram:
    """What vLLM's dashboard asks of a histogram: four quantiles and the mean."""

    name: str

    def queries(self, rate: str) -> list[str]:
        mean = f"{rate.format(f'{self.name}_sum')} / {rate.format(f'{self.name}_count')}"
        buckets = f"sum by(le) ({rate.format(f'{self.name}_bucket')})"
        return [*(f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.9, 0.95, 0.99)), mean]


VLLM_PANELS: dict[str, tuple[OfHistogram | str, ...]] = {
    "E2E Request Latency": (OfHistogram("vllm:e2e_request_latency_seconds"),),
    "Token Throughput": ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    "Inter Token Latency": (OfHistogram("vllm:inter_token_latency_seconds"),),
    "Scheduler State": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    "Time To First Token Latency": (OfHistogram("vllm:time_to_first_token_seconds"),),
    "Cache Utilization": ("vllm:kv_cache_usage_perc",),
    "Request Prompt Length": ("vllm:request_prompt_tokens_bucket",),
    "Request Generation Length": ("vllm:request_generation_tokens_bucket",),
    "Finish Reason": ("vllm:request_success_total",),
    "Queue Time": ("vllm:request_queue_time_seconds_sum",),
    "Requests Prefill and Decode Time": (
        "vllm:request_prefill_time_seconds_sum",
        "vllm:request_decode_time_seconds_sum",
    ),
    "Max Generation Token in Sequence Group": ("vllm:request_max_num_generation_tokens_sum",),
}
"""The panels of vLLM's dashboard (examples/observability/prometheus_grafana/grafana.json at commit
4b5c627c23e6), and the metrics that each of them shows."""


def vllm_queries() -> dict[str, list[str]]:
    """Return a query for each line of each panel, of one model, as that dashboard asks."""
    return {
        title: [query for metric in metrics for query in _queries(metric)]
        for title, metrics in VLLM_PANELS.items()
    }


def _queries(metric: OfHistogram | str) -> list[str]:
    of_model = '{}{{model_name="$model_name"}}'
    rate = f"rate({of_model}[$__rate_interval])"
    if isinstance(metric, OfHistogram):
        return metric.queries(rate)
    is_counter = metric.endswith(("_total", "_sum", "_bucket"))
    return [(rate if is_counter else of_model).format(metric)]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Yield a Prometheus that has watched a server with tiers and tenants through all traffic."""
    words = [word for name, parts in TIERS.items() for word in ("--tier", f"{name}={parts}")]
    words += [word for name, key in TENANTS.items() for word in ("--tenant", f"{name}={key}")]
    with (
        serving("--emulate", DEVICE, "--slo-ttft", "5s", "--slo-tpot", "500ms", *words) as server,
        prometheus(server.url, tmp_path_factory.mktemp("prometheus")) as watching,
    ):
        watching.wait_until_scraped()
        statuses = send_traffic(server)
        assert statuses == {200, 429}
        yield watching


def send_traffic(server: Server) -> set[int]:
    """Send requests of all tiers and tenants, some of which cannot be in time; return statuses."""
    rng = random.Random(1)
    bodies = [
        {
            "prompt": "x" * rng.randint(20, 900),
            "max_tokens": rng.randint(5, 40),
            "service_tier": rng.choice(["auto", *TIERS]),
            **({"slo_ttft_ms": 1, "on_infeasible": "reject"} if rng.random() < 0.1 else {}),
        }
        for _ in range(NUM_REQUESTS)
    ]
    keys = [rng.choice([*TENANTS.values()]) for _ in bodies]

    def send(key: str, body: dict[str, object]) -> int:
        return server.post(headers={"authorization": f"Bearer {key}"}, **body)[0]

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return set(pool.map(send, keys, bodies))


def test_every_panel_of_our_dashboard_has_data(asked: Prometheus) -> None:
    shown = panels(json.loads(OURS.read_text("utf-8")))
    assert len(shown) > 10
    assert empty_queries(asked, shown, {"model_name": DEVICE}, LAST_S) == {}


def test_every_panel_of_vllms_dashboard_has_data(asked: Prometheus) -> None:
    assert empty_queries(asked, vllm_queries(), {"model_name": DEVICE}, LAST_S) == {}


def test_a_metric_that_is_not_served_is_an_empty_panel(asked: Prometheus) -> None:
    shown = {"none": ["rate(vllm:no_such_metric_total[$__rate_interval])"]}
    assert empty_queries(asked, shown, {}, LAST_S) == shown
