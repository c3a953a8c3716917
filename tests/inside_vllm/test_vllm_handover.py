"""Real `vllm serve` twice, behind a proxy: one engine computes the prompts, the other one answers.

Both run on emulated devices, so that no KV block is really moved: folders of the shared storage
stand for the blocks.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from handover_proxy import proxy
from smollm2 import smollm2, vllm_is_installed
from test_vllm_serve import complete, events

from experiments.inside_vllm.server import Launch, started

pytestmark = [pytest.mark.e2e, vllm_is_installed]

HERE = Path(__file__).parent
REQUESTS = range(1, 13)
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Pair:
    """The URLs of the two engines, and of the proxy in front of them."""

    proxy: str
    prefill: str
    decode: str


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("handover")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(started(launch(role, folder), folder / f"{role}.txt"))
            for role in ("kv_producer", "kv_consumer")
        ]
        for server in servers:
            server.await_up()
        prefill, decode = (server.url for server in servers)
        yield Pair(stack.enter_context(proxy(prefill, decode)), prefill, decode)
        for server in servers:
            server.check()


def launch(role: str, folder: Path) -> Launch:
    """Return one of the two servers; a request that is late for its TTFT is rejected by either."""
    metrics, storage = folder / f"{role}-metrics", folder / "storage"
    metrics.mkdir()
    storage.mkdir(exist_ok=True)
    options = (
        *(
            "--max-model-len",
            "4096",
            "--block-size",
            str(BLOCK_SIZE),
            "--kv-transfer-config.kv_role",
        ),
        *(role, "--kv-transfer-config.kv_connector", "HandoverConnector"),
        *("--kv-transfer-config.kv_connector_module_path", "handover_connector"),
        "--kv-transfer-config.kv_connector_extra_config.shared_storage_path",
        str(storage),
        *("--scheduler-cls", "slosched.integrations.vllm.SLOScheduler"),
        *("--distributed-executor-backend", "slosched.integrations.vllm.EmulatedExecutor"),
        *("--middleware", "slosched.integrations.vllm.SLOMiddleware"),
    )
    settings = {
        "policy": "edf:drop=expired",
        "emulate": "h100/llama-3.1-8b",
        "slo_ttft_s": 60,
        "slo_tpot_s": "2s",
    }
    environment = {
        "PROMETHEUS_MULTIPROC_DIR": str(metrics),
        "PYTHONPATH": f"{HERE}:{HERE.parents[1]}",
    }
    return Launch(smollm2(), options, settings, environment)


def prompt(index: int) -> str:
    """Return a prompt of its own; none is one token longer than whole blocks, since vLLM's
    ExampleConnector stores such a prompt under a name by which it does not look for it."""
    return " ".join(f"{index} is not {index + number}" for number in range(1, 30))


LOADED = "vllm:external_prefix_cache_hits_total"
"""vLLM's count of the tokens that a connector loaded."""


def total(url: str, counter: str) -> float:
    """Return a count of vLLM's metrics page."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=300) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(counter + "{"))


def test_one_engine_computes_each_prompt_and_the_other_one_answers_it(pair: Pair) -> None:
    def ask(url: str, index: int) -> tuple[int, str, int]:
        status, body = complete(url, prompt=prompt(index), max_tokens=5 + index)
        assert status == 200, body
        usage = body["usage"]
        return usage["prompt_tokens"], body["choices"][0]["text"], usage["completion_tokens"]

    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        answers = list(pool.map(lambda index: ask(pair.proxy, index), REQUESTS))
    assert [n for *_, n in answers] == [5 + index for index in REQUESTS]
    whole_blocks = sum((n - 1) // BLOCK_SIZE * BLOCK_SIZE for n, *_ in answers)
    assert total(pair.decode, LOADED) == whole_blocks > 0
    assert total(pair.prefill, LOADED) == 0
    assert ask(pair.decode, 3) == answers[2], "one engine alone says the same"
    for url in (pair.prefill, pair.decode):
        counted = events(url)
        assert counted['engine="0",event="step",kind="planned"'] > 0
        failed = ("diverged", "fallback", "rejection")
        assert not [name for name in counted if any(word in name for word in failed)], counted
