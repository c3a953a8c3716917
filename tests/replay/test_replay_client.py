"""Tests of the open-loop client against real servers: ours, broken ones, and none."""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
from live_server import MODEL, live

from slosched.cli.commands.replay import replay_live
from slosched.core import (
    NO_SLO,
    SLO,
    DeadlineRule,
    EndReason,
    Limits,
    OnInfeasible,
    RequestStatus,
)
from slosched.metrics import RequestRecord, is_good, summarize
from slosched.policy import FCFS
from slosched.policy.kit.drop import Drop
from slosched.replay.client import ReplayError, ReplayOptions, replay
from slosched.workload.trace import Trace, TraceRequest

NO_WARMUP = ReplayOptions(num_warmup=0)


def make_trace(n: int, gap_s: float = 0.005, prompt: int = 20, slo: SLO = NO_SLO) -> Trace:
    return Trace.of(
        [TraceRequest(f"t{i}", i * gap_s, prompt + i % 7, 1 + i % 9, slo) for i in range(n)], "test"
    )


def test_every_request_has_one_record_with_forced_lengths() -> None:
    trace = make_trace(100, slo=SLO(9.0, 3.0, 12.5))
    seen: list[RequestRecord] = []
    with live() as server:
        report = replay(trace, server.url, ReplayOptions(model=MODEL), on_record=seen.append)
        assert not report.errors
        assert [r.request_id for r in report.records] == [r.request_id for r in trace.requests]
        assert sorted(r.request_id for r in seen) == sorted(r.request_id for r in report.records)
        for record, request in zip(report.records, trace.requests, strict=True):
            assert (record.status, record.end_reason) == (
                RequestStatus.FINISHED,
                EndReason.LENGTH,
            )
            assert record.num_output_tokens == request.num_output_tokens
            assert record.arrival_s == request.arrival_s
            assert record.slo == request.slo
            assert record.arrival_s < record.token_times_s[0]
            assert all(a <= b for a, b in pairwise(record.token_times_s))
        served = list(server.worker.records)[3:]  # without the warm-up
        # Sorted, since requests a few milliseconds apart may overtake each other on the way.
        assert sorted((r.num_prompt_tokens, r.num_output_tokens) for r in served) == sorted(
            (r.num_prompt_tokens, r.num_output_tokens) for r in trace.requests
        )
        assert {r.slo for r in served} == {SLO(9.0, 3.0, 12.5)}


def test_priorities_travel_and_adapters_as_far_as_the_server_has_them() -> None:
    trace = make_trace(12)
    requests = [
        replace(r, priority=i % 3 - 1, lora_id="sql" if i < 4 else None)
        for i, r in enumerate(trace.requests)
    ]
    with live() as server:
        report = replay(Trace.of(requests, "marked"), server.url, NO_WARMUP)
        served = list(server.worker.records)
    assert {r.status for r in report.records} == {RequestStatus.FINISHED}
    assert [r.priority for r in report.records] == [r.priority for r in requests]
    assert sorted(r.priority for r in served) == sorted(r.priority for r in requests)
    # Our server loads no adapters: the base model serves all of them, and the report says so.
    assert {r.lora_id for r in report.records} == {None}
    assert report.errors == {f"its LoRA adapter is not there: served by {MODEL}": 4}


def test_programs_are_scored_and_records_say_whose_requests_they_are() -> None:
    """A replay with a promise for whole sessions said nothing of it."""
    requests = [
        replace(r, session_id=f"s{i % 2}", program_s=600.0, tier="gold", tenant="acme")
        for i, r in enumerate(make_trace(6).requests)
    ]
    with live() as server:
        report = replay(Trace.of(requests, "sessions"), server.url, NO_WARMUP)
    for record, request in zip(report.records, requests, strict=True):
        assert (record.session_id, record.program_s) == (request.session_id, 600.0)
        assert (record.tier, record.tenant) == ("gold", "acme")
    summary = summarize(report.records, DeadlineRule.MEAN_TPOT)
    assert (summary.num_programs, summary.program_attainment) == (2, 1.0)


def test_what_becomes_of_late_requests_travels() -> None:
    """A TTFT that nothing can keep is rejected, unless its request takes a late answer."""
    requests = [
        replace(r, slo=SLO(1e-6, 3.0), on_infeasible=asked)
        for r, asked in zip(make_trace(3).requests, OnInfeasible, strict=True)
    ]
    with live(FCFS(drop=Drop.INFEASIBLE)) as server:
        report = replay(Trace.of(requests, "late"), server.url, NO_WARMUP)
    done = RequestStatus.FINISHED
    assert [r.status for r in report.records] == [RequestStatus.REJECTED, done, done]
    assert [r.is_relegated for r in report.records] == [False, True, False]
    assert {r.slo.ttft_s for r in report.records} == {1e-6}


