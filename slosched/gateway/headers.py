"""Which headers of a request reach a replica, and which of its answer reach the client."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from email.utils import parsedate_to_datetime

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
_RETRY_AFTER = b"retry-after"
_LONGEST_WAIT_S = 3600
"""The longest time that a client is told to wait, as no server for text is sure of more."""
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
    """Return an answer's headers, in lower case, without those of its own connection.

    Those with control characters are left out.  A `retry-after` is told in seconds, at most an
    hour, and left out if it says nothing.
    """
    lowered = [(name.lower(), value) for name, value in headers]
    skipped = _NOT_ANSWERED | _named_by_connection(lowered) | {_RETRY_AFTER}
    passed = [pair for pair in lowered if pair[0] not in skipped and not _CONTROLS.search(pair[1])]
    waits_s = [_wait_s(value) for name, value in lowered if name == _RETRY_AFTER]
    return [*passed, *((_RETRY_AFTER, b"%d" % wait) for wait in waits_s if wait is not None)]


def _wait_s(told: bytes) -> int | None:
    """Return the seconds of a `retry-after`, a number or a date; None if it is neither."""
    if told.isdigit():
        return int(min(float(told), _LONGEST_WAIT_S))  # int() refuses thousands of digits
    try:
        left_s = parsedate_to_datetime(told.decode("ascii")).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return math.ceil(min(max(0.0, left_s), _LONGEST_WAIT_S))


def _named_by_connection(headers: Headers) -> set[bytes]:
    """Return the names that a `connection` header says are for this connection alone."""
    said = b",".join(value for name, value in headers if name == b"connection")
    return {each.strip().lower() for each in said.split(b",")} - _NEVER_OF_ONE_CONNECTION
