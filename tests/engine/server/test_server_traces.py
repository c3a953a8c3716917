"""Spans of requests, as a collector receives them over OTLP."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import grpc
import pytest
from command_line import serving
from live_server import Live, live
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from small_server import answering

from slosched.core import SLO, DeadlineRule
from slosched.engine.server import Traces
from slosched.engine.server.traces import TracesUnavailableError
from slosched.policy import FCFS, Door
from slosched.workload.service_tier import ServiceTier

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
GOLD = ServiceTier("gold", SLO(20.0, 5.0))


class Collector(TraceServiceServicer):
    """Takes spans from either protocol."""

    def __init__(self) -> None:
        self.spans: queue.Queue[tuple[str, Span]] = queue.Queue()
        """The name of a service, and one of its spans."""

    def Export(self, request: Any, _context: Any) -> Any:  # noqa: N802  # as gRPC calls it
        self.take(request)
        return ExportTraceServiceResponse()

    def take(self, request: Any) -> None:
        for of_resource in request.resource_spans:
            [name] = [a.value for a in of_resource.resource.attributes if a.key == "service.name"]
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    self.spans.put((name.string_value, span))

    def next(self) -> Span:
        name, span = self.spans.get(timeout=20)
        assert (name, span.name, span.kind) == ("slosched", "llm_request", Span.SPAN_KIND_SERVER)
        return span


@contextmanager
def over_grpc(collector: Collector) -> Iterator[str]:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        add_TraceServiceServicer_to_server(collector, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"http://127.0.0.1:{port}"
        server.stop(None).wait()


@contextmanager
def over_http(collector: Collector) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            collector.take(ExportTraceServiceRequest.FromString(self.rfile.read(length)))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()

    with answering(Handler) as url:
        yield f"{url}/v1/traces"


@pytest.fixture(params=["grpc", "http/protobuf"])
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(PROTOCOL, request.param)
    return str(request.param)


@contextmanager
def traced(protocol: str = "grpc") -> Iterator[tuple[Live, Collector]]:
    """Yield a server and a collector, which has all spans at the end of the block."""
    collector = Collector()
    with (over_grpc if protocol == "grpc" else over_http)(collector) as url:
        traces = Traces(url, DeadlineRule.MEAN_TPOT)
        tenants = {"KEY": "acme"}
        with live(Door(FCFS()), tiers=(GOLD,), tenants=tenants, reporters=[traces]) as server:
            yield server, collector
        traces.close()


def value_of(value: AnyValue) -> Any:
    return getattr(value, str(value.WhichOneof("value")))


def attributes(span: Span) -> dict[str, Any]:
    return {attribute.key: value_of(attribute.value) for attribute in span.attributes}


HEADERS = {"authorization": "Bearer KEY", "x-request-id": "mine"}


def test_a_span_has_what_vllm_tells_and_the_promise(protocol: str) -> None:
    with traced(protocol) as (server, collector):
        body = {"prompt": "abc", "max_tokens": 9, "temperature": 0.5, "top_p": 0.75}
        headers = {**HEADERS, **TRACEPARENT}
        status, answer = server.post_with(headers, **body, service_tier="gold")
    assert status == 200
    span = collector.next()
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert span.status.code == Status.STATUS_CODE_UNSET
    found = attributes(span)
    times = {name: found.pop(name) for name in [*found] if ".latency." in name}
    assert found == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "slosched.http_request_id": "mine",
        "gen_ai.response.model": "echo",
        "gen_ai.request.id": answer["id"],
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 9,
        "slosched.slo.ttft": 20.0,
        "slosched.slo.tpot": 5.0,
        "slosched.tier": "gold",
        "slosched.tenant": "acme",
        "slosched.usage.cached_tokens": 0,
        "slosched.num_preemptions": 0,
        "slosched.relegated": False,
        "slosched.good": True,
        "slosched.end_reason": "length",
    }
    assert times.keys() == {
        "gen_ai.latency.time_in_queue",
        "gen_ai.latency.time_to_first_token",
        "gen_ai.latency.e2e",
        "gen_ai.latency.time_in_model_prefill",
        "gen_ai.latency.time_in_model_decode",
        "gen_ai.latency.time_in_model_inference",
        "slosched.latency.expected_time_to_first_token",
    }
    parts = ("prefill", "decode")
    inference_s = sum(times[f"gen_ai.latency.time_in_model_{part}"] for part in parts)
    assert times["gen_ai.latency.time_in_model_inference"] == pytest.approx(inference_s)
    e2e_s = times["gen_ai.latency.time_in_queue"] + inference_s
    assert times["gen_ai.latency.e2e"] == pytest.approx(e2e_s)
    took_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert took_s >= times["gen_ai.latency.time_to_first_token"] > 0


def test_refusals_are_spans_and_failures_are_errors() -> None:
    with traced() as (server, collector):
        assert server.post_with(HEADERS, prompt="abc", slo_ttft_ms=0.001)[0] == 429
        assert server.post_with(HEADERS, prompt="abc", max_tokens=-1)[0] == 400
        server.device.fault = RuntimeError("the device fell off the bus")
        assert server.post_with(HEADERS, prompt="abc")[0] == 500
    spans = [collector.next() for _ in range(3)]
    refused, wrong, failed = sorted(spans, key=lambda span: span.start_time_unix_nano)
    assert collector.spans.empty()
    found = attributes(refused)
    assert (found["slosched.end_reason"], found["slosched.good"]) == ("unkeepable", False)
    assert "gen_ai.latency.time_to_first_token" not in found
    assert refused.status.code == wrong.status.code == Status.STATUS_CODE_UNSET
    assert len(refused.parent_span_id) == 0
    assert attributes(wrong)["http.response.status_code"] == 400
    assert "gen_ai.request.id" not in attributes(wrong)
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert "fell off the bus" in failed.status.message


def test_a_parent_that_is_not_sampled_has_no_spans_below_it() -> None:
    with traced() as (server, collector):
        unsampled = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
        assert server.post_with({**HEADERS, **unsampled}, prompt="a", max_tokens=1)[0] == 200
        assert (
            server.post_with({**HEADERS, "traceparent": "?"}, prompt="ab", max_tokens=1)[0] == 200
        )
    assert attributes(collector.next())["gen_ai.usage.prompt_tokens"] == 2
    assert collector.spans.empty()


@pytest.mark.e2e
def test_the_command_line_sends_spans_until_its_end() -> None:
    collector = Collector()
    env = {**os.environ, PROTOCOL: "grpc", "OTEL_SERVICE_NAME": "mine"}
    with over_grpc(collector) as url:
        emulated = ("--emulate", "rtx4090/llama-3.1-8b", "--otlp-traces-endpoint", url)
        with serving(*emulated, env=env) as server:
            assert server.post(headers=TRACEPARENT, prompt="abc", max_tokens=2)[0] == 200
            assert server.terminate()[0] == 0
    name, span = collector.spans.get(timeout=20)
    assert (name, span.trace_id.hex()) == ("mine", TRACE_ID)
    assert attributes(span)["slosched.slo.ttft"] == 1.0


def test_missing_packages_and_unknown_protocols_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROTOCOL, "carrier pigeon")
    with pytest.raises(ValueError, match="grpc or http/protobuf, not 'carrier pigeon'"):
        Traces("http://localhost:4317", DeadlineRule.MEAN_TPOT)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(TracesUnavailableError, match=r"pip install 'slosched\[otel\]'"):
        Traces("http://localhost:4317", DeadlineRule.MEAN_TPOT)