def test_it_is_open_loop() -> None:
    """Check that requests keep coming while the device stands still, and that their wait counts."""
    trace = make_trace(20, gap_s=0.01)
    with live() as server:
        server.device.gate.clear()
        worker, num_seen = server.worker, 0

        def open_when_all_are_there() -> None:
            nonlocal num_seen
            deadline_s = time.monotonic() + 20  # sooner than the device gives up
            while num_seen < 20 and time.monotonic() < deadline_s:
                num_seen = worker.scheduler.num_unfinished + len(worker._inbox)
                time.sleep(0.01)
            server.device.gate.set()

        opener = threading.Thread(target=open_when_all_are_there)
        opener.start()
        report = replay(trace, server.url, NO_WARMUP)
        opener.join()
        assert num_seen == 20, "all of them came during the pause"
        assert report.records[0].token_times_s[0] > trace.requests[-1].arrival_s
        assert {r.status for r in report.records} == {RequestStatus.FINISHED}


def test_more_requests_than_a_process_may_have_files_at_first_reach_the_server() -> None:
    """Those beyond 1,024 at once counted as failures of the server."""
    trace = make_trace(100, gap_s=0.001)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with live() as server:
        server.device.gate.clear()
        opener = threading.Timer(1.0, server.device.gate.set)
        opener.start()
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 40, hard))
        try:
            report = replay(trace, server.url, NO_WARMUP)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        opener.join()
    assert not report.errors
    assert {r.status for r in report.records} == {RequestStatus.FINISHED}


def test_late_sends_are_counted_and_count_against_the_server() -> None:
    trace = make_trace(5, gap_s=0.0)
    with live() as server:
        report = replay(trace, server.url, ReplayOptions(num_warmup=0, late_after_s=0.0))
        assert report.num_late_sends >= 4  # making five bodies takes time
        assert report.max_lateness_s > 0
        assert all(r.arrival_s == 0 for r in report.records)


def test_rejections_carry_their_reason() -> None:
    trace = make_trace(10, slo=SLO(1e-6, 1.0))
    with live(FCFS(drop=Drop.INFEASIBLE)) as server:
        report = replay(trace, server.url)  # the warm-up carries no SLO
    assert {r.status for r in report.records} == {RequestStatus.REJECTED}
    assert {r.end_reason for r in report.records} <= {EndReason.EXPIRED, EndReason.INFEASIBLE}
    assert not report.errors


def test_a_prompt_that_is_too_long_is_rejected_as_in_the_simulator() -> None:
    trace = Trace.of(
        [TraceRequest("long", 0.0, 600, 5), TraceRequest("short", 0.01, 5, 5)], "lengths"
    )
    with live() as server:
        report = replay(trace, server.url)
    assert [r.end_reason for r in report.records] == [EndReason.TOO_LONG, EndReason.LENGTH]


def test_faults_in_the_midst_are_aborts_with_a_count() -> None:
    trace = make_trace(10, gap_s=0.0)
    with live() as server:
        server.device.fault = RuntimeError("broken")
        report = replay(trace, server.url, NO_WARMUP)
        server.device.fault = None
    assert {(r.status, r.end_reason) for r in report.records} == {
        (RequestStatus.ABORTED, EndReason.FAULT)
    }
    assert sum(report.errors.values()) == 10
    assert all("HTTP 500" in error for error in report.errors)


def test_a_full_server_and_one_that_ends_late_requests_are_told_from_broken_ones() -> None:
    """The first looked as if it shut down, the other as if its device failed."""
    trace = make_trace(3, gap_s=0.0)
    with live(request_timeout_s=0.3, max_requests=1) as server:
        server.device.gate.clear()
        report = replay(trace, server.url, NO_WARMUP)
        server.device.gate.set()
    ends = sorted((r.status, r.end_reason) for r in report.records)
    full = (RequestStatus.REJECTED, EndReason.QUEUE_FULL)
    assert ends == [(RequestStatus.ABORTED, EndReason.TIMEOUT), full, full]


