"""A replay of a trace against a running server, open loop.

Each request is sent at its scheduled arrival, even if earlier ones have not ended.  Its times count
from that arrival, so that a client that falls behind does not flatter the server (coordinated
omission).  Nothing is retried.  It works with any OpenAI-compatible server that knows `ignore_eos`
(ours, vLLM, SGLang).  Tokens are counted by the server's `usage`, since busy servers join several
tokens into one chunk of a stream.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

import aiohttp

from slosched.core import NO_SLO, SLO, EndReason, OnInfeasible, RequestStatus, SloschedError
from slosched.engine.server.connection import raise_descriptor_limit
from slosched.metrics import RequestRecord
from slosched.replay.keys import KEY_STATUSES, key_headers, why_no_key
from slosched.replay.prompts import PLAIN_IDS, plain_prompt
from slosched.workload.http_slo import (
    BEST_EFFORT_HEADER,
    ON_INFEASIBLE_FIELD,
    REJECTED,
    slo_headers,
)
from slosched.workload.trace import Trace, TraceRequest

_LEAD_S = 0.05
"""The time from the end of the warm-up to the first arrival."""
_KEEPALIVE_S = 2.0
"""Shorter than any server's limit, so that no request uses a connection that is just closing."""
_PROBE_TIMEOUT_S = 10.0
_WARMUP_OUTPUT_TOKENS = 4
_LAST_PLAIN_ID = 10_000
"""The end of the plain ids: special tokens are at the beginning or the end of a vocabulary."""
_TOO_MANY = ("too_many_requests", "too_many_connections")
"""Codes of our server for requests that it does not let in beside those that it has."""
_NOT_FINISHED = ("abort", "error")
"""Values of `finish_reason` by which vLLM and SGLang say that they gave a request up."""
_TOO_LONG = re.compile("context[ _]length|context size|model length")
"""What servers say of a request that their model is too short for: ours (in the code of the error),
vLLM and SGLang, llama.cpp, and vLLM again (in its message)."""

OnRecord = Callable[[RequestRecord], None]


class ReplayError(SloschedError):
    """There is no server to replay against, or it is not the one that was meant."""


@dataclass(frozen=True)
class ReplayReport:
    """The result of a replay; times in the records count from its start, as in the trace."""

    records: list[RequestRecord]
    """One for each request of the trace, in its order."""
    num_late_sends: int
    """Requests that the client itself sent at least `late_after_s` later than it should have."""
    max_lateness_s: float
    errors: Mapping[str, int] = field(default_factory=dict)
    """Counts of what else went wrong, by description; requests lost that way are ABORTED."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of a replay."""

    model: str | None = None
    """The model to ask for; None takes the first that the server names."""
    api_key: str | None = None
    """The key that the server asks for."""
    seed: int = 0
    """The seed of the random prompts."""
    token_range: tuple[int, int] | None = None
    """Prompt ids are drawn from [low, high); None for ids that are plain in every vocabulary."""
    num_warmup: int = 3
    """Requests of the trace's lengths that are sent one by one before the start."""
    client_timeout_s: float | None = None
    """Time from its arrival after which a request without its whole answer is disconnected."""
    drain_timeout_s: float = 600.0
    """Time after the last arrival at which requests still running are given up (ABORTED)."""
    late_after_s: float = 0.01
    """The delay from which on a send counts as late."""

    def __post_init__(self) -> None:
        if self.token_range is not None and not 0 <= self.token_range[0] < self.token_range[1]:
            raise ValueError(f"token_range must be 0 <= low < high, not {self.token_range!r}")
        if self.client_timeout_s is not None and not self.client_timeout_s > 0:
            raise ValueError(f"client_timeout_s must be positive, but is {self.client_timeout_s!r}")
        for name in ("num_warmup", "drain_timeout_s", "late_after_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)!r}")


def replay(
    trace: Trace,
    base_url: str,
    options: ReplayOptions | None = None,
    *,
    on_record: OnRecord | None = None,
) -> ReplayReport:
    """Send `trace` to the server at `base_url` and wait until every request has ended.

    Prompts are random token ids, and outputs are forced to the trace's lengths.  SLOs are sent as
    headers; a request without one is served under the server's default.  A priority is sent in the
    body.  A LoRA adapter is asked for as the model, if the server lists one of its name.  Otherwise
    the base model serves the request, and the report counts it.  `on_record` is called when a
    request ends.

    Raises ReplayError if the server does not answer, asks for another key than that of `options`,
    has another model or refuses the warm-up, or if a request of the trace waits for the end of
    another (`think_s`) or wants several answers (`n`), which this client cannot tell apart.
    """
    return asyncio.run(replay_async(trace, base_url, options, on_record=on_record))


