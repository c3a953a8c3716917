"""Which headers of a request reach a replica, and which of its answer reach the client."""

from __future__ import annotations

import re
from collections.abc import Iterable

from slosched.engine.server.errors import ApiError

_OF_ONE_CONNECTION = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers that are not passed on (RFC 9110, section 7.6.1)."""
_NEVER_OF_ONE_CONNECTION = frozenset({b"authorization", b"content-type", b"cache-control"})
"""Headers that are for the server, which `connection` may not name (section 7.6.1, too)."""
_NOT_SENT = _OF_ONE_CONNECTION | {b"host", b"content-length", b"expect", b"accept-encoding"}
_PLAIN = ("accept-encoding", "identity")
"""Asks for an answer that is not compressed: else nobody sees where an event of a stream ends, and
what an error says."""
_NOT_ANSWERED = _OF_ONE_CONNECTION | {b"content-length", b"date", b"server"}
_CONTROLS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""Characters that no header may have (RFC 9110, section 5.5), and that aiohttp does not send."""
SKIPPED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers that aiohttp would add if the client sent none."""

Headers = list[tuple[bytes, bytes]]


def sendable(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return a request's headers without those of its own connection, for a plain answer.

    Raises ApiError (400) if one of them has control characters.
    """
    given = list(headers)
    skipped = _NOT_SENT | _named_by_connection(given)
    sent = [(name, value) for name, value in given if name not in skipped]
    for name, value in sent:
        if _CONTROLS.search(value):
            raise ApiError(400, f"the header {name.decode('latin-1')} has control characters")
    return [*((name.decode("latin-1"), _text(value)) for name, value in sent), _PLAIN]


def _text(value: bytes) -> str:
    """Return a value as a text that aiohttp, which sends UTF-8, turns into the same bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def answered(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return an answer's headers, in lower case, without those of its own connection."""
    lowered = [(name.lower(), value) for name, value in headers]
    skipped = _NOT_ANSWERED | _named_by_connection(lowered)
    return [(name, value) for name, value in lowered if name not in skipped]


def _named_by_connection(headers: Headers) -> set[bytes]:
    """Return the names that a `connection` header says are for this connection alone."""
    said = b",".join(value for name, value in headers if name == b"connection")
    return {each.strip().lower() for each in said.split(b",")} - _NEVER_OF_ONE_CONNECTION
