"""HTTP connections with limits, so that no client keeps the server from serving others."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import sys
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from slosched.engine.server.clients import (
    MOST_CONNECTIONS,
    Clients,
    no_request,
    on_the_wire,
    too_many,
)
from slosched.engine.server.errors import ApiError, headers_too_large
from slosched.engine.server.joined_writes import JoinedWrites

_MOST_DESCRIPTORS = 65_536
"""As many descriptors the process asks the system for."""
_SPARE_DESCRIPTORS = 64
"""Descriptors for files, and for connections that are accepted before others are closed."""
_PROBES_AFTER_S = (0.05, 1.0)
"""When to look for the first time, and then again and again, whether a client is still there."""
_MOST_HEADER_BYTES = 2**16
"""Of a request's line and headers together; uvicorn's own limit for h11."""
_TWO_LENGTHS = ApiError(
    400,
    "the request has both Content-Length and Transfer-Encoding; send one of the two",
    closes=True,
)
_WHOLE_URL = re.compile(rb"https?://(?P<host>[^/]+)(?P<path>/.*)?", re.IGNORECASE)
"""The target of a request in absolute form, without its query."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def raise_descriptor_limit() -> int:
    """Raise the process's soft limit of open files; return how many connections fit below it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, soft - _num_open_files() - _SPARE_DESCRIPTORS))


def _num_open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return _SPARE_DESCRIPTORS


class Connection(H11Protocol):
    """A connection with limits.

    A client that does not send its headers in time gets a 408.  One that does not read its answer
    is cut off.  One that closes its own side still gets its answer.  What is not HTTP gets a 400 in
    OpenAI's format.  When there are too many connections, the one that has waited longest for a
    request is closed with a 503; if all have requests, a new request gets the 503.
    """

    def __init__(self, *args: Any, clients: Clients, **options: Any) -> None:
        super().__init__(*args, **options)
        self.app = _OriginForm(_OneLength(self.app))
        self._clients = clients
        clients.connected = self.connections
        self._headers_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._has_heard_end = False
        """Whether the client has closed its own side."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        joined = JoinedWrites(transport, self.loop, self._clients.look)
        super().connection_made(cast("asyncio.Transport", joined))
        if not self._clients.make_room(0):
            self.app = _answer_too_many
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_timers()

    def data_received(self, data: bytes) -> None:
        self._clients.look()
        super().data_received(data)
        self._watch_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # it begins the next request if that has come
        if self._has_heard_end:
            self._answer_the_rest()
        self._watch_headers()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep our side open, since an answer is still to come."""
        self._has_heard_end = True
        return self._answer_the_rest()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(
            self._clients.limits.write_timeout_s, self.transport.abort
        )

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or has too long headers; uvicorn calls this for h11's errors."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError):
            if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
                self.answer_and_close(headers_too_large(_MOST_HEADER_BYTES))
                return
            msg = str(error).partition(": bytearray(")[0]  # without up to 64 KiB of the client's
        self.answer_and_close(ApiError(400, f"the request is not HTTP: {msg}"))

    def answer_and_close(self, error: ApiError) -> None:
        """Answer with an error, unless another answer has begun, and close the connection."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(on_the_wire(error, self.conn))
        self._forget_timers()
        self.transport.close()

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _answer_the_rest(self) -> bool:
        """Close the connection of a client that sends no more once all that it sent is answered.

        Returns whether an answer is still to come.
        """
        if not self._is_waited_for:
            self.transport.close()  # asyncio would drop the answer that was written in this turn
            return False
        self.cycle.keep_alive = bool(self.conn.trailing_data[0])  # of the next request
        self._probe(*_PROBES_AFTER_S)
        return True

    @property
    def _is_waited_for(self) -> bool:
        """Tell whether a client that has closed its own side may still wait for an answer."""
        if self.transport.get_extra_info("ssl_object") is not None:
            return False  # TLS cannot close one side alone
        cycle = self.cycle
        return self._has_request and not cycle.more_body and cycle.scope["http_version"] == "1.1"

    def _watch_headers(self) -> None:
        """Limit the time until a request's headers have come, from the end of the one before it."""
        if self._has_request or self.transport.is_closing():
            self._forget_headers_timer()
        elif self._headers_timer is None:
            self._clients.idle[self] = None
            after_s = self._clients.limits.headers_timeout_s
            late = no_request(after_s)
            self._headers_timer = self.loop.call_later(after_s, self.answer_and_close, late)

    def _forget_headers_timer(self) -> None:
        self._clients.idle.pop(self, None)
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _forget_timers(self) -> None:
        self._forget_headers_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _probe(self, after_s: float, then_after_s: float) -> None:
        """Find out, until the answer begins, whether a client that sends nothing more is there.

        A client that is gone resets the connection when it is sent something.  One that has only
        closed its own side waits for the final answer after any number of 100s.
        """
        if self._has_request and not self.cycle.response_started:
            if not self.transport.is_closing():
                self.transport.write(_CONTINUE)
            self.loop.call_later(after_s, self._probe, then_after_s, then_after_s)


class _OneLength:
    """Middleware that refuses a body of two lengths, and closes the connection.

    Where a proxy goes by the other length, what it takes for the body of one client's request would
    be read as the next request, maybe another client's (RFC 9112, section 6.1).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]}
        if names >= {b"content-length", b"transfer-encoding"}:
            await _TWO_LENGTHS.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _OriginForm:
    """Middleware that takes a whole URL as the target of a request, as a proxy is sent it.

    Servers have to accept it, and to go by its host instead of the header (RFC 9112, section
    3.2.2).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if found := _WHOLE_URL.fullmatch(scope["raw_path"]):
            host, raw_path = found["host"], found["path"] or b"/"
            others = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope = {
                **scope,
                "path": unquote(raw_path.decode("ascii")),
                "raw_path": raw_path,
                "headers": [(b"host", host), *others],
            }
        await self._app(scope, receive, send)


async def _answer_too_many(scope: Scope, receive: Receive, send: Send) -> None:
    error = too_many()
    error.closes = True
    await error.response()(scope, receive, send)
