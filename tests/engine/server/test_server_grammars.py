"""Structured output over HTTP, and the queue of requests that wait for their grammar."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from live_server import live, post, post_together, server_process, stream, with_client

from slosched.cli.local_model import LocalModel, make_grammars
from slosched.core import EndReason, OutputGrammar, Request, SamplingParams
from slosched.engine.background import InBackground
from slosched.engine.grammar import Definition, GuidanceCompiler, Kind, LibraryMissingError
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.overlap import OverlappedEngine
from slosched.engine.server import (
    EngineWorker,
    HuggingFaceTokenizer,
    ServerConfig,
    build_app,
    serve_in_thread,
)
from slosched.engine.server.errors import ApiError
from slosched.engine.server.grammars import GrammarQueue
from slosched.engine.server.structured import StructuredOutput
from slosched.engine.torch import LoadedModel, TorchExecutor
from slosched.kv import HashIndex, KVCache
from slosched.policy import FCFS
from slosched.scheduler import Scheduler

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"enum": ["yes", "no"]},
        "why": {"type": "string", "maxLength": 5},
        "sure": {"type": "integer", "minimum": 0, "maximum": 10},
    },
    "required": ["answer", "why", "sure"],
    "additionalProperties": False,
}
FREE = {"prompt": "free", "max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def compiler(model: LoadedModel) -> GuidanceCompiler:
    backend = model.tokenizer.backend_tokenizer
    return GuidanceCompiler(backend.to_str(), model.vocab_size, model.eos_token_ids)


class Gate:
    """Compiles one after the other, each after `open`."""

    def __init__(self, compiler: GuidanceCompiler) -> None:
        self._compiler = compiler
        self.open = threading.Event()
        self.open.set()
        self.num_begun = 0

    def compile(self, definition: Definition) -> OutputGrammar:
        self.num_begun += 1
        assert self.open.wait(30)
        return self._compiler.compile(definition)


class Running:
    """A server of the tiny model, whose grammars wait for a gate."""

    def __init__(
        self, model: LoadedModel, compiler: GuidanceCompiler, num_blocks: int = 128
    ) -> None:
        self.kv = KVCache(num_blocks, 4, 0, HashIndex())
        executor = TorchExecutor(model, num_blocks=num_blocks, block_size=4)
        engine = Engine(Scheduler(FCFS(), self.kv), executor, MonotonicClock())
        self.worker = EngineWorker(engine)
        self.tokenizer = HuggingFaceTokenizer(
            model.tokenizer, model.vocab_size, model.eos_token_ids
        )
        self.gate = Gate(compiler)
        config = ServerConfig("tiny", model.max_model_len)
        self.app = build_app(self.worker, self.tokenizer, config, self.gate)
        self.url = ""

    def together(self, *bodies: dict[str, Any]) -> list[tuple[int, Any, Any]]:
        return post_together(self.url, *bodies)


@pytest.fixture(scope="module")
def server(model: LoadedModel, compiler: GuidanceCompiler) -> Iterator[Running]:
    running = Running(model, compiler)
    with serve_in_thread(running.app, running.worker) as running.url:
        yield running
    running.kv.check()


def text_of(answer: tuple[int, Any, Any]) -> str:
    assert answer[0] == 200, answer
    [choice] = answer[1]["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def is_instance(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == ["answer", "why", "sure"]
        and found["answer"] in ("yes", "no")
        and len(found["why"]) <= 5
        and found["sure"] in range(11)
    )


STRUCTURED: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, is_instance),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, is_instance),
    ({"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ?"}, is_instance),
    ({"structured_outputs": {"regex": "[a-c]{3}x+y"}, "bad_words": ["xxx"]}, re.compile("[a-c]{3}xx?y").fullmatch),
    ({"guided_regex": r"\d{4}-\d{2}"}, re.compile(r"\d{4}-\d{2}").fullmatch),
    ({"structured_outputs": {"choice": ["red", "green"]}}, {"red", "green"}.__contains__),
    ({"guided_choice": ["rot", "grün"], "min_tokens": 90}, {"rot", "grün"}.__contains__),
    ({"guided_grammar": 'root ::= "(" root ")" | "x"', "max_tokens": 41}, re.compile(r"\(*x?\)*").fullmatch),
]  # fmt: skip


def test_responses_follow_a_schema_too(server: Running) -> None:
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    body = {"input": "hi", "max_output_tokens": 440, "text": wanted}

    async def ask(client: Any) -> tuple[int, Any, Any]:
        return await post(client, "/v1/responses", **body)

    status, answer, _ = asyncio.run(with_client(server.url, ask))
    assert (status, answer["status"], answer["text"]) == (200, "completed", wanted)
    assert is_instance(answer["output"][0]["content"][0]["text"])


@pytest.mark.parametrize("temperature", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_answers_follow_their_grammars_beside_free_ones(server: Running, temperature: int) -> None:
    """What others draw in the same steps does not change for it."""
    [alone] = server.together(FREE)
    bodies = [
        {"prompt": "x", "max_tokens": 440, "temperature": temperature, "seed": 1, **fields}
        for fields, _ in STRUCTURED
    ]
    free, *answers = server.together(FREE, *bodies)
    assert text_of(free) == text_of(alone)
    for (fields, is_right), answer in zip(STRUCTURED, answers, strict=True):
        assert is_right(text_of(answer)), (fields, answer)
        reason = answer[1]["choices"][0]["finish_reason"]
        assert reason == "stop" or answer[1]["usage"]["completion_tokens"] == 41
    assert [text_of(again) for again in server.together(*bodies)] == list(map(text_of, answers))


def test_a_chat_and_a_stream_follow_theirs(server: Running) -> None:
    fields = {"max_tokens": 440, "response_format": STRUCTURED[0][0]["response_format"]}

    async def ask(client: Any) -> Any:
        return (
            await post(client, CHAT, messages=HI, **fields),
            await stream(client, CHAT, messages=HI, **fields),
            await post(
                client, CHAT, messages=HI, response_format={"type": "json_object"}, stop="{"
            ),
        )

    chat, events, stopped = asyncio.run(with_client(server.url, ask))
    assert is_instance(text_of(chat))
    assert is_instance("".join(e["choices"][0]["delta"]["content"] for e in events))
    assert text_of(stopped).strip() == ""


def test_each_of_several_answers_follows_the_grammar_by_itself(server: Running) -> None:
    body = {"prompt": "x", "guided_regex": "[a-z]{6}", "n": 3, "temperature": 1, "seed": 7}
    [(status, answer, _)] = server.together(body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert (status, len(set(texts))) == (200, 3)
    assert all(re.fullmatch("[a-z]{6}", text) for text in texts)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"structured_outputs": {"json": {"type": "objekt"}}}, "structured_outputs.json", "objekt"),
        ({"guided_json": "{"}, "guided_json", "wrong"),
        ({"guided_grammar": "hello"}, "guided_grammar", "Expected ::="),
    ],
)
def test_a_wrong_grammar_is_a_400_with_the_reason(
    server: Running, fields: dict[str, Any], param: str, message: str
) -> None:
    [(status, answer, _)] = server.together({**FREE, **fields})
    assert (status, answer["error"]["param"]) == (400, param)
    assert message in answer["error"]["message"]


def test_rules_that_leave_no_token_end_their_own_request_alone(server: Running) -> None:
    """Its client is told, and what others have in the prefix cache stays there."""
    long = {**FREE, "prompt": "a prompt of some blocks, asked for twice"}
    server.together(long)
    bad = {"prompt": "x", "guided_choice": ["ab"], "allowed_token_ids": [70], "stream": True}

    async def ask(client: Any) -> Any:
        return await asyncio.gather(post(client, **bad), post(client, **FREE))

    (status, answer, _), free = asyncio.run(with_client(server.url, ask))
    assert (status, answer["error"]["code"], answer["error"]["reason"]) == (
        400,
        "no_token",
        "no_token",
    )
    assert "leave no token" in answer["error"]["message"]
    assert text_of(free)
    [again] = server.together(long)
    assert again[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert server.worker.metrics.num_ended(EndReason.NO_TOKEN) == 1


def test_a_request_waits_for_its_grammar_out_of_the_policys_sight(server: Running) -> None:
    gate, scheduler = server.gate, server.worker.scheduler
    gate.open.clear()
    num_begun = gate.num_begun

    async def ask(client: Any) -> Any:
        same = {"prompt": "x", "guided_regex": "wait{3}", "max_tokens": 20}
        waiting = [asyncio.create_task(post(client, **same)) for _ in range(3)]
        gone = asyncio.create_task(post(client, **same))
        while 'grammar{model_name="tiny"} 4\n' not in (page := await metrics(client)):
            await asyncio.sleep(0.01)
        gone.cancel()
        free = await post(client, **FREE)
        assert 'vllm:num_requests_waiting{model_name="tiny"} 0\n' in page
        assert scheduler.num_unfinished == 0
        gate.open.set()
        return free, await asyncio.gather(*waiting)

    async def metrics(client: Any) -> str:
        async with client.get("/metrics") as page:
            return str(await page.text())

    free, waited = asyncio.run(with_client(server.url, ask))
    assert text_of(free)
    assert list(map(text_of, waited)) == ["waittt"] * 3
    assert gate.num_begun == num_begun + 1, "four requests, one grammar"


def queue_of(gate: Gate, **settings: Any) -> GrammarQueue:
    return GrammarQueue(gate, retry_after_s=2.0, **settings)


def wanted(text: str) -> StructuredOutput:
    return StructuredOutput(Definition(Kind.REGEX, text), "guided_regex")


def test_a_grammar_has_a_time_limit_and_its_queue_an_end(compiler: GuidanceCompiler) -> None:
    gate = Gate(compiler)
    gate.open.clear()

    async def ask() -> list[Any]:
        queue = queue_of(gate, time_limit_s=0.3, max_waiting=2)
        jobs = [asyncio.create_task(queue.compiled(wanted(text))) for text in ("a", "b")]
        await asyncio.sleep(0.05)
        jobs.append(asyncio.create_task(queue.compiled(wanted("c"))))
        found = await asyncio.gather(*jobs, return_exceptions=True)
        gate.open.set()
        return [*found, await queue.compiled(wanted("a")), await queue.compiled(wanted("b"))]

    *errors, a, b = asyncio.run(ask())
    assert all(isinstance(error, ApiError) for error in errors)
    assert [error.status for error in errors] == [400, 503, 503]
    assert [error.retry_after_s for error in errors] == [None, 2.0, 2.0]
    assert "not compiled within 0.3 s" in errors[0].message
    assert "2 requests wait" in errors[2].message
    assert a.begin().mask() != b.begin().mask()


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled(
    compiler: GuidanceCompiler,
) -> None:
    """Else those who gave up would hold up all who come after them."""
    gate = Gate(compiler)
    gate.open.clear()

    async def ask() -> list[Any]:
        queue = queue_of(gate, time_limit_s=0.3)
        given_up = [queue.compiled(wanted(text)) for text in ("a", "b", "c", "d", "e")]
        found = await asyncio.gather(*given_up, return_exceptions=True)
        shared = [asyncio.create_task(queue.compiled(wanted("f"))) for _ in range(2)]
        await asyncio.sleep(0.05)
        shared[0].cancel()
        await asyncio.sleep(0)
        gate.open.set()
        return [*found, await shared[1], await queue.compiled(wanted("b"))]

    *errors, f, b = asyncio.run(ask())
    assert [error.status for error in errors] == [400, 503, 503, 503, 503]
    assert gate.num_begun < 6, "nobody waited for all of b to e when their turn came"
    assert f.begin().mask() != b.begin().mask()


class Stuck(Gate):
    """A compiler for which some grammars take until the gate is open, and others no time."""

    def __init__(self, compiler: GuidanceCompiler) -> None:
        super().__init__(compiler)
        self._any = compiler.compile(wanted("a").definition)

    def compile(self, definition: Definition) -> OutputGrammar:
        return super().compile(definition) if "stuck" in definition.text else self._any


def test_a_grammar_that_takes_too_long_keeps_no_others_waiting(compiler: GuidanceCompiler) -> None:
    """A schema of 2 KB, with fifteen patterns in `allOf`, takes llguidance minutes."""
    gate = Stuck(compiler)
    gate.open.clear()

    async def ask() -> list[Any]:
        queue = queue_of(gate, time_limit_s=1.0)
        found = []
        for text in ("stuck1", "a", "stuck2", "b", "stuck3", "c"):
            found += await asyncio.gather(queue.compiled(wanted(text)), return_exceptions=True)
        gate.open.set()
        return [*found, await queue.compiled(wanted("c"))]

    *found, c = asyncio.run(ask())
    assert [getattr(each, "status", 200) for each in found] == [400, 200, 400, 200, 400, 503]
    assert c.begin().mask()


def test_who_waited_for_others_is_not_told_to_simplify(compiler: GuidanceCompiler) -> None:
    """Its own grammar has begun when its time is up, and is there when it is asked for again."""
    gate = Gate(compiler)
    gate.open.clear()

    async def ask() -> list[Any]:
        queue = queue_of(gate, time_limit_s=1.0)
        first = asyncio.create_task(queue.compiled(wanted("a")))
        await asyncio.sleep(0.5)
        second = asyncio.create_task(queue.compiled(wanted("b")))
        found = await asyncio.gather(first, second, return_exceptions=True)
        gate.open.set()
        return [*found, await queue.compiled(wanted("b"))]

    a, b, again = asyncio.run(ask())
    assert [a.status, b.status] == [400, 503]
    assert gate.num_begun == 2
    assert again.begin().mask()


def test_a_grammar_that_takes_too_long_does_not_keep_the_process_from_its_end() -> None:
    program = """
