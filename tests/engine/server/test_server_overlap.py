"""A server that plans a step while one runs gives the same answers, and loses no request."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
from live_server import Live, live, parse_events, post, stream, with_client

from slosched.core import EndReason


def reasons(server: Live) -> list[EndReason | None]:
    return [record.end_reason for record in server.worker.records]


def test_a_hundred_clients_get_their_own_text_and_no_token_more() -> None:
    """A stop token ends half of the requests while their next token is already being computed."""

    async def many(client: aiohttp.ClientSession) -> list[Any]:
        asks = [
            stream(client, prompt=f"client {i}: ", max_tokens=20)
            if i % 2
            else post(client, prompt=f"client {i}: ", max_tokens=20, stop_token_ids=[ord(":")])
            for i in range(100)
        ]
        return list(await asyncio.gather(*asks))

    with live(num_blocks=128, overlap=True) as server:  # fewer blocks than all requests need
        answers = asyncio.run(with_client(server.url, many))
        for i, answer in enumerate(answers):
            if i % 2:
                text = "".join(event["choices"][0]["text"] for event in answer)
                assert text == (f"client {i}: " * 3)[:20]
            else:
                assert answer[1]["choices"][0]["text"].rstrip(":") == f"client {i}"
        assert sorted(reasons(server)) == [EndReason.LENGTH] * 50 + [EndReason.STOP] * 50
        assert server.num_held_blocks == 0


def test_a_client_that_goes_away_in_mid_stream_frees_its_blocks() -> None:
    async def leave(client: aiohttp.ClientSession) -> None:
        body = {"prompt": "abc", "max_tokens": 500, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            await response.content.readchunk()
            server.device.gate.clear()

    with live(overlap=True) as server:
        asyncio.run(with_client(server.url, leave))
        server.device.gate.set()
        while not reasons(server):
            time.sleep(0.01)
        assert server.post(prompt="x", max_tokens=3)[0] == 200
        assert reasons(server) == [EndReason.CLIENT, EndReason.LENGTH]
        assert server.num_held_blocks == 0


def test_one_trouble_of_the_device_fails_two_steps_and_counts_once() -> None:
    async def scenario(client: aiohttp.ClientSession) -> str:
        body = {"prompt": "abc", "max_tokens": 400, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            text = (await response.content.readchunk())[0].decode()
            server.device.fault = RuntimeError("the device fell off the bus")
            return text + await response.text()

    with live(max_consecutive_faults=2, overlap=True) as server:
        text = asyncio.run(with_client(server.url, scenario))
        assert "the device fell off the bus" in parse_events(text)[-1]["error"]["message"]
        server.device.fault = None
        assert server.get("/health")[0] == 200
        assert server.post(prompt="ok", max_tokens=2)[1]["choices"][0]["text"] == "ok"
        assert reasons(server) == [EndReason.FAULT, EndReason.LENGTH]
        assert server.num_held_blocks == 0
