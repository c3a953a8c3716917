"""LoRA adapters over HTTP: chosen by the model's name, loaded and unloaded while serving."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import merged, write_adapter
from greedy import continued
from live_server import live, post, with_client

from slosched.cli.adapters import AdapterOptions
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.server import (
    Adapters,
    EngineWorker,
    HuggingFaceTokenizer,
    ServerConfig,
    build_app,
    serve_in_thread,
)
from slosched.engine.torch import LoadedModel, TorchExecutor
from slosched.kv import HashIndex, KVCache
from slosched.policy import FCFS
from slosched.scheduler import Scheduler

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = list(range(30, 50))
FIELDS = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
          "return_token_ids": True}  # fmt: skip


@pytest.fixture(scope="module")
def paths(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / str(seed), model.model, seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def expected(model: LoadedModel, paths: list[Path]) -> list[list[int]]:
    """Return the greedy tokens of the model alone and of those with the adapters merged."""
    twins = [merged(model.model, paths[0], 0.0), *[merged(model.model, path) for path in paths]]
    tokens = [continued(twin, PROMPT, 8) for twin in twins]
    assert len(set(map(tuple, tokens))) == 3
    return tokens


@pytest.fixture
def url(model: LoadedModel, paths: list[Path]) -> Iterator[str]:
    """A server with one adapter, and a prefix cache."""
    kv = KVCache(512, 4, 0, HashIndex())
    executor = TorchExecutor(model, num_blocks=512, block_size=4)
    worker = EngineWorker(Engine(Scheduler(FCFS(), kv), executor, MonotonicClock()))
    tokenizer = HuggingFaceTokenizer(model.tokenizer, model.vocab_size, model.eos_token_ids)
    adapters = Adapters(model.load_adapter)
    adapters.add_all({"sql": paths[0]})
    config = ServerConfig("tiny", model.max_model_len, changes_adapters=True)
    app = build_app(worker, tokenizer, config, adapters=adapters)
    with serve_in_thread(app, worker) as base:
        yield base
    kv.check()


async def tokens_of(client: Any, model: str | None) -> tuple[str, list[int], int]:
    """Return the answer's model and tokens, and how many tokens of its prompt were cached."""
    status, answer, _ = await post(client, model=model, **FIELDS)
    assert status == 200, answer
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["model"], answer["choices"][0]["token_ids"], cached


def test_several_answers_have_the_same_adapter(url: str, expected: list[list[int]]) -> None:
    body = {**FIELDS, "model": "sql", "n": 2, "prompt": [PROMPT, PROMPT]}
    status, answer, _ = asyncio.run(with_client(url, lambda client: post(client, **body)))
    assert status == 200
    assert [choice["token_ids"] for choice in answer["choices"]] == [expected[1]] * 4


async def text_of(client: Any, path: str, **body: Any) -> tuple[int, str]:
    async with client.post(path, json=body) as response:
        return response.status, await response.text()


async def model_ids(client: Any) -> list[str]:
    async with client.get("/v1/models") as response:
        return [card["id"] for card in (await response.json())["data"]]


def test_the_models_name_chooses_the_adapter(url: str, expected: list[list[int]]) -> None:
    async def ask(client: Any) -> Any:
        names = ["tiny", "sql", None, "sql", "tiny", "sql"]
        answers = await asyncio.gather(*[tokens_of(client, name) for name in names])
        async with client.get("/v1/models/sql") as card:
            return answers, await card.json(), await post(client, model="other", **FIELDS)

    answers, card, (status, refusal, _) = asyncio.run(with_client(url, ask))
    for i, (name, tokens, _) in enumerate(answers):
        assert (name, tokens) == (("sql", expected[1]) if i % 2 else ("tiny", expected[0]))
    assert (card["id"], card["parent"]) == ("sql", "tiny")
    assert (status, refusal["error"]["code"]) == (404, "model_not_found")
    assert "'tiny', 'sql'" in refusal["error"]["message"]


async def running_now(client: Any) -> int:
    async with client.get("/load") as answer:
        return int((await answer.json())["num_requests_running"])


