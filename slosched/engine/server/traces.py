"""OpenTelemetry spans: one for each request for text, sent to a collector over OTLP.

Names of spans and attributes are those of vLLM (`SpanAttributes` and `do_tracing` of 0.33), so that
dashboards over traces work; what vLLM does not have begins with `slosched.`.  As in vLLM, the
environment variable OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is `grpc` (the default) or `http/protobuf`,
and all times in attributes are in seconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

from slosched.core import DeadlineRule, EndReason, SloschedError
from slosched.engine.log_lines import REQUEST_ID
from slosched.engine.server.account import Account
from slosched.metrics import RequestRecord

_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_UNNAMED = "unknown_service"
_FAILED = (EndReason.FAULT, EndReason.TIMEOUT)


class TracesUnavailableError(SloschedError):
    """The packages for OpenTelemetry are not installed."""


class Traces:
    """Turns accounts into spans and sends them from a thread of its own, a few seconds later.

    A request whose header `traceparent` names a span becomes a child of that span.
    """

    def __init__(self, endpoint: str, rule: DeadlineRule) -> None:
        """Prepare to send to `endpoint`, such as http://localhost:4317; it need not be there yet.

        Raises TracesUnavailableError without the packages, ValueError for an unknown protocol.
        """
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            exporter = _exporter(endpoint)
        except ImportError as error:
            raise TracesUnavailableError(
                f"--otlp-traces-endpoint needs the otel extra ({error}): "
                "pip install 'slosched[otel]'"
            ) from error
        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith(_UNNAMED):
            resource = resource.merge(Resource({"service.name": "slosched"}))
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("slosched")
        self._propagator = TraceContextTextMapPropagator()
        self._rule = rule

    def __call__(self, account: Account) -> None:
        """Send a span for a request that is over."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(dict(account.headers)),
            kind=SpanKind.SERVER,
            start_time=_ns(account.began_s),
        )
        if span.is_recording():
            record = account.record(self._rule)
            span.set_attributes(
                {k: v for k, v in self._attributes(account, record) if v is not None}
            )
            reason = None if record is None else record.end_reason
            if account.status is None or account.status >= 500 or reason in _FAILED:
                why = account.error.get("message") or (reason and reason.value) or "no answer"
                span.set_status(Status(StatusCode.ERROR, str(why)))
        span.end(_ns(account.began_s + account.took_s))

    def close(self) -> None:
        """Send the spans that are left, and stop; the end of the process does the same."""
        self._provider.shutdown()

    def _attributes(
        self, account: Account, record: RequestRecord | None
    ) -> Iterator[tuple[str, Any]]:
        """Yield names and values of attributes, None for what is not known."""
        yield "http.request.method", account.method
        yield "url.path", account.path
        yield "http.response.status_code", account.status
        yield "slosched.http_request_id", REQUEST_ID.get()
        yield "gen_ai.response.model", account.model
        if account.options is not None:
            sampling = account.options.sampling
            yield "gen_ai.request.temperature", sampling.temperature
            yield "gen_ai.request.top_p", sampling.top_p
            yield "gen_ai.request.n", account.options.num_candidates
        if account.prompts:
            first, slo = account.prompts[0], account.slo
            yield "gen_ai.request.id", first.request_id
            yield "gen_ai.request.max_tokens", first.max_tokens
            num_prompt_tokens = sum(prompt.num_prompt_tokens for prompt in account.prompts)
            yield "gen_ai.usage.prompt_tokens", num_prompt_tokens
            yield "slosched.slo.ttft", _finite(slo.ttft_s)
            yield "slosched.slo.tpot", _finite(slo.tpot_s)
            yield "slosched.slo.e2e", slo.e2e_s
            yield "slosched.tier", first.tier
            yield "slosched.tenant", first.tenant
        if record is not None:
            yield from self._outcome(account, record)

    def _outcome(self, account: Account, record: RequestRecord) -> Iterator[tuple[str, Any]]:
        yield "gen_ai.usage.completion_tokens", account.num_output_tokens
        yield "gen_ai.latency.time_to_first_token", record.ttft_s
        yield "gen_ai.latency.e2e", record.e2e_s
        if (started_s := record.started_s) is not None:
            yield "gen_ai.latency.time_in_queue", started_s - record.arrival_s
            if record.token_times_s:
                first_s, last_s = record.token_times_s[0], record.token_times_s[-1]
                yield "gen_ai.latency.time_in_model_prefill", first_s - started_s
                yield "gen_ai.latency.time_in_model_decode", last_s - first_s
                yield "gen_ai.latency.time_in_model_inference", last_s - started_s
        num_cached_tokens = sum(prompt.num_cached_tokens for prompt in account.prompts)
        yield "slosched.usage.cached_tokens", num_cached_tokens
        yield "slosched.latency.expected_time_to_first_token", account.expected_ttft_s
        yield "slosched.num_preemptions", record.num_preemptions + record.num_swaps
        yield "slosched.relegated", account.is_relegated
        yield "slosched.good", account.is_good(record, self._rule)
        yield "slosched.end_reason", record.end_reason and record.end_reason.value


def _exporter(endpoint: str) -> Any:
    """Return an exporter for the protocol that the environment asks for."""
    protocol = os.environ.get(_PROTOCOL, "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter

        return trace_exporter.OTLPSpanExporter(endpoint=endpoint)
    raise ValueError(f"{_PROTOCOL} is grpc or http/protobuf, not {protocol!r}")


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
