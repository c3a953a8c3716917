"""A request that spoils a step of a real model ends alone, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from live_server import post_together

from slosched.core import EndReason, Limits, Request, ScheduledBatch, StepResult
from slosched.engine.background import InBackground
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.overlap import OverlappedEngine
from slosched.engine.server import (
    EngineWorker,
    HuggingFaceTokenizer,
    ServerConfig,
    build_app,
    serve_in_thread,
)
from slosched.engine.torch import LoadedModel, TorchExecutor
from slosched.kv import HashIndex, KVCache
from slosched.policy import FCFS, POLICIES
from slosched.scheduler import Scheduler

NUM_BLOCKS = 128


class Spoiling(TorchExecutor):
    """A device that computes NaN for every prompt that begins with a given token."""

    poison: int | None = None

    def launch(self, batch: ScheduledBatch) -> Callable[[], StepResult]:
        embedding = self._model.model.get_input_embeddings().weight
        if self.poison is None:
            return super().launch(batch)
        with torch.no_grad():
            kept = embedding[self.poison].clone()
            embedding[self.poison] = float("nan")
            try:
                return super().launch(batch)
            finally:
                embedding[self.poison] = kept


class Running:
    """A server of the tiny model, its worker and its device."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.tokenizer = HuggingFaceTokenizer(
            model.tokenizer, model.vocab_size, model.eos_token_ids
        )
        self.kv = KVCache(NUM_BLOCKS, 4, 0, HashIndex())
        self.device = Spoiling(model, num_blocks=NUM_BLOCKS, block_size=4)
        self.worker = EngineWorker(
            Engine(Scheduler(FCFS(), self.kv), self.device, MonotonicClock()),
            max_consecutive_faults=3,
        )
        self.url = ""

    def together(self, *bodies: dict[str, Any]) -> list[tuple[int, Any, Any]]:
        return post_together(self.url, *bodies)


@pytest.fixture(scope="module")
def server(model: LoadedModel) -> Iterator[Running]:
    running = Running(model)
    app = build_app(running.worker, running.tokenizer, ServerConfig("tiny", model.max_model_len))
    with serve_in_thread(app, running.worker) as running.url:
        yield running


GOOD = {"prompt": [30, 71, 200, 9], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def text_of(answer: tuple[int, Any, Any]) -> str:
    assert answer[0] == 200, answer
    return str(answer[1]["choices"][0]["text"])


@pytest.mark.parametrize("value", [1e39, 1e300, 101, -0.5])
def test_a_temperature_beyond_its_range_is_a_400(server: Running, value: float) -> None:
    [(status, answer, _)] = server.together({"prompt": "x", "temperature": value})
    assert (status, answer["error"]["param"]) == (400, "temperature")
    assert "[0, 100]" in answer["error"]["message"]
    assert repr(value) in answer["error"]["message"]


def test_the_highest_temperature_and_end_tokens_that_may_not_come_yet(server: Running) -> None:
    hot = {"prompt": "x", "temperature": 100, "min_tokens": 4, "max_tokens": 4}
    [(status, answer, _)] = server.together(hot)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)


def test_stop_tokens_that_leave_nothing_to_say_are_a_400(server: Running) -> None:
    vocab_size = server.model.vocab_size
    everything = {"prompt": "x", "stop_token_ids": list(range(vocab_size))}
    [(status, answer, _)] = server.together({**everything, "min_tokens": 1})
    assert (status, answer["error"]["param"]) == (400, "stop_token_ids")
    assert "at most" in answer["error"]["message"]


def test_what_the_client_forbids_is_not_said(server: Running) -> None:
    """A bad word of one token never comes; where only two tokens are allowed, no other comes."""
    body = {**GOOD, "return_token_ids": True}
    [(_, plain, _)] = server.together(body)
    first = plain["choices"][0]["token_ids"][0]
    [(_, limited, _)] = server.together({**body, "allowed_token_ids": [first, 9]})
    assert set(limited["choices"][0]["token_ids"]) <= {first, 9}
    text = server.tokenizer.decode([first])
    [(status, other, _)] = server.together({**body, "bad_words": [text]})
    assert (status, first in other["choices"][0]["token_ids"]) == (200, False)


