"""Connections are accepted at once, and served as soon as something is said on them.

Those that have said something wait in two queues: requests without a body (GET), such as a probe of
/health, and all others, which take longer.  Both are served in turns, and each from both ends, so
that a crowd holds up few who come later.  A hundred requests for text that come at once would keep
a probe waiting for a tenth of a second if they were served in the order in which they came.  If
only the newest were served, those who came in between would wait for as long as others come.

A probe of liveness does not even wait for the end of a turn: whatever takes long in one calls
`look` now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import logging
import math
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable

from slosched.engine.server.clients import Clients
from slosched.engine.server.probes import Probes
from slosched.engine.server.silent import SilentCrowd

log = logging.getLogger(__name__)

_ACCEPTED_AT_ONCE = 256
"""Connections that are taken out of the kernel's queue in a turn of the event loop."""
_LOOK_EVERY_S = 0.01
"""How long a turn may take until probes are looked for."""
_WITHOUT_BODY = b"GET "
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_AGAIN_S = 0.1


class FromBothEnds:
    """Accepts the connections of a listening socket in the place of asyncio's server."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        clients: Clients,
        probes: Probes | None = None,
    ) -> None:
        """Begin at once, in the running event loop; each connection gets a new `protocol`.

        `probes` answers probes of liveness before that, but for connections with TLS.
        """
        self._loop = asyncio.get_running_loop()
        self._listener, self._protocol, self._tls = listener, protocol, tls
        self._probes = probes if tls is None else None
        self._silent = SilentCrowd(clients, self._queue, speaks_tls=tls is not None)
        self._without_body: deque[socket.socket] = deque()
        self._others: deque[socket.socket] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._is_due = self._is_closed = self._is_accepting = False
        self._look_at_s = -math.inf
        # Whoever looks may do so on behalf of another request.
        self._context = contextvars.copy_context()
        clients.look = self.look
        self._loop.add_reader(self._silent, self._hear)
        self._listen()

    def look(self) -> None:
        """Accept and answer probes in the midst of a turn, unless that was done just now."""
        if time.monotonic() < self._look_at_s or self._is_closed:
            return
        self._look_at_s = math.inf  # those who make room for others write, and so look again
        try:
            self._context.run(self._look)
        finally:
            self._look_at_s = time.monotonic() + _LOOK_EVERY_S

    def _look(self) -> None:
        if self._is_accepting:
            with contextlib.suppress(OSError):  # the loop finds it, too, and reports it
                self._accept()
        self._hear()

    def close(self) -> None:
        """Accept no more, and close the connections that are not served yet."""
        self._is_closed = True
        self._loop.remove_reader(self._silent)
        self._silent.close()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
        for connection in (*self._without_body, *self._others):
            connection.close()

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.remove_reader(self._listener)  # asyncio's own, at first
            self._loop.add_reader(self._listener, self._accept)
            self._is_accepting = True

    def _queue(self, connection: socket.socket, word: bytes) -> None:
        """Serve a connection on which something was said, in its turn."""
        (self._without_body if word == _WITHOUT_BODY else self._others).append(connection)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._turn, context=self._context)

    def _turn(self) -> None:
        """Serve the oldest and the newest of both queues."""
        self._is_due = False
        if self._is_closed:
            return
        self._serve_without_body()
        for connection in _ends(self._others):
            self._begin(connection)
        if self._has_waiting:
            self._is_due = True
            self._loop.call_soon(self._turn)

    def _serve_without_body(self) -> None:
        for connection in _ends(self._without_body):
            if not self._is_probe(connection):
                self._begin(connection)

    def _is_probe(self, connection: socket.socket) -> bool:
        """Answer a connection if it probes whether the server is well; tell whether it did."""
        outcome = None if self._probes is None else self._probes.answer(connection)
        if outcome == "kept":
            self._silent.wait_for(connection)
        return outcome is not None

    def _begin(self, connection: socket.socket) -> None:
        task = self._loop.create_task(self._serve(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    @property
    def _has_waiting(self) -> bool:
        return bool(self._without_body or self._others)

    def _hear(self) -> None:
        self._silent.listen()
        self._serve_without_body()

    def _accept(self) -> None:
        self._accept_many()
        self._serve_without_body()

    def _accept_many(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                if not self._has_waiting:  # else those that are served now make room
                    log.error("no connection can be accepted: %s", error.strerror)
                    self._loop.remove_reader(self._listener)
                    self._is_accepting = False
                    self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
                return
            connection.setblocking(False)
            self._silent.add(connection)

    async def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client is gone, or speaks no TLS
            await self._loop.connect_accepted_socket(self._protocol, connection, ssl=self._tls)


def _ends(waiting: deque[socket.socket]) -> list[socket.socket]:
    """Take out the oldest and the newest."""
    oldest = [waiting.popleft()] if waiting else []
    newest = [waiting.pop()] if waiting else []
    return oldest + newest
