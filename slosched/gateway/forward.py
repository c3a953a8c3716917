"""Sends one request to a replica, and passes the answer on as it comes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import aiohttp
from starlette.types import Scope, Send

from slosched.engine.server.json_text import parse_json
from slosched.engine.server.respond import last_events
from slosched.gateway.answers import MOST_ANSWER_BYTES, REDIRECTS, TooLongError, read_whole
from slosched.gateway.errors import replica_failed
from slosched.gateway.headers import SKIPPED, Headers, answered, sendable
from slosched.gateway.questions import describe
from slosched.gateway.replica import LiveReplica, Sent

_MOVABLE = (429, 503)
"""Answers by which a replica says that it does not serve the request now."""
_TOO_MANY = frozenset({"grammars_busy", "too_many_requests", "too_many_connections"})
"""Codes of a 503 by which a server that is well says that it has too many requests like this."""
_FINAL = range(200, 600)
"""Statuses that an answer may have (RFC 9110, section 15); others cannot be passed on."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")


class NotTakenError(Exception):
    """A replica did not begin to answer; the text says why.  Its client has seen nothing."""


class NotReachedError(NotTakenError):
    """A replica could not be connected to, so that it has not seen the request either."""


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer that is complete, and not yet sent to the client."""

    status: int
    headers: Headers
    body: bytes

    @property
    def may_be_moved(self) -> bool:
        """Tell whether another replica may be asked instead."""
        return self.status in _MOVABLE

    @property
    def says_down(self) -> bool:
        """Tell whether the replica says that it serves nobody now."""
        return self.status == 503 and self._code not in _TOO_MANY

    @property
    def _code(self) -> str:
        """Return the code of an error in OpenAI's format; empty if it has none."""
        try:
            document: Any = parse_json(self.body)
            return str(document["error"]["code"])
        except (ValueError, LookupError, TypeError):
            return ""

    @property
    def retry_after_s(self) -> float:
        """Return the seconds after which to come again; infinite if it does not say."""
        told = dict(self.headers).get(b"retry-after")
        return math.inf if told is None else float(told)

    async def send(self, send: Send) -> None:
        """Send it to the client."""
        length = (b"content-length", b"%d" % len(self.body))
        headers = [*self.headers, length]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def newest_or_sooner(newest: Whole, before: Whole | None) -> Whole:
    """Return the newest answer; of two refusals, that by which the client may come again sooner."""
    if before is None or not before.status == newest.status == 429:
        return newest
    return min(newest, before, key=lambda whole: whole.retry_after_s)


class StreamBrokenError(Exception):
    """A replica broke off in the middle of a stream, and the client was told so."""


async def forward(
    session: aiohttp.ClientSession,
    replica: LiveReplica,
    sent: Sent,
    scope: Scope,
    content: bytes,
    timeout: aiohttp.ClientTimeout,
    send: Send,
) -> Whole | None:
    """Ask a replica; pass a stream on as it comes (None), or return the whole answer.

    If this is cancelled, the connection is closed, and so the replica aborts the request.
    Raises NotTakenError if no answer has begun (NotReachedError if the request was not even sent),
    and StreamBrokenError after one that broke off.
    """
    target = replica.url + scope["path"]
    if query := scope["query_string"]:
        target += "?" + query.decode("latin-1")
    try:
        async with session.post(
            target,
            data=content,
            headers=sendable(scope["headers"]),
            timeout=timeout,
            allow_redirects=False,
            skip_auto_headers=SKIPPED,
        ) as response:
            if response.status not in _FINAL or response.status in REDIRECTS:
                raise NotTakenError(f"it answered with the status {response.status}")
            headers = answered(response.raw_headers)
            if response.content_type != "text/event-stream" or response.status >= 400:
                body = await read_whole(response, MOST_ANSWER_BYTES)
                return Whole(response.status, headers, body)
            replica.begin(sent)
            await send(
                {"type": "http.response.start", "status": response.status, "headers": headers}
            )
            await pass_on(response.content, send)
            return None
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise NotReachedError(describe(error)) from error
    except (aiohttp.ClientError, OSError) as error:  # OSError: TimeoutError is one
        raise NotTakenError(describe(error)) from error


async def pass_on(stream: aiohttp.StreamReader, send: Send) -> None:
    """Send the events of a stream on as they come; an error is its last event if it breaks off.

    Of an event that breaks off in its middle, or is too long, the client sees nothing.
    """
    held = bytearray()
    try:
        async for piece in stream.iter_any():
            num_before = len(held)
            held += piece
            end = _end_of_events(held, num_before)
            if end:
                whole = bytes(held[:end])
                del held[:end]
                await send({"type": "http.response.body", "body": whole, "more_body": True})
            if len(held) > MOST_ANSWER_BYTES:
                raise TooLongError(MOST_ANSWER_BYTES)
    except (aiohttp.ClientError, OSError) as error:
        why = f"the replica broke off in the middle of its answer: {describe(error)}"
        body = last_events(replica_failed(why))
        await send({"type": "http.response.body", "body": body, "more_body": False})
        raise StreamBrokenError(why) from error
    await send({"type": "http.response.body", "body": bytes(held), "more_body": False})


def _end_of_events(data: bytearray, num_before: int) -> int:
    """Return the place after the last whole event, which ends with an empty line; 0 if none.

    None has ended in the first `num_before` bytes, so that a long event is searched only once.
    """
    last = 0
    for mark in _EVENT_ENDS:
        found = data.rfind(mark, max(0, num_before - len(mark) + 1))
        if found >= 0:
            last = max(last, found + len(mark))
    return last
