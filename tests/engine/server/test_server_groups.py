"""Several answers to one prompt, and several prompts in one body, of a real model behind HTTP."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from live_server import FAST, live, post, stream, with_client

from slosched.core import (
    NO_SLO,
    Limits,
    PreemptionMode,
    Request,
    RequestStatus,
    SamplingParams,
    fan_out,
)
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.server import (
    EngineWorker,
    HuggingFaceTokenizer,
    ServerConfig,
    build_app,
    serve_in_thread,
)
from slosched.engine.torch import LoadedModel, TorchExecutor
from slosched.kv import KVCache, PrefixCaching
from slosched.policy.spec import make_policy
from slosched.scheduler import PromptLookup, Scheduler, Speculation

PROMPT = "a prompt that fills several blocks and a part of one"
CHAT = "/v1/chat/completions"
WARM = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(model: LoadedModel) -> Iterator[str]:
    with running(model) as base:
        yield base


@contextmanager
def running(model: LoadedModel, speculation: Speculation | None = None) -> Iterator[str]:
    kv = KVCache(256, 4)
    scheduler = Scheduler(make_policy("fcfs"), kv, speculation=speculation)
    executor = TorchExecutor(model, num_blocks=256, block_size=4)
    worker = EngineWorker(Engine(scheduler, executor, MonotonicClock()))
    tokenizer = HuggingFaceTokenizer(model.tokenizer, model.vocab_size)
    app = build_app(worker, tokenizer, ServerConfig("tiny", model.max_model_len))
    with serve_in_thread(app, worker) as base:
        yield base
    kv.check()
    assert kv.num_free_blocks == kv.num_blocks


def ask(url: str, *questions: Callable[[Any], Awaitable[Any]]) -> list[Any]:
    async def all_of(client: Any) -> list[Any]:
        return [await question(client) for question in questions]

    return asyncio.run(with_client(url, all_of))


def answered(**fields: Any) -> Callable[[Any], Awaitable[Any]]:
    return lambda client: post(client, **{**WARM, **fields})


def texts(answer: Any) -> list[str]:
    status, body, _ = answer
    assert status == 200, body
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    return [choice["text"] for choice in body["choices"]]


def test_each_answer_is_that_of_a_request_with_its_seed(url: str) -> None:
    several, *alone = ask(url, answered(n=3, seed=5), *(answered(seed=5 + i) for i in range(3)))
    assert texts(several) == [texts(answer)[0] for answer in alone]
    assert len(set(texts(several))) == 3
    usage, single = several[1]["usage"], alone[0][1]["usage"]
    assert usage["prompt_tokens"] == single["prompt_tokens"]
    assert usage["completion_tokens"] == 36


def test_greedy_answers_are_all_the_same(url: str) -> None:
    several, alone = ask(url, answered(n=2, temperature=0), answered(temperature=0))
    assert texts(several) == 2 * texts(alone)


def test_a_stream_tells_its_answers_apart(url: str) -> None:
    async def streamed(client: Any) -> Any:
        return await stream(client, **{**WARM, "n": 3, "seed": 5})

    whole, events = ask(url, answered(n=3, seed=5), streamed)
    by_index: dict[int, list[Any]] = defaultdict(list)
    for event in events:
        for choice in event["choices"]:
            by_index[choice["index"]].append(choice)
    assert ["".join(c["text"] for c in by_index[i]) for i in range(3)] == texts(whole)
    for choices in by_index.values():
        assert [c["finish_reason"] for c in choices] == [None] * 11 + ["length"]


def test_a_chat_has_several_answers(url: str) -> None:
    async def chat(client: Any) -> Any:
        messages = [{"role": "user", "content": "hi"}]
        return await post(client, CHAT, messages=messages, n=2, max_tokens=4, ignore_eos=True)

    [(status, body, _)] = ask(url, chat)
    assert status == 200
    assert [choice["message"]["role"] for choice in body["choices"]] == ["assistant"] * 2


def test_several_prompts_are_answered_in_their_order(url: str) -> None:
    prompts = ["one", "two words", [3, 4, 5]]
    fields: dict[str, Any] = {"temperature": 0, "return_token_ids": True}
    together, *alone = ask(
        url, answered(prompt=prompts, **fields), *(answered(prompt=p, **fields) for p in prompts)
    )
    assert texts(together) == [texts(answer)[0] for answer in alone]
    ids = [choice["prompt_token_ids"] for choice in together[1]["choices"]]
    assert ids == [answer[1]["choices"][0]["prompt_token_ids"] for answer in alone]
    usage = [answer[1]["usage"]["prompt_tokens"] for answer in (together, *alone)]
    assert usage[0] == sum(usage[1:])
    twice = ask(url, answered(prompt=["one", "two words"], n=2, temperature=0))[0]
    assert texts(twice)[0] == texts(twice)[1] != texts(twice)[2] == texts(twice)[3]


def test_best_of_returns_the_likeliest(url: str, model: LoadedModel) -> None:
    fields: dict[str, Any] = {"seed": 5, "return_token_ids": True}
    chosen, every = ask(url, answered(n=2, best_of=5, **fields), answered(n=5, **fields))
    candidates = [choice["token_ids"] for choice in every[1]["choices"]]
    prompt = every[1]["choices"][0]["prompt_token_ids"]
    ranked = sorted(candidates, key=lambda ids: mean_logprob(model, prompt, ids), reverse=True)
    assert [choice["token_ids"] for choice in chosen[1]["choices"]] == ranked[:2]
    assert chosen[1]["usage"]["completion_tokens"] == 60


def test_drafts_do_not_change_which_answers_are_the_likeliest(url: str, model: LoadedModel) -> None:
    few = model.tokenizer("ab").input_ids
    best = answered(n=2, best_of=4, seed=5, return_token_ids=True, allowed_token_ids=few)
    [(_, plain, _)] = ask(url, best)
    speculation = Speculation(PromptLookup(1, 3), 4)
    with running(model, speculation) as drafting:
        [(status, drafted, _)] = ask(drafting, best)
    assert status == 200
    assert speculation.num_accepted > 0
    tokens = [[choice["token_ids"] for choice in each["choices"]] for each in (plain, drafted)]
    assert tokens[0] == tokens[1]


def mean_logprob(model: LoadedModel, prompt: list[int], ids: list[int]) -> float:
    """Return the mean log-probability of the tokens, from transformers' own attention."""
    from copy import deepcopy

    twin = deepcopy(model.model)
    twin.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = twin(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.float().log_softmax(-1)[range(len(ids)), ids]
    return float(logprobs.mean())


def test_metrics_count_the_group_once(url: str) -> None:
    async def page(client: Any) -> dict[str, float]:
        async with client.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return {
            line.split("{")[0]: float(line.rsplit(" ", 1)[1])
            for line in lines
            if not line.startswith("#") and "_bucket" not in line
        }

    before, _, after = ask(url, page, answered(n=4), page)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["vllm:e2e_request_latency_seconds_count"] == 1
    assert grown["vllm:request_params_n_sum"] == 4
    assert grown["vllm:generation_tokens_total"] == 48
    assert grown["vllm:request_generation_tokens_sum"] == 48
    assert grown["vllm:request_max_num_generation_tokens_sum"] == 12
    assert grown["slosched:good_requests_total"] == 1


SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE
REPLICAS = [
    ("fcfs", SWAP, PrefixCaching.OFF),
    ("fcfs", RECOMPUTE, PrefixCaching.HASH),
    ("goodput", SWAP, PrefixCaching.HASH),
    ("goodput", RECOMPUTE, PrefixCaching.OFF),
]
"""Each two of a policy, a preemption mode and a cache; `make test-slow` plays the rest."""
REST = [
    each
    for each in product(
        ("fcfs", "goodput", "vllm_v0"), PreemptionMode, (PrefixCaching.OFF, PrefixCaching.HASH)
    )
    if each not in REPLICAS
]


@pytest.mark.parametrize(
    ("policy", "mode", "prefix_cache"),
    [*REPLICAS, *(pytest.param(*replica, marks=pytest.mark.slow) for replica in REST)],
)
def test_preempted_siblings_keep_their_tokens(
    model: LoadedModel, policy: str, mode: PreemptionMode, prefix_cache: PrefixCaching
) -> None:
    """Two groups in a cache that is too small for them, against each request alone."""
    prompts = [list(range(3, 17)), list(range(40, 61))]

    def requests(name: str) -> list[Request]:
        sampling = SamplingParams(temperature=1.0, seed=11, ignore_eos=True)
        return [
            Request(f"{name}{i}", 0.0, len(p), 14, NO_SLO, p, sampling)
            for i, p in enumerate(prompts)
        ]

    def run(num_blocks: int, groups: list[tuple[Request, ...]]) -> None:
        kv = KVCache(num_blocks, 4, 64, prefix_index=prefix_cache.new_index())
        limits = Limits(max_num_batched_tokens=32, preemption_mode=mode)
        scheduler = Scheduler(make_policy(policy), kv, limits, FAST)
        executor = TorchExecutor(model, num_blocks=num_blocks, block_size=4, num_host_blocks=64)
        engine = Engine(scheduler, executor, MonotonicClock())
        for members in groups:
            scheduler.add_request(members[0])
        while engine.has_work:
            engine.step()
            kv.check()
        assert kv.num_free_blocks == num_blocks
        assert kv.num_free_host_blocks == 64

    grouped = [fan_out(request, 3) for request in requests("g")]
    run(16, grouped)
    members = [member for group in grouped for member in group]
    assert {m.status for m in members} == {RequestStatus.FINISHED}
    assert sum(m.num_preemptions for m in members) > 0
    for member in members:
        alone = Request(
            "alone", 0.0, member.num_prompt_tokens, 14, NO_SLO, member.prompt_token_ids,
            member.sampling,
        )  # fmt: skip
        run(64, [(alone,)])
        assert member.output_token_ids == alone.output_token_ids


def test_a_client_that_leaves_takes_all_of_its_requests_with_it() -> None:
    async def leave(client: Any) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await post(client, prompt=["x", "y"], n=3, max_tokens=50)

    with live() as server:
        server.device.gate.clear()
        asyncio.run(with_client(server.url, leave))
        server.device.gate.set()
        released = {server.device.released.get(timeout=10) for _ in range(6)}
        assert len(released) == 6
        assert server.num_held_blocks == 0
