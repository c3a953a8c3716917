"""The log of a server: one line for each request for text, in text or JSON, without its text."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live_server import Live, live, with_client
from test_server_faults import raw_request

from slosched.core import SLO
from slosched.engine.log_lines import (
    REQUEST_ID,
    JsonFormatter,
    StderrHandler,
    TextFormatter,
    log_fields,
)
from slosched.policy import FCFS, Door
from slosched.workload.service_tier import ServiceTier

CHAT = "/v1/chat/completions"
SECRET = "marzipan"
GOLD = ServiceTier("gold", SLO(20.0, 5.0))


class Lines(logging.Handler):
    """Keeps the formatted lines of a logger, and lets a test wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self._lines: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(self.format(record))

    def next(self) -> dict[str, Any]:
        line: dict[str, Any] = json.loads(self._lines.get(timeout=20))
        assert SECRET not in str(line)
        return line

    @property
    def is_empty(self) -> bool:
        return self._lines.empty()


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("slosched.requests")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    promises = {"default_slo": SLO(20.0, 5.0), "tiers": (GOLD,), "tenants": {"key": "acme"}}
    with live(Door(FCFS()), logs_requests=True, **promises) as running:  # type: ignore[arg-type]
        yield running


HEADERS = {"authorization": "Bearer key", "x-request-id": "mine"}


def ask(server: Live, path: str = "/v1/completions", **body: Any) -> tuple[int, str]:
    async def send(client: Any) -> tuple[int, str]:
        async with client.post(path, json=body, headers=HEADERS) as answer:
            return answer.status, await answer.text()

    return asyncio.run(with_client(server.url, send))


def test_a_line_says_who_asked_for_what_and_what_became_of_it(server: Live, lines: Lines) -> None:
    _, text = ask(server, prompt=SECRET, max_tokens=8, service_tier="gold", seed=1)
    line = lines.next()
    assert (line["message"], line["level"]) == ("POST /v1/completions", "INFO")
    assert (line["request_id"], line["id"]) == ("mine", json.loads(text)["id"])
    assert (line["tier"], line["tenant"], line["model"]) == ("gold", "acme", "echo")
    assert (line["prompt_tokens"], line["output_tokens"], line["cached_tokens"]) == (8, 8, 0)
    assert (line["status"], line["end_reason"], line["good"]) == (200, "length", True)
    assert (line["slo_ttft_ms"], line["slo_tpot_ms"]) == (20_000, 5_000)
    assert "slo_e2e_ms" not in line
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["duration_ms"] + 0.01
    assert 0 < line["tpot_ms"] <= line["duration_ms"]
    assert line["expected_ttft_ms"] > 0
    assert lines.is_empty


def test_a_stream_and_several_answers_have_one_line(server: Live, lines: Lines) -> None:
    ask(server, CHAT, messages=[{"role": "user", "content": SECRET}], max_tokens=3, stream=True)
    line = lines.next()
    assert (line["message"], line["output_tokens"]) == (f"POST {CHAT}", 3)
    ask(server, prompt=[SECRET, "abc"], n=2, max_tokens=4, temperature=1)
    line = lines.next()
    assert (line["prompt_tokens"], line["output_tokens"]) == (len(SECRET) + 3, 2 * 2 * 4)
    assert line["end_reason"] == "length"
    assert lines.is_empty


