"""Connections on which nothing has been said yet, which cost next to nothing until something is.

A protocol of the event loop takes several times as long to make as a connection takes to accept.
So thousands that connect and say nothing do not keep those waiting that have a request.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

import h11

from slosched.engine.server.clients import Clients, no_request, on_the_wire
from slosched.engine.server.errors import ApiError

_WORD_BYTES = 4
_HEARD_AT_ONCE = 256
"""Connections that are looked at in a turn of the event loop."""
_ENDED_AT_ONCE = 64
"""Connections that are ended in a turn; two thousand at once keep others waiting for 0.2 s."""


class Silent:
    """A connection on which its client has sent nothing."""

    __slots__ = ("_crowd", "since_s", "socket")

    def __init__(self, connection: socket.socket, since_s: float, crowd: SilentCrowd) -> None:
        self.socket, self.since_s = connection, since_s
        self._crowd = crowd

    def answer_and_close(self, error: ApiError) -> None:
        """Send an error, unless the client expects to begin with TLS, and close the connection."""
        self.send_and_close(_said(error))

    def send_and_close(self, answer: bytes) -> None:
        """Send an answer, unless the client expects to begin with TLS, and close the connection."""
        self._crowd.leave(self)
        with suppress(OSError):
            if not self._crowd.speaks_tls:
                self.socket.send(answer)
        self.socket.close()


class SilentCrowd:
    """Waits for the first word of each connection, for as long as headers may take."""

    def __init__(
        self,
        clients: Clients,
        on_word: Callable[[socket.socket, bytes], None],
        *,
        speaks_tls: bool,
    ) -> None:
        """Begin in the running event loop; `on_word` gets each connection with its first bytes.

        The bytes are still to be read from the connection.
        """
        self.speaks_tls = speaks_tls
        self._clients, self._on_word = clients, on_word
        self._loop = asyncio.get_running_loop()
        self._selector = selectors.DefaultSelector()
        self._silent: dict[Silent, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def fileno(self) -> int:
        """Return the descriptor that can be read when `listen` has something to hear."""
        return self._selector.fileno()

    def add(self, connection: socket.socket) -> None:
        """Hear what is said on a new connection; make room for it if there are too many."""
        self._clients.make_room(1)
        if not self._hears(connection):
            self.wait_for(connection)

    def wait_for(self, connection: socket.socket) -> None:
        """Wait for what is said next on a connection."""
        silent = Silent(connection, self._loop.time(), self)
        self._selector.register(connection, selectors.EVENT_READ, silent)
        self._silent[silent] = self._clients.idle[silent] = None
        self._clients.num_silent += 1
        if self._timer is None:
            self._await_limit(silent)

    def leave(self, silent: Silent) -> None:
        """Forget a connection, which goes on elsewhere or is closed."""
        self._selector.unregister(silent.socket)
        self._clients.idle.pop(silent, None)
        self._clients.num_silent -= 1
        del self._silent[silent]

    def close(self) -> None:
        """Close all connections on which nothing has been said."""
        if self._timer is not None:
            self._timer.cancel()
        for silent in tuple(self._silent):
            self.leave(silent)
            silent.socket.close()
        self._selector.close()

    def listen(self) -> None:
        """Pass on those on which something was said."""
        for key, _ in self._selector.select(0)[:_HEARD_AT_ONCE]:
            silent: Silent = key.data
            self.leave(silent)
            if not self._hears(silent.socket):
                self.wait_for(silent.socket)

    def _hears(self, connection: socket.socket) -> bool:
        """Pass on a connection on which something was said, or close one whose client has gone.

        Returns False if nothing has happened on it.
        """
        try:
            word = connection.recv(_WORD_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            word = b""
        if word:
            self._on_word(connection, word)
        else:
            connection.close()
        return True

    def _await_limit(self, oldest: Silent) -> None:
        due_s = oldest.since_s + self._clients.limits.headers_timeout_s
        self._timer = self._loop.call_at(due_s, self._end_late)

    def _end_late(self) -> None:
        """Answer those that have said nothing for too long, and wait for the next of them."""
        self._timer = None
        limit_s = self._clients.limits.headers_timeout_s
        answer = _said(no_request(limit_s))
        late_s = self._loop.time() - limit_s
        for oldest in tuple(islice(self._silent, _ENDED_AT_ONCE)):
            if oldest.since_s > late_s:
                break
            oldest.send_and_close(answer)
        if self._silent:
            self._await_limit(next(iter(self._silent)))  # in the next turn, if it is late as well


def _said(error: ApiError) -> bytes:
    return on_the_wire(error, h11.Connection(h11.SERVER))
