"""Quotes of real vLLM with our scheduler: over HTTP, and as `slosched route` reads them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from smollm2 import smollm2, vllm_is_installed

from experiments.inside_vllm.server import Launch, started
from slosched.gateway.config import GatewayConfig
from slosched.gateway.fleet import LiveFleet

pytestmark = [pytest.mark.e2e, vllm_is_installed]

KEY = "sk-of-the-test"
SETTINGS = {"emulate": "h100/llama-3.1-8b", "slo_ttft_s": 2, "slo_tpot_s": 0.1}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a running server with the default policy, which has a door."""
    folder = tmp_path_factory.mktemp("vllm")
    options = (
        *("--max-model-len", "4096", "--api-key", KEY),
        *("--scheduler-cls", "slosched.integrations.vllm.SLOScheduler"),
        *("--distributed-executor-backend", "slosched.integrations.vllm.EmulatedExecutor"),
        *("--middleware", "slosched.integrations.vllm.SLOMiddleware"),
    )
    with started(Launch(smollm2(), options, SETTINGS), folder / "log.txt") as server:
        server.await_up()
        yield server.url
        server.check()


def ask(url: str, path: str, document: object = None, key: str = KEY) -> tuple[int, Any]:
    """Return status and body of an answer."""
    body = None if document is None else json.dumps(document).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, body, headers)) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_quotes_come_from_the_engine_core_and_see_its_requests(url: str) -> None:
    status, idle = ask(url, "/v1/quote?prompt_tokens=16,4000")
    assert status == 200, idle
    assert idle["on_infeasible"] == "reject"
    short, long = idle["data"]
    assert 0 < short["alone_ms"]["ttft"] < long["alone_ms"]["ttft"]
    assert short["ttft_ms"]["p10"] <= short["ttft_ms"]["p90"]
    assert short["promised_ms"] == {"ttft": 2000, "tpot": 100}
    assert (short["num_requests_running"], short["num_requests_waiting"]) == (0, 0)
    asked = {"model": "m", "prompt": "The cat", "max_tokens": 2000, "ignore_eos": True}
    client = threading.Thread(target=ask, args=(url, "/v1/completions", asked))
    client.start()
    seen = 0
    while client.is_alive() and not seen:
        seen = ask(url, "/v1/quote?prompt_tokens=16")[1]["num_requests_running"]
        time.sleep(0.05)
    assert seen == 1
    client.join()


def test_a_question_may_name_a_promise(url: str) -> None:
    status, quote = ask(url, "/v1/quote?prompt_tokens=16&slo_ttft_ms=500&on_infeasible=serve")
    assert status == 200
    assert quote["promised_ms"] == {"ttft": 500, "tpot": 100}
    assert quote["on_infeasible"] == "serve"
    assert ask(url, "/v1/quote?prompt_tokens=4000&slo_ttft_ms=0.1")[1]["would_refuse"]
    for wrong in ("slo_ttft_ms=soon", "slo_tfft_ms=1", "slo_tier=gold", "on_infeasible=never"):
        status, said = ask(url, f"/v1/quote?prompt_tokens=16&{wrong}")
        assert (status, said["error"]["code"]) == (400, 400)


def test_a_question_without_the_key_is_refused_by_vllm(url: str) -> None:
    assert ask(url, "/v1/quote?prompt_tokens=16", key="sk-other")[0] == 401
    assert ask(url, "/v1/quote?prompt_tokens=4096")[0] == 400


def test_a_router_that_needs_forecasts_gets_them(url: str) -> None:
    async def forecast() -> tuple[float, float]:
        config = GatewayConfig(api_key=KEY)
        fleet = LiveFleet([url], "predicted_ttft", config)
        async with aiohttp.ClientSession() as session:
            await fleet.start(session)
            await fleet.stop()
        [replica] = fleet.up
        assert replica.forecast is not None
        return replica.forecast.alone_s[0], fleet.promised_to(None).slo.ttft_s

    alone_s, promised_s = asyncio.run(forecast())
    assert 0 < alone_s < 1
    assert promised_s == 2