def test_a_stop_string_is_the_end_although_the_engine_hears_of_it_later(
    server: Live, lines: Lines
) -> None:
    assert ask(server, prompt="abcdef", stop="cd", max_tokens=300)[0] == 200
    assert lines.next()["end_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "x", "max_tokens": 0}, {"status": 400, "param": "max_tokens"}),
        ({"prompt": [SECRET, {"a": SECRET}]}, {"status": 400, "param": "prompt"}),
        (
            {"prompt": SECRET, "model": "other"},
            {"status": 404, "code": "model_not_found", "param": "model"},
        ),
        (
            {"prompt": SECRET, "slo_ttft_ms": 0.001},
            {"status": 429, "code": "slo_infeasible", "end_reason": "unkeepable", "good": False},
        ),
    ],
)
def test_refusals_have_a_line_with_the_error(
    server: Live, lines: Lines, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    ask(server, **body)
    line = lines.next()
    assert {name: line.get(name) for name in expected} == expected
    assert line["level"] == "INFO"
    assert "ttft_ms" not in line


def test_requests_without_a_key_have_a_line_and_probes_have_none(
    server: Live, lines: Lines
) -> None:
    server.get("/health")
    server.get("/metrics")
    assert server.post(prompt="x")[0] == 401
    line = lines.next()
    assert (line["status"], line["code"]) == (401, "invalid_api_key")
    assert lines.is_empty


def test_a_fault_is_a_warning(lines: Lines) -> None:
    with live(logs_requests=True) as server:
        server.device.fault = RuntimeError(SECRET)
        assert server.post(prompt=SECRET)[0] == 500
        line = lines.next()
        assert (line["level"], line["status"], line["end_reason"]) == ("WARNING", 500, "fault")
        assert "good" not in line, "it had no SLO"


def test_a_client_that_leaves_has_a_line_with_what_it_got(lines: Lines) -> None:
    with live(logs_requests=True, max_model_len=1024) as server:
        with raw_request(server, {"prompt": "abc", "max_tokens": 900, "stream": True}) as client:
            client.recv(100)
        line = lines.next()
        assert line["end_reason"] == "client"
        assert 1 <= line["output_tokens"] < 900


def test_a_request_served_without_its_slo_says_so(lines: Lines) -> None:
    with live(Door(FCFS()), logs_requests=True) as server:
        assert server.post(prompt="abc", slo_ttft_ms=0.001, on_infeasible="relegate")[0] == 200
        line = lines.next()
        assert (line["relegated"], line["good"], line["slo_ttft_ms"]) == (True, False, 0.0)


def test_no_lines_where_they_are_switched_off(lines: Lines) -> None:
    with live(logs_requests=False) as server:
        assert server.post(prompt="abc", max_tokens=2)[0] == 200
    assert lines.is_empty


def record_of(message: str, fields: dict[str, object], *, with_error: bool) -> logging.LogRecord:
    made: list[logging.LogRecord] = []
    logger = logging.Logger("some.logger")
    logger.handle = made.append  # type: ignore[method-assign]
    log_fields(logger, logging.ERROR, message, fields)
    [record] = made
    if with_error:
        try:
            raise KeyError("a bug")
        except KeyError:
            record.exc_info = sys.exc_info()
    return record


TRICKY: dict[str, object] = {"a": 1.5, "b": "x y=1", "c": "", "d": True, "e": 'q"\n', "f": "p/q-r"}


def test_text_cannot_be_mistaken_for_other_fields() -> None:
    token = REQUEST_ID.set('id"] forged=1')
    try:
        line = TextFormatter().format(record_of("100 % done", TRICKY, with_error=False))
    finally:
        REQUEST_ID.reset(token)
    assert re.fullmatch(
        r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ERROR some\.logger \["id\\"\] forged=1"\] '
        r'100 % done a=1\.5 b="x y=1" c="" d=true e="q\\"\\n" f=p/q-r',
        line,
    )


def test_json_is_one_line_even_with_a_traceback() -> None:
    line = JsonFormatter().format(record_of("m", TRICKY, with_error=True))
    document = json.loads(line)
    assert "\n" not in line
    assert TRICKY.items() <= document.items()
    assert "request_id" not in document
    assert document["exception"].endswith("KeyError: 'a bug'")
    assert TextFormatter().format(record_of("m", {}, with_error=True)).endswith("KeyError: 'a bug'")


@contextmanager
def stderr_at(path: str) -> Iterator[None]:
    """Let this process's stderr be another file until the end of the block."""
    before, there = os.dup(2), os.open(path, os.O_WRONLY)
    os.dup2(there, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(there)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_full_disk_is_told_once_and_counted(
    formatter: logging.Formatter, capfd: pytest.CaptureFixture[str]
) -> None:
    logger, handler = logging.Logger("some.logger"), StderrHandler()
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    logger.warning("one")
    with stderr_at("/dev/full"):
        logger.warning("two")
        logger.warning("three")
    logger.warning("four")
    logger.warning("five")
    out, err = capfd.readouterr()
    assert out.splitlines() == [
        "the log cannot be written (No space left on device); serving goes on without it"
    ]
    first, missing, *others = err.splitlines()
    assert "one" in first
    assert "2 log lines are missing here" in missing
    assert [line.count("four") + 2 * line.count("five") for line in others] == [1, 2]
    assert handler.num_missing == 2