def test_what_does_not_end_in_time_is_given_up_and_freed() -> None:
    trace = make_trace(4, gap_s=0.0)
    with live(limits=Limits(max_num_seqs=2)) as server:
        server.device.gate.clear()
        report = replay(trace, server.url, ReplayOptions(num_warmup=0, drain_timeout_s=0.3))
        assert {(r.status, r.end_reason) for r in report.records} == {
            (RequestStatus.ABORTED, EndReason.CLIENT)
        }
        assert report.errors == {"not ended in time, given up": 4}
        server.device.gate.set()
        for _ in range(4):
            server.device.released.get(timeout=10)
        assert server.num_held_blocks == 0


def test_a_client_with_a_timeout_disconnects_and_the_server_frees_its_request() -> None:
    """The first request has its answer in time; the others wait behind a device that stands."""
    trace = Trace.of([TraceRequest(f"t{i}", 0.4 * i, 20, 1) for i in range(3)], "test")
    options = ReplayOptions(num_warmup=1, client_timeout_s=0.3)
    with live() as server:

        def stand_still(record: RequestRecord) -> None:
            if record.status is RequestStatus.FINISHED:
                server.device.gate.clear()

        report = replay(trace, server.url, options, on_record=stand_still)
        assert [r.end_reason for r in report.records] == [
            *(EndReason.LENGTH, EndReason.CLIENT, EndReason.CLIENT)
        ]
        assert report.errors == {"no answer after 0.3 s, given up": 2}
        for record in report.records[1:]:
            assert record.end_s is not None
            assert record.end_s >= record.arrival_s + 0.3
            assert not record.token_times_s
        server.device.gate.set()
        for _ in range(4):  # the warm-up and all three
            server.device.released.get(timeout=10)
        assert server.num_held_blocks == 0


def test_no_server_and_the_wrong_model() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ReplayError, match="slosched serve"):
        replay(make_trace(2), f"http://127.0.0.1:{port}")
    with live() as server:
        with pytest.raises(ReplayError, match=f"serves {MODEL}, not 'gpt-9'"):
            replay(make_trace(2), server.url, ReplayOptions(model="gpt-9"))
        server.device.fault = RuntimeError("broken")
        with pytest.raises(ReplayError, match="warm-up request with HTTP 500"):
            replay(make_trace(2), server.url)


def test_a_server_that_asks_for_a_key_is_given_it() -> None:
    trace = make_trace(3)
    with live(api_keys=("secret",)) as server:
        with pytest.raises(ReplayError, match=r"asks for a key \(HTTP 401\).*--api-key"):
            replay(trace, server.url)
        with pytest.raises(ReplayError, match="asks for another key"):
            replay(trace, server.url, ReplayOptions(api_key="guessed"))
        report = replay(trace, server.url, ReplayOptions(api_key="secret"))
    assert [r.status for r in report.records] == [RequestStatus.FINISHED] * 3


def test_a_server_of_another_kind_is_not_said_to_be_absent() -> None:
    with live() as server, pytest.raises(ReplayError, match=r"answer \(HTTP 404"):
        replay(make_trace(2), f"{server.url}/elsewhere")


MODELS = b'{"data": [{"id": "m"}]}'
FIRST_TOKEN = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
LAST_TOKEN = b'data: {"choices": [{"text": "b", "finish_reason": "length"}]}\n\n'
NO_TOKEN = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
JOINED_TOKENS = (
    b'data: {"choices": [{"text": "ab", "finish_reason": "length"}], '
    b'"usage": {"completion_tokens": 2}}\n\n'
)
TOTAL = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'


