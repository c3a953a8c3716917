"""A real server on a loopback port, with a device whose faults and pauses the test controls."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from factories import make_model

from slosched.core import (
    NO_SLO,
    SLO,
    Clock,
    LatencyModel,
    Limits,
    OnInfeasible,
    Policy,
    ScheduledBatch,
    StepResult,
)
from slosched.engine.background import InBackground
from slosched.engine.emulated import EmulatedExecutor
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.overlap import OverlappedEngine
from slosched.engine.server import (
    ByteTokenizer,
    EngineWorker,
    Reporter,
    ServerConfig,
    TLSFiles,
    Tokenizer,
    build_app,
)
from slosched.engine.server.clients import ConnectionLimits
from slosched.engine.server.run import serve_in_thread
from slosched.kv import Eviction, Known, KVCache, PrefixCaching
from slosched.policy import FCFS
from slosched.scheduler import Scheduler, Speculation
from slosched.workload.service_tier import ServiceTier

MODEL = "echo"
FAST = make_model(0, 0, 0, 0, 0, 0, constant_s=1e-4)
T = TypeVar("T")


class Device(EmulatedExecutor):
    """A device that echoes prompts. Steps wait until `gate` is open, and fail while `fault` is set."""

    def __init__(self, model: LatencyModel = FAST) -> None:
        super().__init__(model)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        """Set when a step begins."""
        self.fault: BaseException | None = None
        self.release_fault: Exception | None = None
        self.released: queue.Queue[str] = queue.Queue()
        """Requests that have ended, in order; their KV blocks are already free."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.entered.set()
        assert self.gate.wait(30)
        if self.fault is not None:
            raise self.fault
        return super().execute(batch)

    def release(self, request_id: str) -> None:
        if self.release_fault is not None:
            raise self.release_fault
        self.released.put(request_id)


@dataclass
class Live:
    url: str
    worker: EngineWorker
    device: Device

    @property
    def num_held_blocks(self) -> int:
        kv = self.worker.scheduler.kv
        kv.check()
        return kv.num_blocks - kv.num_free_blocks

    def post(self, path: str = "/v1/completions", /, **body: Any) -> tuple[int, Any, Any]:
        """Return the status, document and headers of one request, sent by a new client."""
        return asyncio.run(with_client(self.url, lambda client: post(client, path, **body)))

    def post_with(self, headers: Mapping[str, str], /, **body: Any) -> tuple[int, Any]:
        """Return the status and the document of a completion that is asked for with headers."""

        async def send(client: aiohttp.ClientSession) -> tuple[int, Any]:
            url = "/v1/completions"
            async with client.post(url, json=body, headers=dict(headers)) as response:
                return response.status, await response.json()

        return asyncio.run(with_client(self.url, send))

    def get(self, path: str) -> tuple[int, str]:
        async def fetch(client: aiohttp.ClientSession) -> tuple[int, str]:
            async with client.get(path) as response:
                return response.status, await response.text()

        return asyncio.run(with_client(self.url, fetch))

    def events(self, path: str = "/v1/completions", /, **body: Any) -> list[Any]:
        """Return the events of one stream, without the [DONE] at its end."""
        return asyncio.run(with_client(self.url, lambda client: stream(client, path, **body)))


@contextmanager
def live(
    policy: Policy | None = None,
    *,
    num_blocks: int = 256,
    max_model_len: int = 512,
    limits: Limits | None = None,
    default_slo: SLO = NO_SLO,
    drain_timeout_s: float = 5.0,
    max_consecutive_faults: int = 10,
    overlap: bool = False,
    clock: Clock | None = None,
    model: LatencyModel | None = FAST,
    per_request_s: float = 0.0,
    tokenizer: Tokenizer | None = None,
    connections: ConnectionLimits | None = None,
    body_timeout_s: float = 60.0,
    api_keys: tuple[str, ...] = (),
    admin_api_key: str | None = None,
    prefix_cache: PrefixCaching = PrefixCaching.OFF,
    eviction: Eviction = Eviction.LRU,
    device_model: LatencyModel = FAST,
    tiers: tuple[ServiceTier, ...] = (),
    tenants: Mapping[str, str] | None = None,
    on_infeasible: OnInfeasible = OnInfeasible.REJECT,
    speculation: Speculation | None = None,
    tls: TLSFiles | None = None,
    reporters: Sequence[Reporter] = (),
    port: int = 0,
    **settings: Any,
) -> Iterator[Live]:
    """Yield a server; `settings` are further fields of `ServerConfig`."""
    index = prefix_cache.new_index(eviction, Known(num_blocks, 4, device_model))
    kv = KVCache(num_blocks, block_size=4, prefix_index=index)
    scheduler = Scheduler(policy or FCFS(), kv, limits or Limits(), model, speculation)
    device = Device(device_model)
    clock = clock or MonotonicClock()
    engine = Engine(scheduler, device, clock)
    if overlap:
        engine = OverlappedEngine(scheduler, InBackground(device), clock)
    worker = EngineWorker(engine, max_consecutive_faults=max_consecutive_faults)
    config = ServerConfig(
        MODEL,
        max_model_len,
        default_slo,
        per_request_s=per_request_s,
        body_timeout_s=body_timeout_s,
        api_keys=api_keys,
        admin_api_key=admin_api_key,
        tiers={tier.name: tier for tier in tiers},
        tenants=tenants or {},
        on_infeasible=on_infeasible,
        **settings,
    )
    app = build_app(worker, tokenizer or ByteTokenizer(), config, reporters=reporters)
    with serve_in_thread(
        app,
        worker,
        port=port,
        drain_timeout_s=drain_timeout_s,
        limits=connections or ConnectionLimits(),
        tls=tls,
    ) as url:
        try:
            yield Live(url, worker, device)
        finally:
            device.gate.set()
    assert worker.has_stopped
    kv.check()
    assert kv.num_free_blocks == kv.num_blocks


@contextmanager
def server_process(program: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a process that runs a server's `program`, and the URL that it prints first."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


async def with_client(url: str, use: Callable[[aiohttp.ClientSession], Awaitable[T]]) -> T:
    timeout = aiohttp.ClientTimeout(total=30)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as client:
        return await use(client)


async def post(
    client: aiohttp.ClientSession, path: str = "/v1/completions", /, **body: Any
) -> tuple[int, Any, Any]:
    headers = body.pop("headers", {})
    async with client.post(path, json=body, headers=headers) as response:
        return response.status, await response.json(), response.headers


def post_together(url: str, *bodies: dict[str, Any]) -> list[tuple[int, Any, Any]]:
    """Post all bodies at once, and return the status, JSON and headers of each answer."""

    async def ask(client: aiohttp.ClientSession) -> list[tuple[int, Any, Any]]:
        return await asyncio.gather(*[post(client, **body) for body in bodies])

    return asyncio.run(with_client(url, ask))


async def stream(
    client: aiohttp.ClientSession, path: str = "/v1/completions", /, **body: Any
) -> list[Any]:
    async with client.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return parse_events(await response.text())


def parse_events(text: str) -> list[Any]:
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]
