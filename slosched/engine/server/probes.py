"""Probes of liveness, answered in the turn of the event loop in which they are heard.

A request that goes the usual way, through a transport, a protocol and a task, waits for six to nine
turns until it is answered.  Beside a crowd or bodies at the limits a turn takes tens of
milliseconds.  Whoever probes ends a server that takes too long to say that it is well.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http import HTTPStatus
from typing import Literal, NamedTuple

import h11
from starlette.types import ASGIApp, Message, Scope

_PATHS = frozenset({b"/health", b"/ping"})
_MOST_BYTES = 8192
"""Bytes of a request that are looked at; probes are shorter."""
_METHOD = b"GET "


class _Asked(NamedTuple):
    """A whole request, whose bytes are still to be taken from its connection."""

    request: h11.Request
    num_bytes: int
    http: h11.Connection


class Probes:
    """Answers GET /health and GET /ping by an application that answers them without waiting."""

    def __init__(
        self, app: ASGIApp, default_headers: Callable[[], Iterable[tuple[bytes, bytes]]]
    ) -> None:
        """Each answer gets the headers that `default_headers` returns then."""
        self._app, self._default_headers = app, default_headers

    def answer(self, connection: socket.socket) -> Literal["kept", "closed"] | None:
        """Answer a connection without TLS that has sent exactly one probe.

        Returns whether the client keeps the connection open, or None if there is another request,
        only a part of one, more than one, or one that the application does not answer at once.  All
        bytes are still to be read then.
        """
        asked = _peek(connection)
        if asked is None:
            return None
        try:
            answer = self._ask(asked, connection)
            if answer is None:
                return None
            connection.recv(asked.num_bytes)
            is_sent = connection.send(answer) == len(answer)
        except OSError:  # the client is gone, or reads no answers
            is_sent = False
        if is_sent and asked.http.our_state is h11.DONE:
            return "kept"
        connection.close()
        return "closed"

    def _ask(self, asked: _Asked, connection: socket.socket) -> bytes | None:
        """Return the application's answer, or None if it has to wait for something, or fails."""
        pieces: list[bytes] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            pieces.extend(self._pieces(message, asked.http))

        answering = self._app(_scope(asked.request, connection), receive, send)
        if not _is_over_at_once(answering.__await__()):
            return None
        return b"".join(pieces)

    def _pieces(self, message: Message, http: h11.Connection) -> list[bytes]:
        if message["type"] == "http.response.start":
            headers = [*self._default_headers(), *message["headers"]]
            status = HTTPStatus(message["status"])
            start = h11.Response(status_code=status, headers=headers, reason=status.phrase)
            return [http.send(start) or b""]
        pieces = [http.send(h11.Data(data=message["body"])) or b""]
        if not message.get("more_body", False):
            pieces.append(http.send(h11.EndOfMessage()) or b"")
        return pieces


def _peek(connection: socket.socket) -> _Asked | None:
    """Return the probe that has come, if it is that, and nothing after it."""
    with suppress(OSError, h11.RemoteProtocolError):
        said = connection.recv(_MOST_BYTES, socket.MSG_PEEK)
        if not said.startswith(_METHOD) or said[len(_METHOD) :].split(b" ", 1)[0] not in _PATHS:
            return None
        http = h11.Connection(h11.SERVER)
        http.receive_data(said)
        request = http.next_event()
        if not isinstance(request, h11.Request) or not isinstance(
            http.next_event(), h11.EndOfMessage
        ):
            return None
        if not http.trailing_data[0]:
            return _Asked(request, len(said), http)
    return None


def _scope(request: h11.Request, connection: socket.socket) -> Scope:
    server, client = connection.getsockname(), connection.getpeername()
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.http_version.decode("ascii"),
        "server": server[:2],
        "client": client[:2],
        "scheme": "http",
        "method": request.method.decode("ascii"),
        "root_path": "",
        "path": request.target.decode("ascii"),
        "raw_path": request.target,
        "query_string": b"",
        "headers": list(request.headers),
        "state": {},
    }


def _is_over_at_once(answering: Iterator[object]) -> bool:
    """Run a coroutine up to where it waits; return whether it ended instead, without an error."""
    try:
        next(answering)
    except StopIteration:
        return True
    except Exception:  # The usual way, which the request goes now, reports it.
        return False
    return False
