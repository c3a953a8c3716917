"""The operator's endpoints: who may use them, and what they do while requests run."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from factories import make_model
from live_server import Live, live, parse_events, post, with_client

from slosched.core import EndReason
from slosched.engine.server.throughput_log import ThroughputLog
from slosched.kv import PrefixCaching

KEY = "operator"
ADMIN = {"authorization": f"Bearer {KEY}"}
PATHS = (
    "/abort",
    "/reset_prefix_cache",
    "/update_weights_from_disk",
    "/start_profile",
    "/stop_profile",
)
SLOW = make_model(0, 0, 0, 0, 0, 0, constant_s=2e-3)


def operate(server: Live, path: str, /, **body: Any) -> tuple[int, Any]:
    status, document, _ = server.post(path, headers=ADMIN, **body)
    return status, document


def test_without_a_key_of_the_operator_there_are_no_such_endpoints() -> None:
    with live() as server:
        assert [server.post(path)[0] for path in PATHS] == [404] * len(PATHS)


def test_other_keys_are_not_the_operators_and_the_operators_opens_the_rest() -> None:
    client = {"authorization": "Bearer client"}
    with live(api_keys=("client",), admin_api_key=KEY) as server:
        assert [server.post(path)[0] for path in PATHS] == [401] * len(PATHS)
        for path in PATHS:
            status, answer, _ = server.post(path, headers=client)
            assert (status, "--admin-api-key" in answer["error"]["message"]) == (401, True)
        assert server.post(headers=client, prompt="x", max_tokens=1)[0] == 200
        assert server.post("/abort", headers=ADMIN, abort_all=True)[0] == 200


def test_a_model_that_is_only_emulated_has_no_weights_and_no_profile() -> None:
    with live(admin_api_key=KEY) as server:
        assert operate(server, "/update_weights_from_disk", model_path="/x")[0] == 501
        assert operate(server, "/start_profile")[0] == 501


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_by_id_ends_that_request_alone(overlap: bool) -> None:
    async def use(client: aiohttp.ClientSession) -> tuple[Any, Any, Any]:
        body = {"prompt": "abc", "max_tokens": 400, "stream": True, "n": 2}
        other = asyncio.create_task(post(client, prompt="abc", max_tokens=400))
        async with client.post("/v1/completions", json=body) as response:
            first = await response.content.readline()
            name = json.loads(first.removeprefix(b"data: "))["id"]
            aborted = await post(client, "/abort", headers=ADMIN, request_ids=[name])
            events = (await response.text()).split("data: ")
        return aborted, events, await other

    with live(overlap=overlap, device_model=SLOW, admin_api_key=KEY) as server:
        aborted, events, other = asyncio.run(with_client(server.url, use))
        assert aborted[1]["success"]
        assert len(aborted[1]["aborted"]) == 2
        assert "the operator aborted" in events[-2]
        assert events[-1].strip() == "[DONE]"
        assert len(other[1]["choices"][0]["text"]) == 400
        assert server.num_held_blocks == 0
        ends = sorted(str(record.end_reason) for record in server.worker.records)
        assert ends == sorted([EndReason.CLIENT.value, EndReason.LENGTH.value])


def test_an_abort_says_which_requests_or_all() -> None:
    with live(admin_api_key=KEY) as server:
        assert operate(server, "/abort")[0] == 400
        assert operate(server, "/abort", abort_all=True, request_ids=["x"])[0] == 400
        assert operate(server, "/abort", request_ids=["nobody"]) == (
            200,
            {"success": True, "aborted": []},
        )


@pytest.mark.parametrize("kind", [PrefixCaching.HASH, PrefixCaching.RADIX])
def test_a_reset_prefix_cache_finds_nothing(kind: PrefixCaching) -> None:
    def num_cached(server: Live) -> int:
        server.post(prompt="a prompt of some blocks", max_tokens=2)
        return server.worker.records[-1].num_cached_tokens

    with live(prefix_cache=kind, admin_api_key=KEY) as server:
        assert num_cached(server) == 0
        assert num_cached(server) > 0
        assert operate(server, "/reset_prefix_cache") == (
            200,
            {"success": True, "num_held_blocks": 0},
        )
        assert num_cached(server) == 0
        assert operate(server, "/reset_prefix_cache?reset_running_requests=maybe")[0] == 400


@pytest.mark.parametrize("overlap", [False, True])
def test_a_reset_while_requests_run_loses_nothing(overlap: bool) -> None:
    async def use(client: aiohttp.ClientSession) -> tuple[Any, Any, Any]:
        body = {"prompt": "some blocks ", "max_tokens": 200, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            await response.content.readline()
            held = await post(client, "/reset_prefix_cache", headers=ADMIN)
            path = "/reset_prefix_cache?reset_running_requests=true"
            none = await post(client, path, headers=ADMIN)
            rest = (await response.text()).removeprefix("\n")
            return held[1], none[1], parse_events(rest)

    with live(
        overlap=overlap, device_model=SLOW, admin_api_key=KEY, prefix_cache=PrefixCaching.HASH
    ) as server:
        held, none, events = asyncio.run(with_client(server.url, use))
        assert not held["success"]
        assert held["num_held_blocks"] > 0
        assert none == {"success": True, "num_held_blocks": 0}
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text == ("some blocks " * 20)[1:200]
        [record] = server.worker.records
        assert record.num_output_tokens == 200
        assert record.num_preemptions == 1


def test_the_load_is_what_has_not_ended_and_needs_no_key() -> None:
    with live(api_keys=("client",)) as server:
        status, text = server.get("/load")
        assert (status, json.loads(text)["server_load"]) == (200, 0)


@dataclass
class SetClock:
    time_s: float = 0.0

    def now_s(self) -> float:
        return self.time_s


def test_a_log_line_has_the_rates_since_the_last_and_an_idle_server_none() -> None:
    clock = SetClock()
    with live(clock=clock) as server:
        throughput = ThroughputLog(server.worker)
        server.post(prompt="abcd", max_tokens=5)
        clock.time_s = 10.0
        assert throughput.line() == (
            "prefill: 0.4 tokens/s, decode: 0.5 tokens/s, running: 0, waiting: 0, swapped: 0, "
            "KV cache usage: 0.0%"
        )
        clock.time_s = 20.0
        assert throughput.line() is None
