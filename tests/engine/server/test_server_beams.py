"""Beam search of a real model behind HTTP, beside a search with transformers' own attention."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import merged, write_adapter
from live_server import live, post, with_client

from slosched.core import DeadlineRule, EndReason
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.server import (
    Adapters,
    EngineWorker,
    HuggingFaceTokenizer,
    ServerConfig,
    build_app,
    serve_in_thread,
)
from slosched.engine.server.account import Account, Reporter
from slosched.engine.torch import LoadedModel, TorchExecutor
from slosched.kv import HashIndex, KVCache
from slosched.policy import FCFS
from slosched.scheduler import PromptLookup, Scheduler, Speculation

PROMPT = [3, 14, 15, 9, 26, 5, 35]


@pytest.fixture(scope="module")
def end_token(model: LoadedModel) -> int:
    """A token that the search meets on its way, so that some beams stop."""
    return searched(model.model, 3, 4, frozenset())[0][0][1]


@pytest.fixture(scope="module")
def url(model: LoadedModel, end_token: int) -> Iterator[str]:
    with running(model, end_token) as base:
        yield base


@contextmanager
def running(
    model: LoadedModel,
    end_token: int,
    request_timeout_s: float | None = None,
    speculation: Speculation | None = None,
    adapters: Adapters | None = None,
    reporters: Sequence[Reporter] = (),
) -> Iterator[str]:
    kv = KVCache(256, 4, 0, HashIndex())
    executor = TorchExecutor(model, num_blocks=256, block_size=4)
    scheduler = Scheduler(FCFS(), kv, speculation=speculation)
    worker = EngineWorker(Engine(scheduler, executor, MonotonicClock()))
    ends = frozenset({end_token})
    tokenizer = HuggingFaceTokenizer(model.tokenizer, model.vocab_size, ends)
    config = ServerConfig("tiny", model.max_model_len, request_timeout_s=request_timeout_s)
    app = build_app(worker, tokenizer, config, adapters=adapters, reporters=reporters)
    with serve_in_thread(app, worker) as base:
        yield base
    kv.check()
    assert kv.num_free_blocks == kv.num_blocks


def ask(url: str, path: str = "/v1/completions", **fields: Any) -> Any:
    async def question(client: Any) -> Any:
        return await post(client, path, use_beam_search=True, **fields)

    return asyncio.run(with_client(url, question))


def searched(
    model: Any, width: int, num_tokens: int, ends: frozenset[int], penalty: float = 1.0
) -> list[tuple[list[int], float]]:
    """Return the best beams and their scores, by forward passes over whole sequences."""
    twin = deepcopy(model)
    twin.set_attn_implementation("eager")
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    answers: list[tuple[list[int], float]] = []

    def score(beam: tuple[list[int], float]) -> float:
        ids, logprob = beam
        return logprob / (len(PROMPT) + len(ids) - (ids[-1] in ends)) ** penalty

    for _ in range(num_tokens):
        with torch.inference_mode():
            logits = twin(torch.tensor([PROMPT + ids for ids, _ in beams])).logits[:, -1]
        top = logits.float().log_softmax(-1).topk(2 * width)
        longer = [
            ([*ids, token], total + logprob)
            for (ids, total), tokens, logprobs in zip(
                beams, top.indices.tolist(), top.values.tolist(), strict=True
            )
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        answers += [beam for beam in longer if beam[0][-1] in ends]
        going_on = [beam for beam in longer if beam[0][-1] not in ends]
        beams = sorted(going_on, key=score, reverse=True)[:width]
    best = sorted([*answers, *beams], key=score, reverse=True)[:width]
    return [(ids, score((ids, total))) for ids, total in best]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("penalty", [1.0, 0.0])
def test_the_answers_are_those_of_a_search_over_whole_sequences(
    url: str, model: LoadedModel, end_token: int, width: int, penalty: float
) -> None:
    status, body, _ = ask(
        url, prompt=PROMPT, n=width, max_tokens=6, length_penalty=penalty, return_token_ids=True
    )
    assert status == 200, body
    ends = frozenset({end_token})
    expected = [ids for ids, _ in searched(model.model, width, 6, ends, penalty)]
    choices = body["choices"]
    assert [choice["token_ids"] for choice in choices] == expected
    assert [choice["index"] for choice in choices] == list(range(width))
    reasons = ["stop" if ids[-1] == end_token else "length" for ids in expected]
    assert [choice["finish_reason"] for choice in choices] == reasons
    assert body["usage"]["prompt_tokens"] == len(PROMPT)
    assert body["usage"]["completion_tokens"] == sum(map(len, expected))


def test_some_of_those_answers_stop(model: LoadedModel, end_token: int) -> None:
    found = [ids for ids, _ in searched(model.model, 3, 6, frozenset({end_token}), 0.0)]
    assert any(ids[-1] == end_token for ids in found)


def test_without_ends_all_answers_have_the_full_length(url: str, model: LoadedModel) -> None:
    _, body, _ = ask(url, prompt=PROMPT, n=3, max_tokens=6, ignore_eos=True, return_token_ids=True)
    expected = [ids for ids, _ in searched(model.model, 3, 6, frozenset())]
    assert [choice["token_ids"] for choice in body["choices"]] == expected


def test_a_search_with_an_adapter_beside_answers_with_drafts(
    model: LoadedModel, end_token: int, tmp_path: Path
) -> None:
    adapters, path = Adapters(model.load_adapter), write_adapter(tmp_path / "a", model.model, 1)
    adapters.add_all({"sql": path})
    few = {"allowed_token_ids": [5, 6], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    search = {"use_beam_search": True, "n": 3, "max_tokens": 6, "ignore_eos": True}
    speculation = Speculation(PromptLookup(1, 3), 4)

    async def both(client: Any) -> Any:
        fields = {"prompt": PROMPT, "model": "sql", "return_token_ids": True}
        asks = [post(client, **fields, **search), post(client, **fields, **few)]
        return await asyncio.gather(*asks)

    with running(model, end_token, speculation=speculation, adapters=adapters) as base:
        (_, body, _), (status, _, _) = asyncio.run(with_client(base, both))
    assert (status, speculation.num_accepted > 0) == (200, True)
    expected = [ids for ids, _ in searched(merged(model.model, path), 3, 6, frozenset())]
    assert [choice["token_ids"] for choice in body["choices"]] == expected
    assert expected != [ids for ids, _ in searched(model.model, 3, 6, frozenset())]


def test_a_chat_can_be_searched(url: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    status, body, _ = ask(url, "/v1/chat/completions", messages=messages, n=2, max_tokens=3)
    assert status == 200
    assert [choice["message"]["role"] for choice in body["choices"]] == ["assistant"] * 2


def test_a_search_that_is_rejected_or_left_ends(model: LoadedModel) -> None:
    from slosched.policy.spec import make_policy

    kv = KVCache(256, 4, 0, HashIndex())
    executor = TorchExecutor(model, num_blocks=256, block_size=4)
    scheduler = Scheduler(make_policy("edf:drop=expired"), kv)
    worker = EngineWorker(Engine(scheduler, executor, MonotonicClock()))
    tokenizer = HuggingFaceTokenizer(model.tokenizer, model.vocab_size)
    config = ServerConfig("tiny", model.max_model_len)
    app = build_app(worker, tokenizer, config)
    with serve_in_thread(app, worker) as base:
        status, body, _ = ask(
            base, prompt=PROMPT, n=2, max_tokens=400, slo_ttft_ms=100, slo_tpot_ms=1e-3
        )
        assert (status, body["error"]["reason"]) == (429, "expired")

        async def leave(client: Any) -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await post(client, prompt=PROMPT, use_beam_search=True, n=4, max_tokens=400)

        asyncio.run(with_client(base, leave))
        unfinished = [scheduler.num_unfinished for _ in range(20) if not time.sleep(0.05)]
        assert unfinished[-5:] == [0] * 5
    assert kv.num_free_blocks == kv.num_blocks


def test_an_emulated_device_cannot_search() -> None:
    with live() as server:
        status, answer, _ = server.post(prompt="x", use_beam_search=True)
    assert (status, answer["error"]["param"]) == (400, "use_beam_search")


def test_a_search_that_takes_too_long_ends_with_an_error(
    model: LoadedModel, end_token: int
) -> None:
    with running(model, end_token, request_timeout_s=0.02) as url:
        status, document, _ = ask(url, prompt=PROMPT, n=8, max_tokens=100, ignore_eos=True)
        assert (status, document["error"]["code"]) == (504, "request_timeout")


class Kept(list[Account]):
    """Keeps the accounts of all requests, and lets a test wait for the next one."""

    def next(self) -> Account:
        for _ in range(400):
            if self:
                return self.pop()
            time.sleep(0.05)
        raise AssertionError("no account was closed")


RULE = DeadlineRule.ENVELOPE


def test_a_search_is_reported_as_other_requests_are(model: LoadedModel, end_token: int) -> None:
    kept = Kept()
    asked = {"prompt": PROMPT, "n": 3, "max_tokens": 6, "slo_ttft_ms": 60_000}
    with running(model, end_token, reporters=[kept.append]) as url:
        for num_cached in (0, 4):  # the second finds the first block of four tokens
            _, body, _ = ask(url, **asked, slo_tpot_ms=60_000)
            account, usage = kept.next(), body["usage"]
            record = account.record(RULE)
            assert record is not None
            assert account.num_output_tokens == usage["completion_tokens"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == num_cached
            assert account.prompts[0].num_cached_tokens == num_cached
            reasons = {generation.request.end_reason for generation in account.generations}
            assert reasons <= {EndReason.STOP, EndReason.LENGTH}
            assert account.is_good(record, RULE)
            assert 0 < record.ttft_s <= record.e2e_s <= account.took_s + 0.01
            assert record.started_s is not None
            assert record.tpot_s > 0
        ask(url, **{**asked, "slo_ttft_ms": 1e-3})
        account = kept.next()
        record = account.record(RULE)
        assert record is not None
        assert account.is_good(record, RULE) is False


def test_a_search_without_an_answer_is_reported_with_the_reason(
    model: LoadedModel, end_token: int
) -> None:
    kept, long = Kept(), {"prompt": PROMPT, "n": 8, "max_tokens": 100, "ignore_eos": True}

    def end() -> EndReason | None:
        record = kept.next().record(RULE)
        assert record is not None
        assert record.num_output_tokens == len(record.token_times_s)
        return record.end_reason

    with running(model, end_token, 0.3, reporters=[kept.append]) as url:
        assert ask(url, **long)[0] == 504
        assert end() is EndReason.TIMEOUT

        async def leave(client: Any) -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.15):
                    await post(client, use_beam_search=True, **long)

        asyncio.run(with_client(url, leave))
        assert end() is EndReason.CLIENT
