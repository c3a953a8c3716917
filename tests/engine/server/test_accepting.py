"""Which connections are served, and in what order if they have waited for the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from contextlib import ExitStack

from slosched.engine.server.accepting import FromBothEnds
from slosched.engine.server.clients import Clients, ConnectionLimits

NUM_CLIENTS = 40


class Noting(asyncio.Protocol):
    """Notes whose connection it gets, and calls back when it has as many as there are clients."""

    def __init__(self, ports: list[int], done: asyncio.Event) -> None:
        self._ports, self._done = ports, done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._ports.append(transport.get_extra_info("peername")[1])
        transport.close()
        if len(self._ports) == NUM_CLIENTS:
            self._done.set()


async def served_in_order(listener: socket.socket) -> list[int]:
    """Return the clients' ports in the order in which they are served."""
    ports: list[int] = []
    done = asyncio.Event()
    listener.setblocking(False)
    accepting = FromBothEnds(
        listener, lambda: Noting(ports, done), None, Clients(ConnectionLimits())
    )
    await asyncio.wait_for(done.wait(), 20)
    accepting.close()
    return ports


def test_who_comes_last_does_not_wait_for_a_crowd() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener, ExitStack() as stack:
        address = listener.getsockname()
        crowd = [stack.enter_context(socket.create_connection(address)) for _ in range(NUM_CLIENTS)]
        for client in crowd:
            client.sendall(b"x")
        came = [client.getsockname()[1] for client in crowd]
        served = asyncio.run(served_in_order(listener))
    assert served[:4] == [came[0], came[-1], came[1], came[-2]]
    assert sorted(served) == sorted(came)


def test_a_request_without_a_body_does_not_wait_for_those_with_one() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener, ExitStack() as stack:
        address = listener.getsockname()
        crowd = [stack.enter_context(socket.create_connection(address)) for _ in range(NUM_CLIENTS)]
        for i, client in enumerate(crowd):
            client.sendall(b"GET /health" if i == NUM_CLIENTS // 2 else b"POST /v1/completions")
        came = [client.getsockname()[1] for client in crowd]
        served = asyncio.run(served_in_order(listener))
    assert served[0] == came[NUM_CLIENTS // 2]


def test_no_protocol_is_made_for_who_says_nothing() -> None:
    """Of many that connect, one says something, and one closes its side without a word."""

    async def made(listener: socket.socket) -> tuple[list[int], int]:
        clients, ports = Clients(ConnectionLimits()), list[int]()
        listener.setblocking(False)
        accepting = FromBothEnds(listener, lambda: Noting(ports, asyncio.Event()), None, clients)
        while not ports or clients.num_silent != NUM_CLIENTS - 2:
            await asyncio.sleep(0.001)
        accepting.close()
        return ports, clients.num_silent

    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener, ExitStack() as stack:
        address = listener.getsockname()
        crowd = [stack.enter_context(socket.create_connection(address)) for _ in range(NUM_CLIENTS)]
        crowd[3].shutdown(socket.SHUT_WR)
        crowd[7].sendall(b"x")
        ports, num_silent = asyncio.run(asyncio.wait_for(made(listener), 20))
        assert ports == [crowd[7].getsockname()[1]]
    assert num_silent == 0


def test_those_that_still_wait_are_closed_at_the_end() -> None:
    async def close_at_once(listener: socket.socket) -> None:
        listener.setblocking(False)
        accepting = FromBothEnds(listener, asyncio.Protocol, None, Clients(ConnectionLimits()))
        await asyncio.sleep(0)  # a turn, in which all are accepted
        await asyncio.sleep(0)
        accepting.close()

    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener, ExitStack() as stack:
        address = listener.getsockname()
        crowd = [
            stack.enter_context(socket.create_connection(address, timeout=20))
            for _ in range(NUM_CLIENTS)
        ]
        asyncio.run(close_at_once(listener))
        listener.close()
        for client in crowd:
            with contextlib.suppress(ConnectionResetError):  # the kernel still held it
                assert client.recv(1) == b""


def test_a_crowd_that_has_said_nothing_for_too_long_is_ended_in_many_turns() -> None:
    """Others are served between them; each of the crowd is told why."""
    num_clients = 200

    async def most_ended_in_a_turn(listener: socket.socket) -> int:
        clients, most = Clients(ConnectionLimits(headers_timeout_s=0.5)), 0
        listener.setblocking(False)
        accepting = FromBothEnds(listener, asyncio.Protocol, None, clients)
        while clients.num_silent < num_clients:
            await asyncio.sleep(0)
        time.sleep(0.6)  # now all of them are late
        while before := clients.num_silent:
            await asyncio.sleep(0)
            most = max(most, before - clients.num_silent)
        accepting.close()
        return most

    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener, ExitStack() as stack:
        address = listener.getsockname()
        crowd = [stack.enter_context(socket.create_connection(address)) for _ in range(num_clients)]
        most = asyncio.run(asyncio.wait_for(most_ended_in_a_turn(listener), 20))
        answers = [client.recv(1000) for client in crowd]
    assert 0 < most <= 64
    assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
