"""Real weights in real vLLM servers give the same words with slosched's scheduler as without.

A request that runs alone is in the same batches with either scheduler, so its tokens must be the
same.  Requests that run together are not: kernels sum in another order in another batch, and where
two tokens are nearly equally likely, the other one may win.  Their outputs must be the same up to
the first such place.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from smollm2 import smollm2, vllm_has_kernels, vllm_is_installed

from experiments.inside_vllm.server import Launch, Server, started

pytestmark = [pytest.mark.e2e, vllm_is_installed, vllm_has_kernels]

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea, there lived",
    "Water boils at",
    "The three laws of motion are",
    "Dear Sir or Madam, I am writing to",
)
NUM_TOKENS = 16
TIE = 0.05
"""Tokens whose log-probabilities differ by less than this may change places from batch to batch."""
OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "1024", "--num-gpu-blocks-override", "64"),
    "--enforce-eager",
)


@dataclass(frozen=True)
class Answer:
    tokens: list[str]
    gaps: list[float]
    """The difference in log-probability between each token and the runner-up."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """Yield a plain vLLM server, and one with a policy that orders and cuts differently."""
    folder = tmp_path_factory.mktemp("vllm")
    ours = (*OPTIONS, "--scheduler-cls", "slosched.integrations.vllm.SLOScheduler")
    policy = {"policy": "sjf:token_budget=16", "slo_ttft_s": 30, "slo_tpot_s": 5}
    # One thread each and no third process, since threads wait for each other on a busy machine.
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    launches = (
        Launch(smollm2(), OPTIONS, {}, environment),
        Launch(smollm2(), ours, policy, environment),
    )
    with ExitStack() as stack:
        both = [
            stack.enter_context(started(launch, folder / f"{i}.log"))
            for i, launch in enumerate(launches)
        ]
        for server in both:
            server.await_up()
        yield both[0], both[1]
        for server in both:
            server.check()


def ask(server: Server, prompt: str) -> Answer:
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "logprobs": 2,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        [choice] = json.load(answer)["choices"]
    said = choice["logprobs"]
    ranked = [sorted(place.values(), reverse=True) for place in said["top_logprobs"]]
    return Answer(said["tokens"], [best - second for best, second, *_ in ranked])


@pytest.fixture(scope="module")
def alone(servers: tuple[Server, Server]) -> tuple[list[Answer], list[Answer]]:
    """Return each server's answer to each prompt when it runs alone."""
    theirs, ours = ([ask(server, prompt) for prompt in PROMPTS] for server in servers)
    return theirs, ours


def test_alone_every_token_is_the_same(alone: tuple[list[Answer], list[Answer]]) -> None:
    for expected, found in zip(*alone, strict=True):
        assert len(expected.tokens) == NUM_TOKENS
        assert found.tokens == expected.tokens


def test_together_they_part_only_where_two_tokens_are_as_likely(
    servers: tuple[Server, Server], alone: tuple[list[Answer], list[Answer]]
) -> None:
    def all_at_once(server: Server) -> list[Answer]:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(lambda prompt: ask(server, prompt), PROMPTS))

    num_same = 0
    for server in servers:
        for expected, found in zip(alone[0], all_at_once(server), strict=True):
            pairs = list(zip(expected.tokens, found.tokens, strict=True))
            parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            num_same += parted is None
            assert parted is None or expected.gaps[parted] < TIE
    assert num_same >= len(PROMPTS), "nearly all are the same to the end"
