"""The cost of `slosched route`: processor time for each request, and requests per core-second.

    python benchmarks/gateway.py                              # answers of one token, not streamed
    python benchmarks/gateway.py --tokens 50 --stream         # streams of 50 events
    python benchmarks/gateway.py --prompt-bytes 8000 --router prefix_affine

The router is a process of its own, in front of two servers that answer at once, without an engine.
Clients keep some requests in flight.  What counts is the CPU time of the router's process, which it
tells itself (`process_cpu_seconds_total`), so that the figure hardly depends on what else runs.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import aiohttp
import typer
import uvicorn
from rich.console import Console
from starlette.types import Receive, Scope, Send

_NUM_WARMUP = 200
_EVENT = b'data: {"object": "text_completion", "choices": [{"index": 0, "text": " token"}]}\n\n'
_WHOLE = b'{"object": "text_completion", "choices": [{"index": 0, "text": " token"}]}'
_MODELS = b'{"object": "list", "data": [{"id": "echo", "max_model_len": 131072}]}'


class Replica:
    """A server that answers every generation at once, with `num_tokens` events if it streams."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/models":
            await _answer(send, _MODELS)
        elif scope["path"] == "/health":
            await _answer(send, b"{}")
        elif scope["method"] == "POST":
            await self._generate(receive, send)
        else:
            await _answer(send, b"{}", status=404)

    async def _generate(self, receive: Receive, send: Send) -> None:
        content = b""
        while True:
            message = await receive()
            content += message.get("body", b"")
            if not message.get("more_body"):
                break
        if b'"stream": true' not in content:
            await _answer(send, _WHOLE)
            return
        await _begin(send, b"text/event-stream", 200)
        for _ in range(self._num_tokens):
            await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
            await asyncio.sleep(0.001)  # so that events are not joined
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _begin(send: Send, kind: bytes, status: int) -> None:
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _answer(send: Send, body: bytes, status: int = 200) -> None:
    await _begin(send, b"application/json", status)
    await send({"type": "http.response.body", "body": body})


def _serve(num_tokens: int, port: int) -> None:
    uvicorn.run(Replica(num_tokens), port=port, log_level="error", lifespan="off")


async def load(url: str, body: bytes, num_requests: int, num_clients: int) -> float:
    """Send the requests; return the CPU seconds that the router took for them."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def client(number: int) -> None:
            for _ in range(number):
                async with session.post(f"{url}/v1/completions", data=body) as response:
                    await response.read()
                    assert response.status == 200, response.status

        async def play(number: int) -> None:
            await asyncio.gather(*(client(number // num_clients) for _ in range(num_clients)))

        async def cpu_s() -> float:
            async with session.get(f"{url}/metrics") as response:
                page = await response.text()
            found = re.search(r"^process_cpu_seconds_total (\S+)", page, re.MULTILINE)
            assert found is not None
            return float(found[1])

        await play(_NUM_WARMUP)
        before_s = await cpu_s()
        await play(num_requests)
        return await cpu_s() - before_s


def main(
    requests: Annotated[int, typer.Option("-n", help="Requests that are counted.")] = 4000,
    clients: Annotated[int, typer.Option(help="Requests in flight.")] = 32,
    router: Annotated[str, typer.Option(help="The router's spec.")] = "least_requests",
    prompt_bytes: Annotated[int, typer.Option(help="Length of each prompt.")] = 200,
    stream: Annotated[bool, typer.Option("--stream", help="Ask for streams.")] = False,
    tokens: Annotated[int, typer.Option(help="Events of each stream.")] = 50,
) -> None:
    """Print the router's CPU time for each request, and how many it routes in a CPU second."""
    if not 1 <= clients <= requests:
        raise typer.BadParameter(f"-n {requests} leaves some of the {clients} --clients without")
    ports = (18101, 18102)
    servers = [multiprocessing.Process(target=_serve, args=(tokens, port)) for port in ports]
    for server in servers:
        server.start()
    command = [sys.executable, "-m", "slosched", "route", "--port", "0", "--router", router]
    for port in ports:
        command += ["--url", f"http://127.0.0.1:{port}"]
    root = Path(__file__).parents[1]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        assert process.stdout is not None
        lines = (re.search(r"at (http://\S+) by", line) for line in process.stdout)
        url = next((found[1] for found in lines if found), None)
        if url is None:
            sys.exit(f"slosched route --router {router} has ended; it said above why")
        body = json.dumps({"prompt": "a" * prompt_bytes, "max_tokens": 1, "stream": stream})
        num = requests // clients * clients
        cpu_s = asyncio.run(load(url, body.encode(), num, clients))
    finally:
        process.terminate()
        for server in servers:
            server.terminate()
    shape = f"streams of {tokens} events" if stream else "whole answers"
    Console().print(
        f"{router}, {shape}, prompts of {prompt_bytes} bytes: {1e6 * cpu_s / num:.0f} µs of CPU "
        f"a request, {num / cpu_s:,.0f} requests in a CPU second"
    )


if __name__ == "__main__":
    typer.run(main)
