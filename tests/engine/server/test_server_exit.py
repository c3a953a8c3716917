"""A server whose engine has failed for good answers everybody and ends with a status that says so."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from live_server import parse_events, post, server_process, with_client

SERVER_PROGRAM = """
import threading
from slosched.engine.emulated import EmulatedExecutor
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.server import (
    ByteTokenizer, EngineWorker, ServerConfig, StepLimit, build_app, run, serve
)
from slosched.kv import KVCache
from slosched.perfmodel import LinearCoefficients, LinearModel
from slosched.policy import FCFS
from slosched.scheduler import Scheduler

def begins_with(requests, letter):
    return any(request.prompt_token_ids[0] == ord(letter) for request in requests)

class Device(EmulatedExecutor):
    def execute(self, batch):
        requests = [chunk.request for chunk in batch.chunks]
        if begins_with(requests, "F"):
            raise RuntimeError("the device fell off the bus")
        if begins_with(requests, "H"):
            threading.Event().wait()
        return super().execute(batch)

class Policy(FCFS):
    def schedule(self, view):
        if begins_with(view.waiting, "P"):
            raise KeyError("a bug of the policy")
        return super().schedule(view)

run._LAST_BYTES_S = 0.3
model = LinearModel(LinearCoefficients(0, 0, 0, 0, 0, 0, 0.005))
scheduler = Scheduler(Policy(), KVCache(64))
engine = Engine(scheduler, Device(model), MonotonicClock())
worker = EngineWorker(engine, max_consecutive_faults=3, step_limit=StepLimit())
app = build_app(worker, ByteTokenizer(), ServerConfig("m", 512))
serve(app, worker, port=0, drain_timeout_s=0.2, on_ready=lambda url: print(url, flush=True))
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process of a server, and its URL."""
    with server_process(SERVER_PROGRAM) as started:
        yield started


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("prompt", "num_asks", "why"),
    [("P", 1, "a bug of the policy"), ("F", 3, "3 steps failed one after the other")],
)
def test_an_engine_that_fails_for_good_ends_the_process(
    server: tuple[subprocess.Popen[str], str], prompt: str, num_asks: int, why: str
) -> None:
    process, url = server

    async def scenario(client: aiohttp.ClientSession) -> list[Any]:
        return [await post(client, prompt=prompt) for _ in range(num_asks)]

    for status, answer, _ in asyncio.run(with_client(url, scenario)):
        assert (status, answer["error"]["code"]) == (500, "engine_fault")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    last = err.splitlines()[-1]
    assert "the engine failed for good" in last
    assert why in last


@pytest.mark.e2e
def test_a_drain_ends_although_the_device_hangs(
    server: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = server

    async def scenario(client: aiohttp.ClientSession) -> tuple[list[Any], tuple[int, Any, Any]]:
        body = {"prompt": "abc", "max_tokens": 500, "stream": True}
        async with client.post("/v1/completions", json=body) as running:
            assert running.status == 200  # it has its first token
            hanging = asyncio.create_task(post(client, prompt="H"))
            await asyncio.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            return parse_events(await running.text()), await hanging

    events, (status, answer, _) = asyncio.run(with_client(url, scenario))
    assert events[-1]["error"]["code"] == "engine_fault"
    assert (status, answer["error"]["code"]) == (500, "engine_fault")
    assert "had not ended" in answer["error"]["message"]
    process.communicate(timeout=20)
    assert process.returncode == 1


@pytest.mark.e2e
def test_a_device_that_hangs_for_long_ends_the_process() -> None:
    soon = "StepLimit(2.0, warmup_timeout_s=2.0, give_up_after_s=0.1)"
    with server_process(SERVER_PROGRAM.replace("StepLimit()", soon)) as (process, url):

        async def scenario(client: aiohttp.ClientSession) -> tuple[list[Any], tuple[int, Any, Any]]:
            body = {"prompt": "abc", "max_tokens": 500, "stream": True}
            async with client.post("/v1/completions", json=body) as running:
                assert running.status == 200
                hanging = await post(client, prompt="H")
                return parse_events(await running.text()), hanging

        events, (status, answer, _) = asyncio.run(with_client(url, scenario))
        assert events[-1]["error"]["code"] == "engine_fault"
        assert (status, answer["error"]["code"]) == (500, "engine_fault")
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "a step was given up" in err.splitlines()[-1]


@pytest.mark.e2e
def test_the_garbage_collector_does_not_look_at_what_the_start_has_left() -> None:
    tell = "print(url, flush=True), print(len(gc.get_objects()), gc.get_freeze_count(), flush=True)"
    program = "import gc\n" + SERVER_PROGRAM.replace("print(url, flush=True)", f"({tell})")
    with server_process(program) as (process, _):
        assert process.stdout is not None
        num_looked_at, num_spared = map(int, process.stdout.readline().split())
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert num_spared > 10 * num_looked_at