def test_adapters_come_and_go_while_serving(
    url: str, paths: list[Path], expected: list[list[int]]
) -> None:
    """A name that is loaded anew has new weights, and finds nothing of the old ones cached."""

    async def ask(client: Any) -> None:
        assert await tokens_of(client, "sql") == ("sql", expected[1], 0)
        assert (await tokens_of(client, "sql"))[2] > 0
        status, text = await text_of(client, LOAD, lora_name="sql", lora_path=str(paths[1]))
        assert status == 400
        assert "unload it" in text
        running = asyncio.create_task(post(client, model="sql", **{**FIELDS, "max_tokens": 400}))
        while not (await running_now(client) or running.done()):
            await asyncio.sleep(0.005)
        status, text = await text_of(client, UNLOAD, lora_name="sql")
        assert (status, text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert await model_ids(client) == ["tiny"]
        assert (await post(client, model="sql", **FIELDS))[0] == 404
        assert (await text_of(client, UNLOAD, lora_name="sql"))[0] == 404
        status, text = await text_of(client, LOAD, lora_name="sql", lora_path=str(paths[1]))
        assert (status, text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert await tokens_of(client, "sql") == ("sql", expected[2], 0)
        status, answer, _ = await running
        assert (status, answer["choices"][0]["token_ids"][:8]) == (200, expected[1])
        again = {"lora_name": "sql", "lora_path": str(paths[0]), "load_inplace": True}
        assert (await text_of(client, LOAD, **again))[0] == 200
        assert await tokens_of(client, "sql") == ("sql", expected[1], 0)
        assert await model_ids(client) == ["tiny", "sql"]

    asyncio.run(with_client(url, ask))


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"lora_name": "x", "lora_path": "/nowhere"}, "lora_path", "/nowhere/adapter_config.json"),
        ({"lora_name": "x"}, "lora_path", "missing"),
        ({"lora_path": "/nowhere"}, "lora_name", "missing"),
        ({"lora_name": "tiny", "lora_path": "/nowhere"}, "lora_name", "the model itself"),
        ({"lora_name": "x", "lora_path": "/nowhere", "rank": 3}, "rank", "rank"),
    ],
)
def test_what_cannot_be_loaded_is_a_400(
    url: str, body: dict[str, str], param: str, message: str
) -> None:
    status, answer, _ = asyncio.run(with_client(url, lambda client: post(client, LOAD, **body)))
    assert (status, answer["error"]["param"]) == (400, param)
    assert message in answer["error"]["message"]


def test_clients_change_no_adapters_unless_they_may() -> None:
    with live() as server:
        assert server.post(LOAD, lora_name="x", lora_path="/")[0] == 404
        assert server.post(prompt="x", model="x")[0] == 404


def test_the_options_of_the_command_line() -> None:
    options = AdapterOptions(["a=x/y", "b=~/z=1"])
    assert options.paths("m", is_emulated=False) == {
        "a": Path("x/y"),
        "b": Path("~/z=1").expanduser(),
    }
    for loras, message in (
        (["a"], "NAME=PATH"),
        (["=x"], "NAME=PATH"),
        (["a=x", "a=y"], "two models of the name 'a'"),
        (["m=x"], "two models of the name 'm'"),
    ):
        with pytest.raises(ValueError, match=message):
            AdapterOptions(loras).paths("m", is_emulated=False)
    with pytest.raises(ValueError, match="emulated"):
        AdapterOptions(["a=x"]).paths("m", is_emulated=True)


def test_metrics_name_the_adapters_in_use(url: str) -> None:
    def shown(page: str) -> str:
        [labels] = re.findall(r"^vllm:lora_requests_info{(.*)} \d+\.\d+$", page, re.MULTILINE)
        return str(labels)

    async def scenario(client: Any) -> tuple[str, str]:
        body = {**FIELDS, "model": "sql", "max_tokens": 1800, "stream": True}
        async with client.post("/v1/completions", json=body) as streaming:
            assert streaming.status == 200
            await streaming.content.readline()
            async with client.get("/metrics") as page:
                during = shown(await page.text())
        while (after := shown(await (await client.get("/metrics")).text())) == during:
            await asyncio.sleep(0.01)
        return during, after

    during, after = asyncio.run(with_client(url, scenario))
    assert during == 'max_lora="1",running_lora_adapters="sql",waiting_lora_adapters=""'
    assert after == 'max_lora="1",running_lora_adapters="",waiting_lora_adapters=""'
