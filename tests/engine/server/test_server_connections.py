"""Clients that are slow, silent, gone, too many or no HTTP clients at all."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest
from live_server import Live, live, server_process

from slosched.core import EndReason
from slosched.engine.server.clients import ConnectionLimits
from slosched.engine.server.log_limit import OncePerSecond

COMPLETION = json.dumps({"prompt": "abc", "max_tokens": 5}).encode()


def connect(server: Live) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def request_of(body: bytes, version: str = "1.1") -> bytes:
    return (
        b"POST /v1/completions HTTP/%b\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (version.encode(), len(body), body)
    )


def response_of(client: socket.socket) -> tuple[int, Any]:
    """Return the status and the document of the next response."""
    response = http.client.HTTPResponse(client)
    response.begin()
    return response.status, json.loads(response.read())


def closes(client: socket.socket) -> bool:
    return client.recv(1) == b""


@pytest.fixture(scope="module")
def hasty() -> Iterator[Live]:
    """A server that waits only a moment for headers, and that holds three connections."""
    limits = ConnectionLimits(max_connections=3, headers_timeout_s=0.2, write_timeout_s=0.3)
    with live(limits=None, connections=limits, body_timeout_s=0.2) as server:
        yield server


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
def test_headers_that_do_not_come_are_a_408(hasty: Live, sent: bytes) -> None:
    with connect(hasty) as client:
        client.sendall(sent)
        status, answer = response_of(client)
        assert (status, answer["error"]["code"]) == (408, "request_timeout")
        assert "within 0.2 s" in answer["error"]["message"]
        assert closes(client)


def test_the_headers_of_a_second_request_have_as_long(hasty: Live) -> None:
    with connect(hasty) as client:
        client.sendall(request_of(COMPLETION))
        assert response_of(client)[0] == 200
        client.sendall(b"GET /hea")
        assert response_of(client)[0] == 408


def test_a_body_that_does_not_come_is_a_408(hasty: Live) -> None:
    with connect(hasty) as client:
        client.sendall(request_of(COMPLETION)[:-5])
        status, answer = response_of(client)
        assert (status, answer["error"]["code"]) == (408, "request_timeout")
        assert f"{len(COMPLETION) - 5} bytes of the body" in answer["error"]["message"]
        assert closes(client)


def test_the_connection_that_has_waited_longest_makes_room(hasty: Live) -> None:
    with ExitStack() as stack:
        waiting = [stack.enter_context(connect(hasty)) for _ in range(5)]
        for client in waiting[:2]:
            status, answer = response_of(client)
            assert (status, answer["error"]["code"]) == (503, "too_many_connections")
        waiting[-1].sendall(request_of(COMPLETION))
        assert response_of(waiting[-1])[0] == 200


def test_where_all_connections_have_requests_a_new_one_is_a_503(hasty: Live) -> None:
    hasty.device.entered.clear()
    hasty.device.gate.clear()
    with ExitStack() as stack:
        busy = [stack.enter_context(connect(hasty)) for _ in range(3)]
        for client in busy:
            client.sendall(request_of(COMPLETION))
        while hasty.worker.num_cut_short < 3:
            pass
        late = stack.enter_context(connect(hasty))
        late.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        status, answer = response_of(late)
        assert (status, answer["error"]["code"]) == (503, "too_many_connections")
        probing = stack.enter_context(connect(hasty))
        probing.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert response_of(probing)[0] == 200  # a busy server is well
        hasty.device.gate.set()
        assert [response_of(client)[0] for client in busy] == [200] * 3


def send_for_ever(client: socket.socket, data: bytes) -> None:
    while True:
        client.sendall(data)


def test_who_reads_no_answers_is_cut_off(hasty: Live) -> None:
    """The client asks for metrics without end."""
    address = urlsplit(hasty.url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect((address.hostname, address.port))
        with pytest.raises(ConnectionError):
            send_for_ever(client, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 100)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as running:
        yield running


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_client_that_closes_its_own_side_gets_its_answer(
    server: Live, is_streaming: bool
) -> None:
    server.device.entered.clear()
    server.device.gate.clear()
    body = {"prompt": "abc", "max_tokens": 5, "stream": is_streaming}
    with connect(server) as client:
        client.sendall(request_of(json.dumps(body).encode()))
        client.shutdown(socket.SHUT_WR)
        assert server.device.entered.wait(10)
        threading.Timer(0.1, server.device.gate.set).start()
        response = http.client.HTTPResponse(client)
        response.begin()
        assert response.status == 200
        text = response.read().decode()
        assert "[DONE]" in text if is_streaming else json.loads(text)["usage"]
        assert closes(client)


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/nowhere"])
def test_an_answer_that_is_there_at_once_comes_after_the_client_has_closed_its_own_side(
    server: Live, path: str
) -> None:
    """It is complete, and not yet sent, when the server hears of the end."""
    for _ in range(20):
        with connect(server) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            client.shutdown(socket.SHUT_WR)
            response = http.client.HTTPResponse(client)
            response.begin()
            assert response.status == (404 if path == "/nowhere" else 200)
            assert response.read()
            assert closes(client)


@pytest.mark.parametrize("rest", [b"", b"GET /health HTTP/1.1\r\n"])
def test_all_requests_that_came_before_the_client_closed_its_own_side_are_answered(
    server: Live, rest: bytes
) -> None:
    """Of one that has come in part nobody knows what it asks for."""
    with connect(server) as client:
        client.sendall(3 * request_of(COMPLETION) + rest)
        client.shutdown(socket.SHUT_WR)
        told = client.makefile("rb").read()
    assert told.count(b"HTTP/1.1 200 OK") == told.count(b'"usage"') == 3


def test_a_client_that_is_gone_is_told_from_one_that_only_stops_sending(server: Live) -> None:
    server.device.gate.clear()
    with connect(server) as client:
        client.sendall(request_of(json.dumps({"prompt": "gone", "max_tokens": 500}).encode()))
        while server.worker.num_cut_short < 1:
            pass
    while server.worker.scheduler.num_unfinished < 1:
        server.device.gate.set()
    server.device.gate.set()
    while server.worker.num_cut_short:
        pass
    assert server.worker.records[-1].end_reason is EndReason.CLIENT


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"nonsense\r\n\r\n"],
)
def test_what_is_not_http_gets_an_error_in_the_same_format(server: Live, sent: bytes) -> None:
    with connect(server) as client:
        client.sendall(sent)
        status, answer = response_of(client)
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"
        assert "not HTTP" in answer["error"]["message"]
        assert closes(client)


def test_what_is_wrong_with_a_request_that_is_not_http_is_told(server: Live) -> None:
    with connect(server) as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\n\r\n")
        status, answer = response_of(client)
        assert (status, "Missing mandatory Host" in answer["error"]["message"]) == (400, True)
    with connect(server) as client:
        client.sendall(b"GET /secret\xff HTTP/1.1\r\nHost: x\r\n\r\n")
        assert response_of(client)[1]["error"]["message"].endswith(": illegal request line")


def test_headers_that_are_too_long_are_a_431(server: Live) -> None:
    with connect(server) as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\ncookie: " + b"a" * 2**16)
        status, answer = response_of(client)
        assert (status, answer["error"]["code"]) == (431, "headers_too_large")
        assert "more than 65536 bytes" in answer["error"]["message"]
        assert closes(client)


def test_a_body_of_two_lengths_cannot_smuggle_a_request(server: Live) -> None:
    lengths = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    with connect(server) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + lengths + b"\r\n"
        client.sendall(head + b"0\r\n\r\n" + smuggled)
        status, answer = response_of(client)
        assert (status, "Transfer-Encoding" in answer["error"]["message"]) == (400, True)
        assert closes(client)


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
def test_a_body_that_is_declared_far_too_large_is_refused_before_it_comes(
    server: Live, expect: bytes
) -> None:
    with connect(server) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\n"
        client.sendall(head + expect + b"\r\n")
        client.settimeout(5)
        status, answer = response_of(client)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert closes(client)


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://other/v1/models", 200),
        ("HTTP://other:80/v1/models?a=http://b/c", 200),
        ("https://other/v1/%6dodels", 200),
        ("http://other/health", 200),
        ("http://other", 200),
        ("http:///v1/models", 404),
        ("ftp://other/v1/models", 404),
    ],
)
def test_the_target_of_a_request_may_be_a_whole_url(server: Live, target: str, status: int) -> None:
    with connect(server) as client:
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        response = http.client.HTTPResponse(client)
        response.begin()
        assert response.status == status


SERVER_PROGRAM = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from slosched.engine.emulated import EmulatedExecutor
from slosched.engine.loop import Engine, MonotonicClock
from slosched.engine.server import ByteTokenizer, EngineWorker, ServerConfig, build_app, serve
from slosched.kv import KVCache
from slosched.perfmodel import LinearCoefficients, LinearModel
from slosched.policy import FCFS
from slosched.scheduler import Scheduler
model = LinearModel(LinearCoefficients(0, 0, 0, 0, 0, 0, 0.001))
scheduler = Scheduler(FCFS(), KVCache(64))
worker = EngineWorker(Engine(scheduler, EmulatedExecutor(model), MonotonicClock()))
app = build_app(worker, ByteTokenizer(), ServerConfig("m", 512))
serve(app, worker, port=0, on_ready=lambda url: print(url, flush=True))
"""


