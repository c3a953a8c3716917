"""Real `vllm serve` on an emulated H100: API server, engine core, scheduler and KV cache are
vLLM's."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from prometheus_server import SCRAPE_S, empty_queries, panels, prometheus
from smollm2 import smollm2, vllm_is_installed

from experiments.inside_vllm.server import Launch, started

pytestmark = [pytest.mark.e2e, vllm_is_installed]

DEPLOY = Path(__file__).parents[2] / "deploy"
METRIC = re.compile(r"\b(?:vllm:\w+|slosched_\w+_total)")
SETTINGS = {
    "policy": "edf:drop=expired",
    "emulate": "h100/llama-3.1-8b",
    "slo_ttft_s": 20,
    "slo_tpot_s": "1s",
    "slo_tiers": {"never": {"slo_ttft_s": 1e-6}},
    "tenants": {"acme": {"key_sha256": sha256(b"sk-acme").hexdigest(), "slo_tier": "never"}},
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a running server."""
    folder = tmp_path_factory.mktemp("vllm")
    metrics = folder / "metrics"
    metrics.mkdir()
    # Older vLLM has `/inference/v1/generate` without being asked for it.
    tokens_need_option = find_spec("vllm.entrypoints.scale_out") is not None
    options = (
        *("--max-model-len", "4096"),
        *("--scheduler-cls", "slosched.integrations.vllm.SLOScheduler"),
        *("--distributed-executor-backend", "slosched.integrations.vllm.EmulatedExecutor"),
        *("--middleware", "slosched.integrations.vllm.SLOMiddleware"),
        *(["--enable-scale-out"] if tokens_need_option else []),
    )
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(metrics)}
    with started(Launch(smollm2(), options, SETTINGS, environment), folder / "log.txt") as server:
        server.await_up()
        yield server.url
        server.check()


def complete(base: str, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, Any]:
    """Return status and body of one completion."""
    body = {"prompt": "The cat sat on the mat.", "max_tokens": 8, **fields}
    status, text = ask(f"{base}/v1/completions", headers, **body)
    return status, json.loads(text)


def ask(url: str, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, str]:
    """Return status and text of one answer."""
    request = urllib.request.Request(
        url,
        json.dumps({"model": "m", **body}).encode(),
        {"content-type": "application/json", **(headers or {})},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events(base: str) -> dict[str, float]:
    """Return slosched's counts on vLLM's metrics page, by event and kind."""
    with urllib.request.urlopen(f"{base}/metrics", timeout=300) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith("slosched_events_total{")]
    return {line.partition("{")[2].rpartition("}")[0]: float(line.split()[-1]) for line in found}


def test_requests_are_served_to_their_limit_and_plans_are_executed(url: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: complete(url, max_tokens=5 + i), range(8)))
    for i, (status, body) in enumerate(answers):
        assert status == 200, body
        assert body["usage"]["completion_tokens"] == 5 + i
        assert body["choices"][0]["finish_reason"] == "length"
    counted = events(url)
    assert counted['engine="0",event="step",kind="planned"'] >= 12
    assert not [name for name in counted if "diverged" in name or "fallback" in name], counted


def test_a_promise_that_cannot_be_kept_is_a_429_at_once(url: str) -> None:
    for stream in (False, True):
        status, body = complete(url, {"x-slo-ttft-ms": "0.001"}, stream=stream)
        assert status == 429, body
        assert body["error"]["type"] == "slo_rejected"
    assert any("rejection" in name for name in events(url))


SAID = [{"role": "user", "content": "Where did the cat sit?"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": SAID, "max_tokens": 4}),
        ("/v1/responses", {"input": "Where did the cat sit?", "max_output_tokens": 4}),
        ("/v1/messages", {"messages": SAID, "max_tokens": 4}),
        ("/v1/chat/completions/batch", {"messages": [SAID, SAID], "max_tokens": 4}),
    ],
)
def test_every_endpoint_for_text_knows_slos_and_refuses_plainly(
    url: str, path: str, body: dict[str, Any]
) -> None:
    for stream in (False, True):
        status, answer = ask(url + path, stream=stream, **body)
        assert status == 200
        assert "system" in answer  # what the emulated device repeats of the chat template
        for headers in ({"x-slo-ttft-ms": "0.001"}, {"authorization": "Bearer sk-acme"}):
            status, answer = ask(url + path, headers, stream=stream, **body)
            assert (status, json.loads(answer)["error"]["type"]) == (429, "slo_rejected")


