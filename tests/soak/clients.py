"""The clients of a crowd, good and bad."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from soak.faulty import FAULT
from soak.fuzzer import Fuzzer, Sent
from soak.wire import Answer, Wire, request_bytes

DELIBERATE = frozenset({200, 400, 404, 405, 408, 413, 422, 429})
"""Statuses that a client can cause."""
_SHED = "too_many_connections"
_ANSWER_S = 120.0
_BURST = 100


@dataclass
class Crowd:
    """What all clients of a run share: the server, chance, and what they saw."""

    url: str
    rng: random.Random
    until_s: float
    fuzzer: Fuzzer
    heavy: list[Sent]
    answers: Counter[str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)
    """What no client should have seen."""

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until_s

    async def ask(self, kind: str, sent: Sent) -> Answer:
        """Send a request over a connection of its own, note its answer, and return it."""
        wire = await Wire.connect(self.url)
        try:
            answer = await wire.ask(sent)
        finally:
            wire.close()
        self.answers[f"{kind} {answer.status}"] += 1
        is_shed = answer.status == 503 and _SHED in answer.text
        is_fault = answer.status == 500 and FAULT in answer.text
        if not (answer.status in DELIBERATE or is_shed or is_fault):
            self.odd.append(f"{kind}: {answer.status} {answer.text[:300]}")
        return answer


Client = Callable[[Crowd], Awaitable[None]]


async def steady(crowd: Crowd) -> None:
    """Ask for an answer, and check that it is whole."""
    num_tokens, is_stream = crowd.rng.randint(1, 40), crowd.rng.random() < 0.5
    body = {"prompt": "steady " * crowd.rng.randint(1, 50), "max_tokens": num_tokens}
    options = {"stream": is_stream, "return_token_ids": True}
    answer = await crowd.ask("steady", _completion(body | options))
    if answer.status != 200 or FAULT in answer.text:
        return
    found = _num_tokens(answer.text) if is_stream else json.loads(answer.text)["usage"]
    found = found if is_stream else found["completion_tokens"]
    if found != num_tokens:
        crowd.odd.append(f"steady: {found} tokens instead of {num_tokens}")


async def burst(crowd: Crowd) -> None:
    """Ask for a hundred answers at once, then for none for a while."""
    await asyncio.gather(*(steady(crowd) for _ in range(_BURST)), return_exceptions=True)
    await asyncio.sleep(crowd.rng.uniform(0.5, 3))


async def leaving(crowd: Crowd) -> None:
    """Go away at any point of a request: in its headers, its body, its queue or its stream."""
    sent = _completion({"prompt": "x" * 3000, "max_tokens": 200, "stream": True})
    request = request_bytes(sent)
    wire = await Wire.connect(crowd.url)
    wire.writer.write(request[: crowd.rng.choice((20, 100, len(request) - 1000, len(request)))])
    await wire.writer.drain()
    if crowd.rng.random() < 0.5:
        try:
            await asyncio.wait_for(wire.reader.read(crowd.rng.randint(1, 5000)), 1)
        except TimeoutError:
            crowd.answers["leaving before the first byte"] += 1
    wire.reset() if crowd.rng.random() < 0.5 else wire.close()
    crowd.answers["leaving"] += 1


async def slow_writer(crowd: Crowd) -> None:
    """Send a request byte by byte."""
    request = request_bytes(_completion({"prompt": "slow", "max_tokens": 1}))
    wire = await Wire.connect(crowd.url)
    for i in range(crowd.rng.randint(1, 60)):
        wire.writer.write(request[i : i + 1])
        await asyncio.sleep(0.05)
    wire.close()
    crowd.answers["slow writer"] += 1


async def slow_reader(crowd: Crowd) -> None:
    """Leave a long stream unread for a while."""
    wire = await Wire.connect(crowd.url)
    wire.writer.write(
        request_bytes(_completion({"prompt": "slow", "max_tokens": 2000, "stream": True}))
    )
    await asyncio.sleep(crowd.rng.uniform(0, 4))
    wire.close()
    crowd.answers["slow reader"] += 1


async def silent(crowd: Crowd) -> None:
    """Hold a connection and say nothing, about as long as the server lets one do that."""
    await asyncio.sleep(crowd.rng.uniform(0, 2))
    wire = await Wire.connect(crowd.url)
    try:
        answer = await asyncio.wait_for(wire.answer(), crowd.rng.uniform(8, 12))
    except TimeoutError:
        crowd.answers["silent"] += 1
    else:
        crowd.answers[f"silent {answer.status}"] += 1
    finally:
        wire.close()


async def fuzzing(crowd: Crowd) -> None:
    await crowd.ask("fuzzing", crowd.fuzzer.next())


async def heaving(crowd: Crowd) -> None:
    """Send a body as large as the server takes."""
    await crowd.ask("heavy", crowd.rng.choice(crowd.heavy))
    await asyncio.sleep(0.2)


CLIENTS: dict[Client, int] = {
    steady: 20,
    burst: 1,
    leaving: 20,
    slow_writer: 30,
    slow_reader: 20,
    silent: 2500,
    fuzzing: 10,
    heaving: 1,
}
"""The kinds of clients, and how many there are of each at any time."""


async def again(crowd: Crowd, client: Client) -> None:
    """Play a client again and again; that the server ends a bad client's connection is no fault."""
    while crowd.goes_on:
        try:
            await asyncio.wait_for(client(crowd), _ANSWER_S)
        except (EOFError, ConnectionError):
            crowd.answers[f"{client.__name__} cut off"] += 1
            if client is steady:
                crowd.odd.append("steady: the connection ended before the answer")
        except TimeoutError:
            crowd.odd.append(f"{client.__name__}: no answer within {_ANSWER_S:g} s")


def _completion(body: dict[str, object]) -> Sent:
    return Sent("/v1/completions", json.dumps({"ignore_eos": True, **body}).encode())


def _num_tokens(events: str) -> int:
    lines = [line.removeprefix("data: ") for line in events.splitlines() if line]
    choices = [json.loads(line)["choices"] for line in lines if line != "[DONE]"]
    return sum(len(choice["token_ids"]) for (choice,) in choices)
