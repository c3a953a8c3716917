"""How many connections a server has, and which of them make room for others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

import h11

from slosched.engine.server.errors import ApiError

MOST_CONNECTIONS = 10_000


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What clients may take of a server apart from its device."""

    max_connections: int = MOST_CONNECTIONS
    headers_timeout_s: float = 10.0
    """How long a client may take to send the headers of a request."""
    write_timeout_s: float = 60.0
    """How long a client may leave an answer unread, once the buffers between it and us are full."""


class Idle(Protocol):
    """A connection without a request."""

    def answer_and_close(self, error: ApiError) -> None:
        """Send an error and close it."""


@dataclass
class Clients:
    """The connections of a server."""

    limits: ConnectionLimits
    connected: Collection[object] = ()
    """Those that speak HTTP."""
    num_silent: int = 0
    """Those on which nothing has been said yet."""
    idle: dict[Idle, None] = field(default_factory=dict)
    """Those without a request, in the order of their waiting."""
    look: Callable[[], None] = lambda: None
    """Looks for probes of liveness that have come; to be called often in turns that take long."""

    def make_room(self, num_new: int) -> bool:
        """Close the one that has waited longest for a request if there are too many connections.

        Returns False if there are too many and all of them have requests.
        """
        if len(self.connected) + self.num_silent + num_new <= self.limits.max_connections:
            return True
        longest = next(iter(self.idle), None)
        if longest is None:
            return False
        del self.idle[longest]
        longest.answer_and_close(too_many())
        return True


def too_many() -> ApiError:
    return ApiError(
        503,
        "the server has too many connections; come again, or use fewer",
        kind="service_unavailable",
        code="too_many_connections",
        retry_after_s=1.0,
    )


def no_request(after_s: float) -> ApiError:
    message = f"no request came within {after_s:g} s"
    return ApiError(408, message, code="request_timeout")


def on_the_wire(error: ApiError, connection: h11.Connection) -> bytes:
    """Return the bytes of a response that ends the connection, which must be ready for one."""
    error.closes = True
    response = error.response()
    events = (
        h11.Response(status_code=error.status, headers=response.raw_headers),
        h11.Data(data=bytes(response.body)),
        h11.EndOfMessage(),
    )
    return b"".join([connection.send(event) or b"" for event in events])