PROMPT_IDS = {"token_ids": [504, 2644, 6312], "sampling_params": {"max_tokens": 4}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/inference/v1/generate", PROMPT_IDS),
        ("/invocations", {"prompt": "Where did the cat sit?", "max_tokens": 4}),
        ("/invocations", {"messages": SAID, "max_tokens": 4}),
    ],
)
def test_endpoints_beside_those_of_openai_know_slos_and_refuse_plainly(
    url: str, path: str, body: dict[str, Any]
) -> None:
    for stream in (False, True):
        status, answer = ask(url + path, stream=stream, **body)
        assert (status, '"finish_reason":"length"' in answer) == (200, True)
        status, answer = ask(url + path, {"x-slo-ttft-ms": "0.001"}, stream=stream, **body)
        assert (status, json.loads(answer)["error"]["type"]) == (429, "slo_rejected")


SCORED = {"query": "Is it a cat?", "items": ["yes", "no"], "label_token_ids": [504, 2644]}


def test_an_endpoint_that_hands_on_no_slo_knows_it_and_refuses_plainly(url: str) -> None:
    path = f"{url}/generative_scoring"
    status, answer = ask(path, **SCORED)
    assert (status, "No logprobs" in answer) == (400, True)  # an emulated device has none
    for headers, more in [
        ({"x-slo-ttft-ms": "0.001"}, {}),
        ({"authorization": "Bearer sk-acme"}, {}),
        ({}, {"vllm_xargs": {"slo_ttft_ms": 0.001}}),
    ]:
        status, answer = ask(path, headers, **SCORED, **more)
        assert (status, json.loads(answer)["error"]["type"]) == (429, "slo_rejected")


def test_a_key_brings_its_tenants_tier(url: str) -> None:
    assert complete(url, {"authorization": "Bearer sk-acme"})[0] == 429
    assert complete(url, {"authorization": "Bearer sk-other"})[0] == 200


def test_the_dashboard_and_the_alerts_ask_for_metrics_that_vllm_has(url: str) -> None:
    assert complete(url)[0] == 200
    assert complete(url, {"x-slo-ttft-ms": "0.001"})[0] == 429
    with urllib.request.urlopen(f"{url}/metrics", timeout=300) as answer:
        lines = answer.read().decode().splitlines()
    shown = {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
    for name in ("grafana/slosched-in-vllm.json", "prometheus/vllm-alerts.yaml"):
        asked = set(METRIC.findall((DEPLOY / name).read_text("utf-8")))
        assert len(asked) >= 3
        assert asked <= shown, name


def test_every_panel_of_the_dashboard_has_data_but_for_what_did_not_happen(
    url: str, tmp_path: Path
) -> None:
    """As a real Prometheus answers; nothing diverged, so that no plan was left to vLLM."""
    dashboard = json.loads((DEPLOY / "grafana" / "slosched-in-vllm.json").read_text("utf-8"))
    shown = panels(dashboard)
    with prometheus(url, tmp_path) as watching:
        watching.wait_until_scraped()
        with ThreadPoolExecutor(4) as pool:
            headers = [{"x-slo-ttft-ms": "0.001"} if i % 6 == 0 else {} for i in range(60)]
            answers = list(pool.map(lambda h: complete(url, h, max_tokens=20), headers))
        assert {status for status, _ in answers} == {200, 429}
        time.sleep(2 * SCRAPE_S)
        empty = empty_queries(watching, shown, {"instance": ".*"}, 60)
    assert {title: len(queries) for title, queries in empty.items()} == {
        "Steps": 1,
        "Divergences by kind": 1,
    }
    assert all("divergence" in q or "fallback" in q for some in empty.values() for q in some)


def test_rejected_requests_are_among_those_that_vllm_counts_as_ended(url: str) -> None:
    """So the share that is rejected is at most 1 in the dashboard and in the alert."""

    def counted() -> tuple[float, float]:
        with urllib.request.urlopen(f"{url}/metrics", timeout=300) as answer:
            lines = answer.read().decode().splitlines()
        ended = [line for line in lines if line.startswith("vllm:request_success_total{")]
        rejected = [count for name, count in events(url).items() if "rejection" in name]
        return sum(float(line.split()[-1]) for line in ended), sum(rejected)

    before = counted()
    for _ in range(3):
        assert complete(url, {"x-slo-ttft-ms": "0.001"})[0] == 429
    after = counted()
    assert after[1] - before[1] == 3
    assert after[0] - before[0] == 3


def test_a_promise_that_cannot_be_read_is_a_400(url: str) -> None:
    assert complete(url, vllm_xargs={"slo_ttft_ms": -1})[0] == 400
    status, body = complete(url, vllm_xargs={"slo_tier": "gold"})
    assert status == 400, body
    assert "none of this server's tiers" in body["error"]["message"]