def test_what_has_no_logits_ends_alone_and_the_server_goes_on(server: Running) -> None:
    """Three such requests in a row end nobody else, and what they leave in the KV cache neither."""
    expected = text_of(server.together(GOOD)[0])
    server.device.poison = 5
    bad = {"prompt": [5, 71, 200, 9, 44, 17, 3, 8], "max_tokens": 4, "temperature": 1}
    for _ in range(4):
        spoilt, *others = server.together(bad, GOOD, GOOD)
        status, answer, _ = spoilt
        assert (status, answer["error"]["code"]) == (500, "engine_fault")
        assert "not numbers" in answer["error"]["message"]
        assert [text_of(other) for other in others] == [expected] * 2
    assert server.worker.why_not_serving is None
    server.device.poison = None
    server.kv.check()
    assert text_of(server.together({**bad, "ignore_eos": True})[0])
    filling = [{**GOOD, "prompt": [i, *GOOD["prompt"]] * 6} for i in range(20)]  # type: ignore[misc]
    assert all(text_of(answer) for answer in server.together(*filling))


def test_a_step_with_a_failed_row_still_books_the_others(model: LoadedModel) -> None:
    def requests() -> list[Request]:
        return [Request(str(i), 0.0, 4, 3, prompt_token_ids=[i, 71, 200, 9]) for i in (5, 6)]

    device = Spoiling(model, num_blocks=16, block_size=4)
    device.poison = 5
    kv = KVCache(16, 4, 0, HashIndex())
    scheduler = Scheduler(FCFS(), kv)
    engine = Engine(scheduler, device, MonotonicClock())
    spoilt, healthy = requests()
    for request in (spoilt, healthy):
        scheduler.queue(request)
    record = engine.step()
    assert record.result.failed.keys() == {"5"}
    assert [request.request_id for request in record.ended] == ["5"]
    assert healthy.num_output_tokens == 1
    assert engine.num_faults == 0
    engine.step()
    engine.step()
    assert (healthy.end_reason, spoilt.num_output_tokens) == ("length", 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_of_a_prompt_that_was_spoilt_before_anyone_knew_spoil_nobody(
    model: LoadedModel, overlap: bool
) -> None:
    """Its client leaves between two chunks, and no logits have shown yet that it was spoilt."""
    device = Spoiling(model, num_blocks=4, block_size=4)
    scheduler = Scheduler(POLICIES["vllm_v1"](), KVCache(4, 4), Limits(max_num_batched_tokens=4))
    clock = MonotonicClock()
    engine: Engine = Engine(scheduler, device, clock)
    if overlap:
        engine = OverlappedEngine(scheduler, InBackground(device), clock)

    def ask(name: str, prompt: list[int]) -> Request:
        request = Request(name, 0.0, len(prompt), 3, prompt_token_ids=prompt)
        scheduler.queue(request)
        return request

    def finish() -> None:
        while engine.has_work:
            engine.step()

    prompts = [30, 71, 200, 9, 44], [30]  # `sdpa` pads the shorter of two decodes

    def ask_all(name: str) -> list[Request]:
        return [ask(f"{name}{i}", prompt) for i, prompt in enumerate(prompts)]

    before = ask_all("before")
    finish()
    device.poison = 5
    spoilt = ask("spoilt", [5, *range(20, 32)])
    while spoilt.num_computed_tokens < 12:  # three blocks of four, and then a token is emitted
        engine.step()
    scheduler.end("spoilt", EndReason.CLIENT, clock.now_s())
    after = ask_all("after")
    finish()
    assert spoilt.num_output_tokens == 0
    assert [request.end_reason for request in after] == [EndReason.LENGTH] * 2
    expected = [request.output_token_ids for request in before]
    assert [request.output_token_ids for request in after] == expected