async def replay_async(
    trace: Trace,
    base_url: str,
    options: ReplayOptions | None = None,
    *,
    on_record: OnRecord | None = None,
) -> ReplayReport:
    """Do what `replay` does, inside a running event loop."""
    options = options or ReplayOptions()
    check_can_replay(trace)
    raise_descriptor_limit()  # each request being served has a connection of its own
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None)
    headers = key_headers(options.api_key)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        target = await _find_target(session, base_url.rstrip("/"), options)
        await _warm_up(target, trace, options)
        return await _Run(target, options, on_record).play(trace)


def check_can_replay(trace: Trace) -> None:
    """Raise ReplayError if a trace has what only the simulator can play."""
    if trace.is_closed_loop:
        raise ReplayError(
            f"trace {trace.name!r} is a closed loop, whose turns wait for each other: that is for "
            "the simulator; leave out --url, --closed-loop or the column think_s"
        )
    if several := next((r for r in trace.requests if r.n > 1), None):
        raise ReplayError(
            f"request {several.request_id!r} of the trace wants {several.n} answers (n), and a "
            "replay against a server measures one for each request: leave out the column n"
        )


@dataclass(frozen=True, slots=True)
class _Target:
    """The server, and what a request to it must say."""

    session: aiohttp.ClientSession
    url: str
    model: str
    token_range: tuple[int, int]
    seed: int
    adapters: frozenset[str] = frozenset()
    """The server's models besides `model`; a LoRA adapter is asked for by its name."""

    def adapter(self, request: TraceRequest) -> str | None:
        """Return the request's LoRA adapter, if the server has it."""
        return request.lora_id if request.lora_id in self.adapters else None

    def body(self, index: int, request: TraceRequest, num_output_tokens: int) -> bytes:
        """Return the body of a request, the same for the same seed, index and request."""
        document: dict[str, object] = {
            "model": self.adapter(request) or self.model,
            "prompt": plain_prompt(request.num_prompt_tokens, index, self.seed, self.token_range),
            "max_tokens": num_output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        # Servers without priorities or SLOs may refuse these fields.
        if request.priority:
            document["priority"] = request.priority
        if request.on_infeasible is not OnInfeasible.REJECT:
            document[ON_INFEASIBLE_FIELD] = str(request.on_infeasible)
        return json.dumps(document).encode()

    def post(self, body: bytes, slo: SLO) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = {"content-type": "application/json", **slo_headers(slo)}
        return self.session.post(f"{self.url}/v1/completions", data=body, headers=headers)


async def _find_target(session: aiohttp.ClientSession, url: str, options: ReplayOptions) -> _Target:
    try:
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
        async with session.get(f"{url}/v1/models", timeout=timeout) as response:
            response.raise_for_status()
            models = {entry["id"]: entry for entry in (await response.json())["data"]}
    except aiohttp.ClientResponseError as error:
        if error.status in KEY_STATUSES:
            raise ReplayError(f"{url}: {why_no_key(error.status, options.api_key)}") from error
        raise ReplayError(
            f"{url}/v1/models is not an OpenAI-compatible answer (HTTP {error.status}: "
            f"{error.message})"
        ) from error
    except (aiohttp.ClientError, OSError) as error:  # OSError: TimeoutError is one
        raise ReplayError(
            f"no server answers at {url} ({_why_not(error)}); start one with `slosched serve`"
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise ReplayError(f"{url}/v1/models is not an OpenAI-compatible answer") from error
    if not models:
        raise ReplayError(f"{url} serves no model now: a router does so while no replica is up")
    name = next(iter(models)) if options.model is None else options.model
    if name not in models:
        raise ReplayError(f"{url} serves {', '.join(models)}, not {name!r}")
    token_range = options.token_range or _plain_ids(models[name].get("vocab_size"))
    return _Target(session, url, name, token_range, options.seed, frozenset(models) - {name})


def _plain_ids(vocab_size: object) -> tuple[int, int]:
    """Return a range of plain token ids.  Our server says how large its vocabulary is.

    Any other server's is taken to have at least a thousand tokens.
    """
    high = min(vocab_size, _LAST_PLAIN_ID) if isinstance(vocab_size, int) else PLAIN_IDS[1]
    return min(PLAIN_IDS[0], high - 1), high


async def _warm_up(target: _Target, trace: Trace, options: ReplayOptions) -> None:
    """Send some requests before the replay, one by one.

    The first requests cost more (imports, kernels, caches), and a wrong set-up shows at once.
    Raises ReplayError if one of them fails.
    """
    for i, request in enumerate(trace.requests[: options.num_warmup]):
        num_output_tokens = min(request.num_output_tokens, _WARMUP_OUTPUT_TOKENS)
        body = target.body(len(trace) + i, request, num_output_tokens)
        post = target.post(body, NO_SLO)
        try:
            async with asyncio.timeout(options.drain_timeout_s), post as response:
                answer = await response.text()
        except (aiohttp.ClientError, OSError) as error:
            raise ReplayError(
                f"{target.url} failed on a warm-up request: {_describe(error)}"
            ) from error
        # A prompt that is too long or too slow belongs to the trace and will be recorded.
        if response.status not in (200, 429) and not _is_too_long(response.status, answer):
            raise ReplayError(
                f"{target.url} refused a warm-up request with HTTP {response.status}: {answer:.300}"
            )


class _End(NamedTuple):
    status: RequestStatus
    reason: EndReason
    error: str | None = None
    """A description to be counted, unless this is one of the ordinary ends."""


class _Run:
    """One replay in progress."""

    def __init__(self, target: _Target, options: ReplayOptions, on_record: OnRecord | None) -> None:
        self._target = target
        self._options = options
        self._on_record = on_record
        self._now_s = asyncio.get_running_loop().time
        self._start_s = 0.0
        self._lateness_s: list[float] = []
        self._errors: Counter[str] = Counter()

    async def play(self, trace: Trace) -> ReplayReport:
        self._start_s = self._now_s() + _LEAD_S
        last_s = self._start_s + trace.duration_s + self._options.drain_timeout_s
        tasks: list[asyncio.Task[RequestRecord]] = []
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(trace.requests):
                body = self._target.body(index, request, request.num_output_tokens)
                await asyncio.sleep(self._start_s + request.arrival_s - self._now_s())
                tasks.append(group.create_task(self._follow(request, body, last_s)))
        return ReplayReport(
            records=[task.result() for task in tasks],
            num_late_sends=sum(late_s >= self._options.late_after_s for late_s in self._lateness_s),
            max_lateness_s=max(self._lateness_s),
            errors=dict(self._errors),
        )

    async def _follow(self, request: TraceRequest, body: bytes, last_s: float) -> RequestRecord:
        """Send one request and follow it to its end, but not beyond `last_s`."""
        timeout_s = self._options.client_timeout_s
        leaves_s = math.inf if timeout_s is None else self._start_s + request.arrival_s + timeout_s
        self._lateness_s.append(self._now_s() - self._start_s - request.arrival_s)
        times_s: list[float] = []
        is_relegated = False
        try:
            async with (
                asyncio.timeout_at(min(leaves_s, last_s)),
                self._target.post(body, request.slo) as response,
            ):
                is_relegated = BEST_EFFORT_HEADER in response.headers
                if response.status == 200:
                    end = await self._read_events(response.content, times_s)
                else:
                    end = _refusal(response.status, await response.read())
        except TimeoutError:
            waited = (
                "not ended in time" if last_s < leaves_s else f"no answer after {timeout_s:g} s"
            )
            end = _lost(f"{waited}, given up", EndReason.CLIENT)
        except (aiohttp.ClientError, OSError) as error:
            end = _lost(f"connection failed: {type(error).__name__}")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            end = _lost(f"unreadable answer: {type(error).__name__}")
        if end.status is RequestStatus.FINISHED and len(times_s) != request.num_output_tokens:
            self._errors["finished with another number of tokens than the trace's"] += 1
        if request.lora_id is not None and self._target.adapter(request) is None:
            self._errors[f"its LoRA adapter is not there: served by {self._target.model}"] += 1
        if end.error is not None:
            self._errors[end.error] += 1
        record = self._record(request, times_s, end, is_relegated=is_relegated)
        if self._on_record is not None:
            self._on_record(record)
        return record

    async def _read_events(self, lines: aiohttp.StreamReader, times_s: list[float]) -> _End:
        """Add the time of every token of a stream of server-sent events; return how it ended."""
        end = _lost("the stream ended before the request")
        async for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[len(b"data:") :].strip()
            if data == b"[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                return _failure(event["error"])
            num_tokens = _num_tokens(event, len(times_s))
            times_s.extend([self._now_s() - self._start_s] * (num_tokens - len(times_s)))
            del times_s[num_tokens:]
            for choice in event["choices"]:
                if choice.get("finish_reason") is not None:
                    end = _end_of(choice)
        return end

    def _record(
        self, request: TraceRequest, times_s: list[float], end: _End, *, is_relegated: bool
    ) -> RequestRecord:
        return RequestRecord(
            request_id=request.request_id,
            arrival_s=request.arrival_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=len(times_s),
            slo=request.slo,
            status=end.status,
            end_reason=end.reason,
            token_times_s=tuple(times_s),
            end_s=self._now_s() - self._start_s,
            priority=request.priority,
            lora_id=self._target.adapter(request),
            tier=request.tier,
            tenant=request.tenant,
            session_id=request.session_id,
            program_s=request.program_s,
            is_relegated=is_relegated,
        )


def _num_tokens(event: Mapping[str, Any], num_before: int) -> int:
    """Return the tokens so far as the server counts them; else each choice counts as a token.

    The last event of some servers has a count and nothing else.  It may be lower than the number of
    choices, where the one with the reason of the end has no token.
    """
    usage = event.get("usage")
    if usage is None:
        return num_before + len(event["choices"])
    return int(usage["completion_tokens"]) or num_before


def _refusal(status: int, answer: bytes) -> _End:
    """Return what an HTTP error means: a rejection is an answer, everything else is a failure."""
    try:
        error = json.loads(answer)["error"]
        message, code = str(error.get("message")), error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        error, message, code = {}, answer[:100].decode(errors="replace"), None
    if status == 429:
        return _End(RequestStatus.REJECTED, _reason(error, EndReason.INFEASIBLE))
    if status == 503:
        default = EndReason.QUEUE_FULL if code in _TOO_MANY else EndReason.SHUTDOWN
        return _End(RequestStatus.REJECTED, _reason(error, default))
    if _is_too_long(status, f"{code} {message}"):
        return _End(RequestStatus.REJECTED, EndReason.TOO_LONG)
    return _lost(f"HTTP {status}: {message:.100}", _reason(error, EndReason.FAULT))


def _is_too_long(status: int, answer: str) -> bool:
    return status == HTTPStatus.BAD_REQUEST and _TOO_LONG.search(answer) is not None


def _failure(error: Mapping[str, object]) -> _End:
    """Return the end of a request whose stream reported an error."""
    return _lost(f"failed while streaming: {error.get('code')}", _reason(error, EndReason.FAULT))


def _lost(error: str, reason: EndReason = EndReason.FAULT) -> _End:
    return _End(RequestStatus.ABORTED, reason, error)


def _reason(error: Mapping[str, object], default: EndReason) -> EndReason:
    """Return the reason that our server gives; other servers give none."""
    reason = error.get("reason")
    return EndReason(reason) if isinstance(reason, str) and reason in set(EndReason) else default


def _end_of(choice: Mapping[str, Any]) -> _End:
    """Return the end of a request of whose answer this is the last piece."""
    reason, why = choice["finish_reason"], str(choice.get("stop_reason"))
    if reason not in _NOT_FINISHED:
        why_finished = EndReason.LENGTH if reason == "length" else EndReason.STOP
        return _End(RequestStatus.FINISHED, why_finished)
    if why.startswith(REJECTED):
        error = {"reason": re.split("[:;]", why)[1]}
        return _End(RequestStatus.REJECTED, _reason(error, EndReason.INFEASIBLE))
    return _lost(f"the server ended it: {reason}")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _why_not(error: aiohttp.ClientError | OSError) -> str:
    """Return why a server was not reached, without the terms of the HTTP library."""
    if isinstance(error, TimeoutError):
        return f"no answer within {_PROBE_TIMEOUT_S:g} s"
    if not isinstance(error, aiohttp.ClientConnectorError):
        return _describe(error)
    number = error.os_error.errno
    if number is not None and number > 0:  # the errors of name servers have no such numbers
        return os.strerror(number)
    return error.os_error.strerror or str(error.os_error)
