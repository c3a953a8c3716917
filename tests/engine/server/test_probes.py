"""Probes of liveness are answered at once, and as they would be on the way that others take."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from live_server import Live, live
from starlette.types import ASGIApp, Receive, Scope, Send

from slosched.engine.server.accepting import FromBothEnds
from slosched.engine.server.clients import Clients, ConnectionLimits
from slosched.engine.server.probes import Probes

PROBE = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
WELL = b'{"status":"ok"}'
WELL_HEADERS = [(b"x-a", b"b"), (b"content-length", b"15")]
DEFAULT_HEADERS = [(b"server", b"test")]


async def well(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer that all is well, without waiting."""
    await send({"type": "http.response.start", "status": 200, "headers": WELL_HEADERS})
    await send({"type": "http.response.body", "body": WELL})


async def late(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(0)
    await well(scope, receive, send)


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError("a defect of the application")


@contextmanager
def a_connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection: the client's and the server's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=20) as client,
    ):
        connection, _ = listener.accept()
        with connection:
            yield client, connection


def probes_of(app: ASGIApp) -> Probes:
    return Probes(app, lambda: DEFAULT_HEADERS)


@pytest.mark.parametrize("path", [b"/health", b"/ping"])
def test_a_probe_is_answered_and_its_connection_is_kept(path: bytes) -> None:
    with a_connection() as (client, connection):
        for _ in range(2):
            client.sendall(PROBE.replace(b"/health", path))
            assert probes_of(well).answer(connection) == "kept"
            response = http.client.HTTPResponse(client)
            response.begin()
            assert (response.status, response.reason, response.read()) == (200, "OK", WELL)
            assert (response.headers["server"], response.headers["x-a"]) == ("test", "b")


@pytest.mark.parametrize(
    "probe",
    [
        PROBE.replace(b"host: x", b"host: x\r\nconnection: close"),
        PROBE.replace(b"HTTP/1.1", b"HTTP/1.0"),
    ],
)
def test_a_connection_that_the_client_wants_to_end_ends(probe: bytes) -> None:
    with a_connection() as (client, connection):
        client.sendall(probe)
        assert probes_of(well).answer(connection) == "closed"
        answer = b"".join(iter(lambda: client.recv(1000), b""))
    assert answer.endswith(WELL)


@pytest.mark.parametrize(
    ("said", "app"),
    [
        (b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n", well),
        (b"GET /health?a=b HTTP/1.1\r\nhost: x\r\n\r\n", well),
        (b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n", well),
        (b"POST /ping HTTP/1.1\r\nhost: x\r\n\r\n", well),
        (PROBE[:-2], well),
        (PROBE + PROBE, well),
        (b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\na", well),
        (b"GET /health HTTP/1.1\r\n\r\n", well),
        (PROBE, late),
        (PROBE, broken),
    ],
)
def test_all_else_is_left_to_be_read_by_others(said: bytes, app: ASGIApp) -> None:
    with a_connection() as (client, connection):
        client.sendall(said)
        assert probes_of(app).answer(connection) is None
        assert connection.recv(1000) == said


def test_a_client_that_has_gone_is_forgotten() -> None:
    with a_connection() as (client, connection):
        client.sendall(PROBE)
        client.close()
        connection.shutdown(socket.SHUT_WR)
        assert probes_of(well).answer(connection) == "closed"
        assert connection.fileno() == -1


async def accepted(
    listener: socket.socket, then: Callable[[Clients], Awaitable[None]]
) -> list[asyncio.Protocol]:
    """Accept connections during `then`; return the protocols that were made."""
    listener.setblocking(False)
    clients, made = Clients(ConnectionLimits()), list[asyncio.Protocol]()

    def protocol() -> asyncio.Protocol:
        made.append(asyncio.Protocol())
        return made[-1]

    accepting = FromBothEnds(listener, protocol, None, clients, probes_of(well))
    await then(clients)
    accepting.close()
    return made


def has_answer(client: socket.socket) -> bool:
    try:
        return WELL in client.recv(1000)
    except BlockingIOError:
        return False


def test_a_probe_is_answered_in_the_turn_in_which_it_is_accepted() -> None:
    async def two_turns(_clients: Clients) -> None:
        await asyncio.sleep(0)  # the listener is not looked at before the first turn ends
        await asyncio.sleep(0)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        client.sendall(PROBE)
        client.setblocking(False)
        assert asyncio.run(accepted(listener, two_turns)) == []
        assert has_answer(client)


@pytest.mark.timeout(60)
def test_a_probe_is_answered_within_a_turn_that_takes_long() -> None:
    """It comes in the midst of a turn, on a new connection and then on the same again."""

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:

        async def one_turn(clients: Clients) -> None:
            clients.look()
            client.connect(listener.getsockname())
            client.setblocking(False)
            for _ in range(2):
                client.sendall(PROBE)
                while not has_answer(client):
                    clients.look()

        assert asyncio.run(accepted(listener, one_turn)) == []


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as started:
        yield started


def connect(server: Live) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def answer_of(client: socket.socket) -> tuple[int, str, list[str], bytes]:
    response = http.client.HTTPResponse(client)
    response.begin()
    return response.status, response.reason, sorted(response.headers), response.read()


def test_the_answer_is_the_same_on_the_usual_way(server: Live) -> None:
    with connect(server) as client:
        client.sendall(PROBE)
        at_once = answer_of(client)
        client.sendall(PROBE.replace(b"/health", b"/health?usual"))
        assert answer_of(client) == at_once
    assert json.loads(at_once[-1]) == {"status": "ok"}


def test_a_connection_with_probes_takes_other_requests_as_well(server: Live) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with connect(server) as client:
        for said in (PROBE, PROBE, head.encode() + body, PROBE):
            client.sendall(said)
            assert answer_of(client)[0] == 200
