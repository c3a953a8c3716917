"""Connections that wait are served from both ends, so that a crowd holds up few who come later.

To accept a connection takes some microseconds, to make it one of the event loop ten times as many.
A thousand clients that connect at once keep the thousand-and-first waiting for a fifth of a second
if they are served in the order in which they came.  If only the newest were served, those who came
in between would wait for as long as others come.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

_ACCEPTED_AT_ONCE = 256
"""Connections that are taken out of the kernel's queue in a turn of the event loop."""
_SERVED_AT_ONCE = 4
"""Of those that wait, so many of the oldest and of the newest are served in a turn; the loop takes
some turns until it hands them over, and only then others can be closed to make room."""
_MOST_WAITING = 2048
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_AGAIN_S = 0.1


class FromBothEnds:
    """Accepts the connections of a listening socket in the place of asyncio's server."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        """Begin at once, in the running event loop; each connection gets a new `protocol`."""
        self._loop = asyncio.get_running_loop()
        self._listener, self._protocol, self._tls = listener, protocol, tls
        self._waiting: deque[socket.socket] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._is_due = self._is_closed = False
        self._listen()

    def close(self) -> None:
        """Accept no more, and close the connections that are not served yet."""
        self._is_closed = True
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
        while self._waiting:
            self._waiting.pop().close()

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.remove_reader(self._listener)  # asyncio's own, at first
            self._loop.add_reader(self._listener, self._begin_turn)

    def _begin_turn(self) -> None:
        if not self._is_due:
            self._turn()

    def _turn(self) -> None:
        """Accept what has come, and serve the oldest and the newest."""
        self._is_due = False
        if self._is_closed:
            return
        self._accept()
        for connection in self._from_both_ends():
            task = self._loop.create_task(self._serve(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        if self._waiting:
            self._is_due = True
            self._loop.call_soon(self._turn)

    def _from_both_ends(self) -> list[socket.socket]:
        """Take out the oldest and the newest that wait, in the order in which they came."""
        waiting = self._waiting
        oldest = [waiting.popleft() for _ in range(min(_SERVED_AT_ONCE, len(waiting)))]
        newest = [waiting.pop() for _ in range(min(_SERVED_AT_ONCE, len(waiting)))]
        return oldest + newest[::-1]

    def _accept(self) -> None:
        for _ in range(min(_ACCEPTED_AT_ONCE, _MOST_WAITING - len(self._waiting))):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                if not self._waiting:  # else those that are served now make room
                    log.error("no connection can be accepted: %s", error.strerror)
                    self._loop.remove_reader(self._listener)
                    self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
                return
            connection.setblocking(False)
            self._waiting.append(connection)

    async def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client is gone, or speaks no TLS
            await self._loop.connect_accepted_socket(self._protocol, connection, ssl=self._tls)
