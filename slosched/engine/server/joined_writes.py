"""A transport that sends at once what is written in one turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any


class JoinedWrites:
    """Passes on to `transport`, as one piece, all that is written in one turn of the event loop.

    An answer is written in pieces, its head apart from its body.  To send a piece takes longer than
    to make it, as it wakes up the other side.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        on_piece: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_piece` is called after each piece."""
        self._transport, self._loop, self._on_piece = transport, loop, on_piece
        self._pieces: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Keep the bytes until the end of this turn."""
        if not self._pieces:
            self._loop.call_soon(self.flush)
        self._pieces.append(bytes(data))
        self._on_piece()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def flush(self) -> None:
        """Send what has been written so far."""
        pieces, self._pieces = self._pieces, []
        if pieces:
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def close(self) -> None:
        """Close the connection when all that was written has been sent."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once; what was not sent is lost."""
        self._pieces.clear()
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
