"""Real `vllm serve` on an emulated H100: API server, engine core, scheduler and KV cache are vLLM's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

pytestmark = pytest.mark.e2e

START_LIMIT_S = 840
SETTINGS = {
    "policy": "edf:drop=expired",
    "emulate": "h100/llama-3.1-8b",
    "slo_ttft_s": 20,
    "slo_tpot_s": "1s",
}


@pytest.fixture(scope="module")
def model() -> Path:
    """A directory with a tokenizer; its weights are not looked at."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    directory = Path(os.environ.get("SLOSCHED_CACHE", cache / "slosched"))
    directory = directory / "models" / "smollm2-135m-v1"
    if not directory.exists():
        pytest.skip(f"{directory} is not there: `make test` fetches the model")
    return directory


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running server; what it said is in the assertion if it dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("vllm")
    log = folder / "log.txt"
    metrics = folder / "metrics"
    metrics.mkdir()
    # Not `vllm serve`: in PyPI's CPU build that command looks for a package named "vllm".
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096"),
        *("--scheduler-cls", "slosched.integrations.vllm.SLOScheduler"),
        *("--distributed-executor-backend", "slosched.integrations.vllm.EmulatedExecutor"),
        *("--middleware", "slosched.integrations.vllm.SLOMiddleware"),
        *("--additional-config", json.dumps({"slosched": SETTINGS})),
    ]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PROMETHEUS_MULTIPROC_DIR": str(metrics),
    }
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        base = f"http://127.0.0.1:{port}"
        limit_s = time.monotonic() + START_LIMIT_S
        while not is_up(base):
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < limit_s, log.read_text()[-4000:]
            time.sleep(1)
        yield base
        assert server.poll() is None, log.read_text()[-4000:]
    finally:
        server.terminate()
        server.wait(60)


def is_up(base: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def complete(base: str, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, Any]:
    """Status and body of one completion."""
    body = {"model": "m", "prompt": "The cat sat on the mat.", "max_tokens": 8, **fields}
    request = urllib.request.Request(
        f"{base}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", **(headers or {})},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def events(base: str) -> dict[str, float]:
    """Of slosched on vLLM's metrics page, by event and kind."""
    with urllib.request.urlopen(f"{base}/metrics", timeout=60) as answer:
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
    assert counted['event="step",kind="planned"'] >= 12
    assert not [name for name in counted if "diverged" in name or "fallback" in name], counted


def test_a_promise_that_cannot_be_kept_is_a_429_at_once(url: str) -> None:
    for stream in (False, True):
        status, body = complete(url, {"x-slo-ttft-ms": "0.001"}, stream=stream)
        assert status == 429, body
        assert body["error"]["type"] == "slo_rejected"
    assert any("rejection" in name for name in events(url))


def test_a_promise_that_cannot_be_read_is_a_400(url: str) -> None:
    assert complete(url, vllm_xargs={"slo_ttft_ms": -1})[0] == 400
    status, body = complete(url, vllm_xargs={"slo_tier": "gold"})
    assert status == 400, body
    assert "none of this server's tiers" in body["error"]["message"]
