"""The tiny model with its own tokenizer, behind HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.server import (
    EngineWorker,
    HuggingFaceTokenizer,
    ServerConfig,
    build_app,
    serve_in_thread,
)
from slosched.kv import HashIndex, KVCache
from slosched.policy import FCFS
from slosched.scheduler import Scheduler

if TYPE_CHECKING:
    import openai

    from slosched.engine.torch import LoadedModel


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    from slosched.engine.torch import load_model

    return load_model("tiny-random", dtype="float32", device="cpu", num_threads=1)


@pytest.fixture(scope="module")
def tokenizer(model: LoadedModel) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(model.tokenizer, model.vocab_size)


@pytest.fixture(scope="module")
def url(model: LoadedModel, tokenizer: HuggingFaceTokenizer) -> Iterator[str]:
    from slosched.engine.torch import TorchExecutor

    scheduler = Scheduler(FCFS(), KVCache(128, 4, 0, HashIndex()))
    executor = TorchExecutor(model, num_blocks=128, block_size=4)
    worker = EngineWorker(Engine(scheduler, executor, MonotonicClock()))
    app = build_app(worker, tokenizer, ServerConfig("tiny", model.max_model_len))
    with serve_in_thread(app, worker) as base:
        yield base


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    """Connect OpenAI's client library to the `server` of the test's module."""
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