@contextmanager
def scripted_server(
    answer: bytes,
    content_type: bytes = b"text/event-stream",
    models: bytes = MODELS,
    status: bytes = b"200 OK",
) -> Iterator[str]:
    """Run a server that answers every POST with the same bytes and closes the connection."""

    def talk() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as lines:
                is_get = lines.readline().startswith(b"GET")
                length = 0
                while (line := lines.readline().strip()) != b"":
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                lines.read(length)
                post = (status, content_type, answer)
                connection.sendall(
                    b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: %b\r\n\r\n%b"
                    % ((b"200 OK", b"application/json", models) if is_get else post)
                )

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=talk)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    ("answer", "status", "num_tokens", "error"),
    [
        (FIRST_TOKEN + LAST_TOKEN + b"data: [DONE]\n\n", "finished", 2, None),
        (b": comment\n\n" + FIRST_TOKEN + LAST_TOKEN, "finished", 2, None),
        (JOINED_TOKENS + b"data: [DONE]\n\n", "finished", 2, None),
        (LAST_TOKEN + TOTAL + b"data: [DONE]\n\n", "finished", 2, None),
        (2 * FIRST_TOKEN + NO_TOKEN + TOTAL + b"data: [DONE]\n\n", "finished", 2, None),
        (LAST_TOKEN + b"data: [DONE]\n\n", "finished", 1, "another number of tokens"),
        (FIRST_TOKEN, "aborted", 1, "stream ended"),
        (FIRST_TOKEN + b"data: [DONE]\n\n", "aborted", 1, "stream ended"),
        (FIRST_TOKEN + b'data: {"error": {"code": "oops"}}\n\n', "aborted", 1, "oops"),
        (b"data: {nonsense\n\n", "aborted", 0, "unreadable"),
        (b"data: [1]\n\n", "aborted", 0, "unreadable"),
        (b"", "aborted", 0, "stream ended"),
    ],
)
def test_other_servers_and_broken_streams(
    answer: bytes, status: str, num_tokens: int, error: str | None
) -> None:
    trace = Trace.of([TraceRequest("a", 0.0, 5, 2)], "one")
    with scripted_server(answer) as url:
        report = replay(trace, url, NO_WARMUP)
    [record] = report.records
    assert (record.status, record.num_output_tokens) == (status, num_tokens)
    assert [error in message for message in report.errors] == ([True] if error else [])


@pytest.mark.parametrize(
    ("last", "end"),
    [
        (b'"finish_reason": "abort"', (RequestStatus.ABORTED, EndReason.FAULT)),
        (
            b'"finish_reason": "error", "stop_reason": null',
            (RequestStatus.ABORTED, EndReason.FAULT),
        ),
        (
            b'"finish_reason": "abort", "stop_reason": "slo_rejected:expired;retry_after_ms=1000"',
            (RequestStatus.REJECTED, EndReason.EXPIRED),
        ),
    ],
)
def test_what_a_server_gives_up_in_the_midst_has_not_finished(
    last: bytes, end: tuple[RequestStatus, EndReason]
) -> None:
    """With its first token in time, and no other promise, such a request counted as good."""
    trace = Trace.of([TraceRequest("a", 0.0, 5, 9, SLO(60.0, math.inf))], "one")
    usage = b'"usage": {"completion_tokens": 1}'
    piece = b'data: {"choices": [{"text": "", %b}], %b}\n\n' % (last, usage)
    with scripted_server(FIRST_TOKEN + piece + b"data: [DONE]\n\n") as url:
        report = replay(trace, url, NO_WARMUP)
    [record] = report.records
    assert ((record.status, record.end_reason), record.num_output_tokens) == (end, 1)
    assert [*report.errors.values()] == [1] * (end[0] is RequestStatus.ABORTED)
    assert not is_good(record, DeadlineRule.MEAN_TPOT)


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 8 tokens. However, your prompt contains 9 input "
        "tokens, which exceeds this limit even without any output tokens.",
        "The decoder prompt (length 9) is longer than the maximum model length of 8.",
        "The input (9 tokens) is longer than the model's context length (8 tokens).",
        "request (9 tokens) exceeds the available context size (8 tokens), try increasing it",
    ],
)
def test_a_prompt_that_is_too_long_for_another_server_is_rejected_as_by_ours(message: str) -> None:
    """Only our own code was known: one among the first requests of a trace kept it from starting."""
    answer = json.dumps({"error": {"message": message, "code": 400}}).encode()
    with scripted_server(answer, b"application/json", status=b"400 Bad Request") as url:
        report = replay(make_trace(2), url)
    assert {r.end_reason for r in report.records} == {EndReason.TOO_LONG}
    assert not report.errors


def test_a_server_without_models_is_said_to_have_none() -> None:
    with scripted_server(b"", models=b'{"data": []}') as url:
        for model in (None, "m"):
            with pytest.raises(ReplayError, match="serves no model now: a router"):
                replay(make_trace(2), url, ReplayOptions(model=model))


def test_an_error_with_brackets_is_told_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace.of([TraceRequest("a", 0.0, 5, 2)], "one")
    answer = FIRST_TOKEN + b'data: {"error": {"code": "no [type=int] in [/v1]"}}\n\n'
    with scripted_server(answer) as url:
        [record] = replay_live(trace, url, seed=0)
    assert record.num_output_tokens == 1
    assert "no [type=int] in [/v1]" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_range": (5, 5)},
        {"token_range": (-1, 5)},
        {"late_after_s": -1.0},
        {"client_timeout_s": 0.0},
    ],
)
def test_options_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ReplayOptions(**wrong)  # type: ignore[arg-type]
