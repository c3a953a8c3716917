"""The endpoints for text: every request is answered once, or its client has gone away."""

from __future__ import annotations

import asyncio
import time

import aiohttp
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.types import Message, Receive, Scope, Send

from slosched.engine.server.bodies import check_work, read_content
from slosched.engine.server.errors import ApiError, not_serving
from slosched.engine.server.respond import last_events
from slosched.engine.server.slo import refuse_repeated
from slosched.gateway.asked import read
from slosched.gateway.config import GatewayConfig
from slosched.gateway.errors import took_too_long
from slosched.gateway.exchange import Exchange
from slosched.gateway.fleet import LiveFleet
from slosched.gateway.metrics import End, GatewayMetrics

_UNTOLD_MODEL_LEN = 131_072
"""The context that limits bodies while no replica has told its own."""


class Generate:
    """An ASGI application that answers requests for text with the help of a fleet."""

    def __init__(self, fleet: LiveFleet, metrics: GatewayMetrics, config: GatewayConfig) -> None:
        self._fleet, self._metrics, self._config = fleet, metrics, config
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s)
        self._exchange: Exchange | None = None
        self._running: set[asyncio.Task[object]] = set()
        self._drain_until_s: float | None = None
        self.num_cut_short = 0
        """Requests that the end of a drain cut short."""

    def open(self, session: aiohttp.ClientSession) -> None:
        """Use this session for requests to replicas."""
        self._exchange = Exchange(self._fleet, self._metrics, session, self._timeout)

    @property
    def why_not_serving(self) -> str | None:
        """Return why no new request is taken; None if requests are taken."""
        return None if self._drain_until_s is None else "the router is shutting down"

    @property
    def has_stopped(self) -> bool:
        """Tell whether a drain has begun and every request has ended."""
        return self._drain_until_s is not None and not self._running

    def begin_drain(self, timeout_s: float) -> None:
        """Take no new requests, and cut short those that are not finished after `timeout_s`.

        A second call may shorten the time; it has to be called again when the time is over.
        """
        now_s = time.monotonic()
        until_s = now_s + timeout_s
        if self._drain_until_s is None or until_s < self._drain_until_s:
            self._drain_until_s = until_s
        if now_s >= self._drain_until_s:
            self.num_cut_short += len(self._running)
            for task in self._running:
                task.cancel()
            self._running.clear()

    def give_up_hung_drain(self, grace_s: float) -> None:
        """Do nothing: there is no device here that could hang, and `begin_drain` ends the rest."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if (why := self.why_not_serving) is not None:
            raise not_serving(why, self._config.retry_after_s)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        answer = _Answer(send)
        end = End.FAILED
        watch: asyncio.Task[None] | None = None
        try:
            max_model_len = self._fleet.max_model_len or _UNTOLD_MODEL_LEN
            http = HTTPRequest(scope, receive)
            content = await read_content(http, max_model_len, self._config.body_timeout_s)
            await check_work(content, max_model_len)
            watch = asyncio.create_task(answer.cancel_if_gone(receive, task))
            end = await self._answer(scope, bytes(content), answer)
        except ApiError as error:
            # Only a refusal by the router itself is raised; that of a replica is passed on.
            end = End.SHED if error.status == 429 else End.of_status(error.status)
            raise
        except ClientDisconnect:  # before its whole body had come
            end = End.GONE
            raise
        except asyncio.CancelledError:
            if not answer.client_is_gone:
                end = End.CUT
                raise
            task.uncancel()
            end = End.GONE
        finally:
            if watch is not None:
                watch.cancel()
            self._running.discard(task)
            self._metrics.ended[end] += 1

    async def _answer(self, scope: Scope, content: bytes, answer: _Answer) -> End:
        """Read the request and exchange it for an answer; return how it ended."""
        assert self._exchange is not None
        headers = Headers(scope=scope)
        refuse_repeated(headers)
        asked = read(
            content,
            headers,
            self._fleet.promised_to,
            self._fleet.bytes_per_token,
            with_prefixes=self._fleet.uses_prefixes,
        )
        timeout_s = self._config.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange.answer(asked, content, scope, answer.send)
        except TimeoutError:
            assert timeout_s is not None
            error = took_too_long(timeout_s)
        if not answer.has_begun:
            raise error
        body = last_events(error)  # only streams begin before their end is known
        await answer.send({"type": "http.response.body", "body": body, "more_body": False})
        return End.FAILED


class _Answer:
    """What the client has been sent, and whether it is still there."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False
        self._is_complete = False
        self.client_is_gone = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
        else:
            self._is_complete = not message.get("more_body", False)
        await self._send(message)

    async def cancel_if_gone(self, receive: Receive, task: asyncio.Task[object]) -> None:
        """Cancel the task if the client goes away before its answer is complete."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._is_complete:  # servers also say so at the end of an answer
            self.client_is_gone = True
            task.cancel()
