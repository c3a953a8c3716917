"""A server under many kinds of clients at once, most of them bad: `make soak SECONDS=60 SEED=1`.

It starts `slosched serve`, plays the clients for a while, lets them go, and looks whether the server
is as it was: no error that is not deliberate, no request left, no KV block held, no file open, and
/health answered quickly beside everything.  It exits with status 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing import Process, Queue
from typing import Any
from urllib.parse import urlsplit

import aiohttp

_SERVE = "-m slosched serve --emulate h100/llama-3.1-8b --slo-ttft 2s --port 0 --no-log-requests"
_SETTLE_S = 15.0
"""How long connections may take to be gone: longer than the server waits for headers."""
_MAX_FILES_MORE = 8
_DELIBERATE = frozenset({200, 400, 404, 405, 408, 413, 429})
_SHED = "too_many_connections"


@dataclass
class Soak:
    """What the clients of one run share: the server, chance, and what they saw."""

    url: str
    rng: random.Random
    until_s: float
    answers: Counter[str] = field(default_factory=Counter)
    health_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until_s

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = urlsplit(self.url)
        return await asyncio.open_connection(address.hostname, address.port)

    def note(self, kind: str, status: int, text: str) -> None:
        """Count an answer; a status that no client can cause on purpose is a failure."""
        self.answers[f"{kind} {status}"] += 1
        if status not in _DELIBERATE and not (status == 503 and _SHED in text):
            self.failures.append(f"{kind}: status {status}: {text[:300]}")


Client = Callable[[Soak, aiohttp.ClientSession], Awaitable[None]]


async def steady(soak: Soak, client: aiohttp.ClientSession) -> None:
    """Ask for answers and check that they are whole."""
    num_tokens = soak.rng.randint(1, 40)
    prompt = "steady " * soak.rng.randint(1, 50)
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
    async with client.post("/v1/completions", json=body) as response:
        text = await response.text()
    soak.note("steady", response.status, text)
    if response.status == 200:
        found = json.loads(text)["usage"]["completion_tokens"]
        if found != num_tokens:
            soak.failures.append(f"steady: {found} tokens instead of {num_tokens}")


async def burst(soak: Soak, client: aiohttp.ClientSession) -> None:
    """Ask for a hundred answers at once, then for none for a while."""
    await asyncio.gather(*(steady(soak, client) for _ in range(100)))
    await asyncio.sleep(soak.rng.uniform(0.5, 3))


async def leaving(soak: Soak, _client: aiohttp.ClientSession) -> None:
    """Go away at any point of a request: in its headers, its body, its queue or its stream."""
    body = json.dumps({"prompt": "x" * 3000, "max_tokens": 200, "stream": True}).encode()
    request = _request(body)
    reader, writer = await soak.connect()
    writer.write(request[: soak.rng.choice((20, 100, len(request) - 1000, len(request)))])
    await writer.drain()
    if soak.rng.random() < 0.5:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(soak.rng.randint(1, 5000)), 1)
    writer.transport.abort() if soak.rng.random() < 0.5 else writer.close()
    soak.answers["leaving"] += 1


async def slow(soak: Soak, _client: aiohttp.ClientSession) -> None:
    """Send a request byte by byte, or leave a long stream unread."""
    reader, writer = await soak.connect()
    body = json.dumps({"prompt": "slow", "max_tokens": 2000, "stream": True}).encode()
    request = _request(body)
    if soak.rng.random() < 0.5:
        writer.write(request)
        await asyncio.sleep(soak.rng.uniform(0, 4))
    else:
        for i in range(soak.rng.randint(1, 40)):
            writer.write(request[i : i + 1])
            await asyncio.sleep(0.05)
    soak.answers["slow"] += 1
    del reader
    writer.close()


async def silent(soak: Soak, _client: aiohttp.ClientSession) -> None:
    """Hold a connection for a while and say nothing."""
    _, writer = await soak.connect()
    await asyncio.sleep(soak.rng.uniform(0, 5))
    soak.answers["silent"] += 1
    writer.close()


_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 1e39, -1e39, 10**400, 0.5, "", "x", "x" * 5000, "\ud800",
    [], [1], ["a"], [[1]], [0] * 3000, {}, {"a": 1}, list(range(256)), "a" * 512, ["a" * 512] * 16,
)  # fmt: skip
_FIELDS = [
    "prompt",
    "messages",
    "model",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "allowed_token_ids",
    "bad_words",
    "stream",
    "stream_options",
    "priority",
    "cache_salt",
    "n",
    "logprobs",
    "echo",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "return_token_ids",
    "tools",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "chat_template_kwargs",
    "continue_final_message",
    "slo_ttft_ms",
    "slo_tpot_ms",
    "slo_e2e_ms",
    "slo_best_effort",
    "made_up",
]


async def fuzzing(soak: Soak, client: aiohttp.ClientSession) -> None:
    """Send a body with some fields of any kind, half of the time beside a good prompt."""
    rng = soak.rng
    body = {name: rng.choice(_VALUES) for name in rng.sample(_FIELDS, rng.randint(0, 5))}
    if rng.random() < 0.5:
        body |= {"prompt": "fuzz", "max_tokens": rng.randint(1, 9)}
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"))
    if path == "/v1/chat/completions" and rng.random() < 0.5:
        body["messages"] = [{"role": "user", "content": rng.choice(_VALUES)}]
    if body.get("max_tokens") is None and path.startswith("/v1"):
        body["max_tokens"] = 9  # a chat without a limit may fill the context, which takes long
    data = json.dumps(body).encode()
    if rng.random() < 0.1:
        data = data[: rng.randint(0, len(data))]
    async with client.post(path, data=data) as response:
        soak.note("fuzzing", response.status, await response.text())


async def long_prompts(soak: Soak, client: aiohttp.ClientSession) -> None:
    """Send a prompt of a megabyte."""
    body = {"prompt": "long " * 200_000, "max_tokens": 1}
    async with client.post("/v1/completions", json=body) as response:
        soak.note("long", response.status, await response.text())
    await asyncio.sleep(0.5)


def watch(url: str, seconds: float, waits_s: Queue[list[float]]) -> None:
    """Measure how long /health takes, in a process of its own, which no other client holds up."""
    address, found_s = urlsplit(url), []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        started_s = time.monotonic()
        connection = http.client.HTTPConnection(address.netloc, timeout=60)
        connection.request("GET", "/health")
        status = connection.getresponse().status
        connection.close()
        found_s.append(time.monotonic() - started_s if status == 200 else math.inf)
        time.sleep(0.02)
    waits_s.put(found_s)


CLIENTS: dict[Client, int] = {
    steady: 20,
    burst: 1,
    leaving: 20,
    slow: 20,
    silent: 300,
    fuzzing: 10,
    long_prompts: 1,
}
"""The kinds of clients, and how many there are of each at any time."""


async def again(soak: Soak, client: Client) -> None:
    """Play a client again and again; what the server does to its connection is no failure."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(soak.url, timeout=timeout) as session:
        while soak.goes_on:
            try:
                await client(soak, session)
            except (aiohttp.ClientConnectionError, ConnectionError):
                soak.answers[f"{client.__name__} cut off"] += 1
            except TimeoutError:
                soak.failures.append(f"{client.__name__}: no answer within 60 s")


