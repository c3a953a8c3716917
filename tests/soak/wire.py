"""HTTP by hand, so that a client costs little and may do what no library lets it do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from soak.fuzzer import Sent


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    closes: bool
    """Whether the server closes the connection after it."""
    headers: dict[str, str]


class Wire:
    """One connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, url: str) -> Wire:
        address = urlsplit(url)
        return cls(*await asyncio.open_connection(address.hostname, address.port))

    async def ask(self, sent: Sent) -> Answer:
        """Send a request and return its whole answer."""
        self.writer.write(request_bytes(sent))
        await self.writer.drain()
        return await self.answer()

    async def answer(self) -> Answer:
        """Return the next answer; raise EOFError if the connection ends before its end."""
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in self.chunks()])
        else:
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        closes = headers.get("connection", "") == "close"
        return Answer(status, body.decode(errors="replace"), closes, headers)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Return the status and the headers of the next answer, whose body is still to come."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        pairs = (line.partition(":") for line in lines if line)
        return int(first.split()[1]), {name.lower(): text.strip() for name, _, text in pairs}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the parts of a body of unknown length as they come."""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """Drop the connection without a farewell."""
        self.writer.transport.abort()


def request_bytes(sent: Sent) -> bytes:
    headers = "".join(f"{name}: {value}\r\n" for name, value in sent.headers.items())
    head = f"{sent.method} {sent.path} HTTP/1.1\r\nhost: soak\r\n{headers}"
    return f"{head}content-length: {len(sent.body)}\r\n\r\n".encode("latin-1") + sent.body