@pytest.mark.e2e
def test_more_silent_clients_than_descriptors_keep_nobody_out() -> None:
    with server_process(SERVER_PROGRAM) as (process, url), ExitStack() as stack:
        address = urlsplit(url)
        for _ in range(400):
            silent = socket.create_connection((address.hostname, address.port), timeout=20)
            stack.enter_context(silent).sendall(b"POST /v1/comp")
        for _ in range(10):
            connection = http.client.HTTPConnection(address.netloc, timeout=20)
            connection.request("POST", "/v1/completions", COMPLETION)
            assert connection.getresponse().status == 200
            connection.close()
        process.terminate()
        _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert err == ""


def test_the_same_message_passes_once_a_second() -> None:
    now_s = 100.0
    limit = OncePerSecond(lambda: now_s)

    def passes(text: str) -> str | None:
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, text, None, None)
        return record.getMessage() if limit.filter(record) else None

    assert passes("out of files\nsocket 7") == "out of files\nsocket 7"
    assert passes("out of files\nsocket 8") is None
    assert passes("another") == "another"
    now_s += 1
    assert passes("out of files") == "out of files (1 more like it since)"


def test_of_more_kinds_of_messages_than_are_kept_the_counts_are_forgotten() -> None:
    """Messages of ever new kinds would otherwise take ever more memory."""
    limit = OncePerSecond(lambda: 100.0)

    def passes(text: str) -> str | None:
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, text, None, None)
        return record.getMessage() if limit.filter(record) else None

    assert passes("first") == "first"
    assert passes("first") is None
    assert all(passes(f"kind {i}") for i in range(1000))
    assert passes("first") == "first"