def _request(body: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


@dataclass(frozen=True)
class Held:
    """What a server holds on to."""

    requests: float
    kv_fraction: float
    files: float
    memory_mib: float


async def held(url: str) -> Held:
    async with aiohttp.ClientSession(url) as client, client.get("/metrics") as response:
        page = await response.text()

    def of(name: str) -> float:
        return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)))

    return Held(
        of("vllm:num_requests_running") + of("vllm:num_requests_waiting"),
        of("vllm:kv_cache_usage_perc"),
        of("process_open_fds"),
        of("process_resident_memory_bytes") / 2**20,
    )


async def play(url: str, seconds: float, seed: int) -> Soak:
    """Play all clients, let the server settle, and return what they saw."""
    before = await held(url)
    soak = Soak(url, random.Random(seed), time.monotonic() + seconds)
    waits_s: Queue[list[float]] = Queue()
    watcher = Process(target=watch, args=(url, seconds, waits_s))
    watcher.start()
    clients = [again(soak, client) for client, number in CLIENTS.items() for _ in range(number)]
    await asyncio.gather(*clients)
    soak.health_s = waits_s.get()
    watcher.join()
    settled_s = time.monotonic() + _SETTLE_S
    while (after := await held(url)) and time.monotonic() < settled_s:
        if not after.requests and after.files <= before.files + _MAX_FILES_MORE:
            break
        await asyncio.sleep(0.5)
    say(f"before: {before}\nafter:  {after}")
    if after.requests or after.kv_fraction:
        soak.failures.append(f"requests or KV blocks are left: {after}")
    if after.files > before.files + _MAX_FILES_MORE:
        soak.failures.append(f"{after.files - before.files:g} more files are open than before")
    return soak


def report(soak: Soak, health_limit_s: float) -> None:
    for kind, number in sorted(soak.answers.items()):
        say(f"{kind:24} {number:8}")
    waits_s = sorted(soak.health_s) or [0.0]
    p99_s = waits_s[int(0.99 * (len(waits_s) - 1))]
    say(f"/health: median {1000 * waits_s[len(waits_s) // 2]:.1f} ms, "
          f"p99 {1000 * p99_s:.1f} ms, longest {1000 * waits_s[-1]:.1f} ms "
          f"(limit for p99: {1000 * health_limit_s:g} ms)")  # fmt: skip
    if p99_s > health_limit_s:
        soak.failures.append(f"/health took {1000 * p99_s:.0f} ms at p99")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--health-ms", type=float, default=100, help="limit of /health at p99, on an idle machine"
    )
    parser.add_argument("--serve", default=_SERVE, help="the server: arguments of Python")
    options = parser.parse_args()
    command = [sys.executable, *shlex.split(options.serve)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as server:
        assert server.stdout is not None
        url = next(found[0] for line in server.stdout if (found := re.findall(r"http\S+", line)))
        try:
            soak = asyncio.run(play(url, options.seconds, options.seed))
        finally:
            server.send_signal(signal.SIGTERM)
        status = server.wait(60)
    report(soak, options.health_ms / 1000)
    if status:
        soak.failures.append(f"the server ended with status {status}")
    for failure, number in Counter(soak.failures).most_common(20):
        say(f"FAILED ({number} times): {failure}")
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
