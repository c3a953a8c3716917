"""Which headers reach a replica, and how."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from slosched.engine.server.request_id import EchoRequestId
from slosched.gateway.headers import answered, sendable
from slosched.gateway.request_id import GiveRequestId


@pytest.mark.parametrize("value", ["Bearer a", "Bearer \u00e9", "Bearer \u65e5\U0001f511"])
def test_a_value_reaches_the_replica_as_it_was_sent(value: str) -> None:
    """A key that is not ASCII was encoded twice, so that no replica knew it."""
    head = b""

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal head
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def play() -> None:
        server = await asyncio.start_server(note, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        headers = sendable([(b"authorization", value.encode())])
        async with server, aiohttp.ClientSession() as session:
            await session.post(f"http://127.0.0.1:{port}", headers=headers)

    asyncio.run(play())
    assert b"\r\nauthorization: %s\r\n" % value.encode() in head


def test_a_value_that_is_no_utf_8_is_sent_as_the_text_that_it_is_in_latin_1() -> None:
    assert ("x-name", "Andr\xe9") in sendable([(b"x-name", b"Andr\xe9")])


def test_headers_that_connection_names_go_no_further() -> None:
    said = [(b"connection", b"close, X-Mine"), (b"x-mine", b"1"), (b"x-other", b"2")]
    assert sendable(said)[:-1] == [("x-other", "2")]
    assert answered([(b"Connection", b"x-MINE"), *said[1:]]) == [(b"x-other", b"2")]
    key = (b"authorization", b"Bearer a")
    assert ("authorization", "Bearer a") in sendable([(b"connection", b"authorization"), key])


@pytest.mark.parametrize(
    ("told", "passed"),
    [
        (b"0", [b"0"]),
        (b"30", [b"30"]),
        (b"3600", [b"3600"]),
        (b"1000000000000", [b"3600"]),
        (b"9" * 5000, [b"3600"]),
        (b"Fri, 31 Dec 9999 23:59:59 GMT", [b"3600"]),
        (b"Fri, 31 Dec 1999 23:59:59 GMT", [b"0"]),
        (b"Fri, 31 Dec 9999 23:59:59 -0000", [b"3600"]),
        (b"Fri, 99 Dec 1999 23:59:59 GMT", []),
        (b"", []),
        (b"-1", []),
        (b"1.5", []),
        (b"1e9", []),
        (b"soon", []),
        (b"\xc2\xb2", []),
    ],
)
def test_a_client_is_told_to_wait_an_hour_at_most(told: bytes, passed: list[bytes]) -> None:
    """Some clients sleep for as long as they are told."""
    assert answered([(b"Retry-After", told)]) == [(b"retry-after", each) for each in passed]


def test_a_header_of_an_answer_with_control_characters_is_left_out() -> None:
    """With some of them the answer itself was lost, as no server sends them on."""
    odd = [(b"x-odd", b"a%cb" % control) for control in b"\x00\x01\x0b\x0c\r\n\x7f"]
    fine = [(b"x-tab", b"a\tb"), (b"x-name", b"Andr\xe9")]
    assert answered([*odd, *fine]) == fine


@pytest.mark.parametrize("sent", [[], [(b"x-request-id", b"")], [(b"x-request-id", b"mine")]])
def test_the_client_is_told_the_id_that_the_replica_sees(sent: list[tuple[bytes, bytes]]) -> None:
    """Without one, or with an empty one, the replica would log an id of its own."""
    seen: list[Any] = []
    told: list[Any] = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any: ...

    async def send(message: Any) -> None:
        told.extend(message["headers"])

    scope = {"type": "http", "headers": sent}
    asyncio.run(GiveRequestId(EchoRequestId(app))(scope, receive, send))
    assert seen == told
    assert told[0][1]