import asyncio, time
from slosched.engine.grammar import Definition, Kind
from slosched.engine.server.grammars import GrammarQueue
from slosched.engine.server.structured import StructuredOutput

class Slow:
    def compile(self, definition):
        time.sleep(60)

print("begun", flush=True)
queue = GrammarQueue(Slow(), 1.0, time_limit_s=0.1)
wanted = StructuredOutput(Definition(Kind.REGEX, "x"), "guided_regex")
print(asyncio.run(asyncio.wait_for(queue.compiled(wanted), 5)))
"""
    with server_process(program) as (process, _):
        assert process.wait(20) == 1


def test_an_emulated_device_and_a_missing_library_say_so(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live() as server:
        status, answer, _ = server.post(prompt="x", guided_choice=["a"])
        assert (status, answer["error"]["param"]) == (400, "guided_choice")
        assert "draws no tokens" in answer["error"]["message"]
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(LibraryMissingError, match=r"pip install 'slosched\[grammar\]'"):
        GuidanceCompiler("{}", 10, {2})


def test_a_tokenizer_may_have_a_token_that_its_model_has_not(model: LoadedModel) -> None:
    """There were no grammars for Gemma 3 without images, whose tokenizer has a token for one."""
    tokenizer = deepcopy(model.tokenizer)
    assert tokenizer is not None
    tokenizer.add_tokens(["<image>"])
    assert len(tokenizer) > model.vocab_size
    executor = TorchExecutor(model, num_blocks=8, block_size=4)
    local = LocalModel(replace(model, tokenizer=tokenizer), executor, 8, 0, 4)
    grammar = make_grammars(local).compile(Definition(Kind.CHOICE, '["<image>"]'))
    engine = Engine(Scheduler(FCFS(), KVCache(8, 4)), executor, MonotonicClock())
    sampling = SamplingParams(grammar=grammar)
    request = Request("0", 0.0, 3, 20, prompt_token_ids=[30, 40, 50], sampling=sampling)
    engine.scheduler.queue(request)
    while engine.has_work:
        engine.step()
    assert tokenizer.decode(request.output_token_ids, skip_special_tokens=True) == "<image>"


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_grammars_survive_recomputation(
    model: LoadedModel, compiler: GuidanceCompiler, overlap: bool
) -> None:
    """With blocks for about two of six requests the outputs are those that each has alone."""
    grammar = compiler.compile(Definition(Kind.JSON_SCHEMA, json.dumps(SCHEMA), False))

    def run(num_blocks: int, *names: str) -> dict[str, list[int]]:
        executor = TorchExecutor(model, num_blocks=num_blocks, block_size=4)
        scheduler = Scheduler(FCFS(), KVCache(num_blocks, 4))
        engine = Engine(scheduler, executor, MonotonicClock())
        if overlap:
            engine = OverlappedEngine(scheduler, InBackground(executor), MonotonicClock())
        requests = []
        for name in names:
            hot = SamplingParams(temperature=1.0, seed=int(name), grammar=grammar)
            ids = [30, 40 + int(name), 50]
            requests.append(Request(name, 0.0, 3, 60, prompt_token_ids=ids, sampling=hot))
            scheduler.queue(requests[-1])
        preempted = 0
        while engine.has_work:
            preempted += len(engine.step().batch.output.preempted)
        assert all(request.end_reason is EndReason.STOP for request in requests)
        assert (preempted > 0) == (len(names) > 1)
        return {request.request_id: request.output_token_ids for request in requests}

    names = [str(i) for i in range(6)]
    together = run(20, *names)
    for name in names:
        assert run(20, name)[name] == together[name]
        assert is_instance(model.tokenizer.decode(together[name], skip_special_tokens=True))
