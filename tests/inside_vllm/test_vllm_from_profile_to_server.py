"""The way of a user: profile vLLM's steps, fit a latency model, serve with it, ask over HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from smollm2 import smollm2, vllm_has_kernels, vllm_is_installed

from experiments.inside_vllm.server import Server
from slosched.perfmodel import load_model, read_profile

pytestmark = [pytest.mark.e2e, vllm_is_installed, vllm_has_kernels]

MODEL = "smollm2-135m"
VLLM_OPTIONS = (
    "--",
    "--enforce-eager",
    "--max-model-len",
    "1024",
    "--num-gpu-blocks-override",
    "64",
)
LIMITS = ("--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--dtype", "float32")
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def slosched(*words: str) -> str:
    """Run the command and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "slosched", *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def latency_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a latency model fitted to a few seconds of vLLM's own steps."""
    smollm2()
    folder = tmp_path_factory.mktemp("profile")
    profile, fitted = folder / "vllm.csv", folder / "vllm.json"
    plan = ("--batches", "24", "--time-limit", "5s", "--max-context-tokens", "256")
    slosched(
        "profile", "--engine", "vllm", MODEL, *LIMITS, *plan, "-o", str(profile), *VLLM_OPTIONS
    )
    assert read_profile(profile).provenance["engine"].startswith("vllm ")
    slosched("fit", str(profile), "-o", str(fitted))
    assert load_model(fitted).provenance["model"] == MODEL
    return fitted


@pytest.fixture(scope="module")
def url(latency_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a server that `slosched serve --engine vllm` has become."""
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ("serve", "--engine", "vllm", MODEL, "--policy", "goodput", "--port", port, *LIMITS)
    promise = ("--latency-model", str(latency_model), "--slo-ttft", "10m", "--slo-tpot", "1m")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "slosched", *words, *promise, *VLLM_OPTIONS],
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        server.await_up()
        yield server.url
        server.check()
        assert "running " in log.read_text(errors="replace"), "the long form is shown"
    finally:
        process.terminate()
        process.wait(60)


def post(base: str, path: str, headers: dict[str, str], **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{base}{path}",
        json.dumps({"model": MODEL, "temperature": 0, **body}).encode(),
        {"content-type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_real_weights_answer_and_promises_hold_per_request(url: str) -> None:
    question = {"prompt": "The capital of France is", "max_tokens": 4}
    status, body = post(url, "/v1/completions", {}, **question)
    assert status == 200, body
    assert "Paris" in body["choices"][0]["text"]
    chat = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
    status, body = post(url, "/v1/chat/completions", {}, **chat)
    assert status == 200, body
    assert body["usage"]["completion_tokens"] <= 4
    status, body = post(url, "/v1/completions", {"x-slo-ttft-ms": "0.001"}, **question)
    assert status == 429, body
    assert body["error"]["type"] == "slo_rejected"
