"""Middleware: SLO headers and tenants are passed on, early rejections are HTTP 429, quotes told.

    vllm serve MODEL --middleware slosched.integrations.vllm.SLOMiddleware …

It is plain ASGI, so that streams pass through as they come.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from functools import reduce
from http import HTTPStatus
from operator import getitem
from typing import Any, NamedTuple

from slosched.integrations.vllm.quotes import answer_of
from slosched.integrations.vllm.settings import SECTION
from slosched.integrations.vllm.slo import (
    INVALID,
    TENANT_FIELD,
    TIER_FIELD,
    BadPromiseError,
    check_names,
    rejection_times_ms,
    seconds_of,
)
from slosched.integrations.vllm.tenants import Tenants, read_tenants, tenant_of
from slosched.integrations.vllm.watched import Watched, watching
from slosched.workload.http_quote import QUOTE_PATH
from slosched.workload.http_slo import ON_INFEASIBLE_FIELD, PROMISES, REJECTED, repeated_header

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_REFUSED = re.compile(rf'"stop_reason": ?"({REJECTED}|{INVALID}):((?:[^"\\]|\\.)*)"'.encode())
_TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content)": ?"[^"]')
_BEGUN = re.compile(rb'"finish_reason": ?"|"tool_calls": ?\[\{|' + _TEXT.pattern)
_EVENT = re.compile(rb'data: \{(?!.*"role": ?").*"choices": ?\[\{')
"""An event of a token, whose text may be empty.  The first event of a chat has a role instead."""
_DONE, _ERROR = b"data: [DONE]", b'data: {"error"'
_ABORTED = re.compile(rb'"finish_reason": ?"abort"')
_ITEM = re.compile(
    rb"event: (?:content_block|error|response\.(?!created|queued|in_progress|completed))"
)
"""An event of /v1/responses or /v1/messages that comes after the first token, or tells an error."""
_OUTPUT_TOKENS = re.compile(rb'"output_tokens": ?([0-9]+)')
_RETRY_AFTER_S = 1
"""What is told where no door forecasts when to come again."""
_NO_TIMES: Mapping[str, float] = {}


class _Form(NamedTuple):
    """How an endpoint answers, as far as it tells refusals from answers."""

    begun: Sequence[re.Pattern[bytes]]
    """What is in an answer from its first token on."""
    is_empty: Callable[[bytes], bool]
    """Tells whether the text of an answer that has not begun is that of one without tokens."""
    xargs_at: tuple[str, ...] = ("vllm_xargs",)
    """Where in the body of a request its SLO is."""


class SLOMiddleware:
    """ASGI middleware around vLLM's API server."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._tenants: Tenants | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = _path_of(scope)
        if path == QUOTE_PATH:
            await self._quote(scope, receive, send)
            return
        form = _FORMS.get(path)
        if form is None and path not in _WATCHED:
            await self._app(scope, receive, send)
            return
        if self._tenants is None:  # vLLM knows its configuration before its first request
            self._tenants = _tenants_of(scope)
        try:
            if form is None:
                await self._watch(scope, receive, send, self._tenants)
            else:
                await self._serve(scope, receive, send, form, self._tenants)
        except BadPromiseError as error:
            await _send_error(send, 400, "invalid_request_error", str(error))

    async def _serve(
        self, scope: Message, receive: Receive, send: Send, form: _Form, tenants: Tenants
    ) -> None:
        body = await _body(receive)
        scope, body = _with_promises(scope, body, tenants, form.xargs_at)
        if _asks_for_beams(body):
            form = _BEAMS
        await self._app(scope, _once(body, receive), _Answer(send, form))

    async def _watch(self, scope: Message, receive: Receive, send: Send, tenants: Tenants) -> None:
        """Serve a request whose SLO, and whose refusal, vLLM does not hand on."""
        client = getattr(scope["app"].state, "engine_client", None)
        if client is None:  # a server that only renders
            await self._app(scope, receive, send)
            return
        document: Mapping[str, Any] = {}
        if not _path_of(scope).startswith(_AUDIO):  # audio may be long, and is no JSON
            body = await _body(receive)
            document, receive = _document_of(body), _once(body, receive)
        said = document.get("vllm_xargs")
        said = said if isinstance(said, Mapping) else {}
        wanted = _in_ms(_wanted(_headers_of(scope), document, said, tenants))
        with watching(client, wanted) as watched:
            await self._app(scope, receive, _WatchedAnswer(send, watched))

    async def _quote(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a question for quotes, which vLLM does not know, if vLLM lets it in.

        vLLM's own middleware is asked first: it refuses who has no key.
        """
        is_unknown = False

        async def unless_unknown(message: Message) -> None:
            nonlocal is_unknown
            is_unknown |= message.get("status") == HTTPStatus.NOT_FOUND
            if not is_unknown:
                await send(message)

        await self._app(scope, receive, unless_unknown)
        if is_unknown:
            status, document = await answer_of(scope["app"].state, scope["query_string"])
            await _send_json(send, status, document)


class _Answer:
    """Holds the start of a response back until it is known not to be a refusal."""

    def __init__(self, send: Send, form: _Form) -> None:
        self._send = send
        self._form = form
        self._start: Message | None = None
        self._held: list[Message] = []
        self._is_refused = False

    async def __call__(self, message: Message) -> None:
        if self._is_refused:
            return
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._held.append(message)
            await self._decide(is_last=not message.get("more_body", False))

    async def _decide(self, *, is_last: bool) -> None:
        # What comes in pieces is looked at twice, and not again with each of thousands.
        text = _joined(self._held[-2:])
        has_begun = any(pattern.search(text) for pattern in self._form.begun)
        if refused := _REFUSED.search(text):
            self._is_refused = True
            why = json.loads(b'"' + refused[2] + b'"')
            await _send_refusal(self._send, refused[1].decode(), why)
        elif is_last and not has_begun and self._form.is_empty(_joined(self._held)):
            # vLLM does not say of an output without tokens why it ended.
            self._is_refused = True
            await _send_refusal(self._send, REJECTED, "it ended before the first token")
        elif is_last or has_begun:
            assert self._start is not None
            for message in (self._start, *self._held):
                await self._send(message)
            self._start = None
            self._held.clear()


class _WatchedAnswer:
    """Holds a response back until the engine has begun with it or it has its end."""

    def __init__(self, send: Send, watched: Watched) -> None:
        self._send = send
        self._watched = watched
        self._held: list[Message] = []
        self._is_decided = self._is_refused = False

    async def __call__(self, message: Message) -> None:
        if self._is_refused:
            return
        if self._is_decided:
            await self._send(message)
            return
        self._held.append(message)
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if self._watched.refusal:
            self._is_refused = True
            word, _, why = self._watched.refusal.partition(":")
            await _send_refusal(self._send, word, why)
        elif is_last or self._watched.has_begun:
            self._is_decided = True
            for each in self._held:
                await self._send(each)
            self._held.clear()


def _path_of(scope: Message) -> str:
    """Return the path of a request as vLLM's routes know it; empty for what is no request.

    With `--root-path`, vLLM takes paths with that prefix as well as without it.
    """
    if scope["type"] != "http":
        return ""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _joined(messages: Sequence[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


def _is_done(text: bytes) -> bool:
    """Tell whether a stream came to its end without an error; vLLM streams nothing if empty."""
    return _DONE in text and _ERROR not in text


def _is_aborted(text: bytes) -> bool:
    """Tell whether the choices of an answer ended before their time."""
    return _ABORTED.search(text) is not None


def _counts_none(text: bytes) -> bool:
    """Tell whether the last usage in an answer counts no output token."""
    counts = _OUTPUT_TOKENS.findall(text)
    return bool(counts) and int(counts[-1]) == 0


_CHOICES = _Form((_BEGUN, _EVENT), _is_done)
_ITEMS = _Form((_ITEM,), _counts_none)
_BEAMS = _Form((_TEXT,), _is_aborted)
"""A beam search, which is never a stream.  vLLM asks its engine anew for every token of each beam,
and of one that was refused it tells no reason."""
_FORMS: Mapping[str, _Form] = {
    "/v1/completions": _CHOICES,
    "/v1/chat/completions": _CHOICES,
    "/v1/chat/completions/batch": _CHOICES,
    "/v1/responses": _ITEMS,
    "/v1/messages": _ITEMS,
    "/inference/v1/generate": _CHOICES._replace(xargs_at=("sampling_params", "extra_args")),
    "/invocations": _CHOICES,
}
"""The paths whose requests have an SLO in their bodies and tell refusals in their answers."""
_AUDIO = "/v1/audio/"
_WATCHED = {
    "/generative_scoring",
    "/v1/systemone",
    "/cohere/v2/chat",
    f"{_AUDIO}transcriptions",
    f"{_AUDIO}translations",
}
"""The paths for which the engine is asked without the first, or whose answers lack the second."""


def _asks_for_beams(body: bytes) -> bool:
    """Tell whether the request with this body is a beam search."""
    if b'"use_beam_search"' not in body:  # nearly always, and a body may be long
        return False
    try:
        return bool(json.loads(body).get("use_beam_search"))
    except (ValueError, AttributeError, RecursionError):
        return False  # vLLM reports what is wrong with the body


async def _send_refusal(send: Send, word: str, why: str) -> None:
    if word == REJECTED:
        reason, times_ms = why.split(";")[0], rejection_times_ms(why)
        message = f"rejected: it could not be served within its SLO ({reason})"
        if "expected_ms" in times_ms:
            message += (
                f"; {times_ms['expected_ms']:.1f} ms are expected, "
                f"{times_ms['promised_ms']:g} ms are asked for"
            )
        retry_after_ms = times_ms.get("retry_after_ms")
        if retry_after_ms is not None:
            message += f"; come again in {retry_after_ms / 1000:.1f} s"
        await _send_error(send, 429, word, message, times_ms)
    else:
        await _send_error(send, 400, "invalid_request_error", why)


async def _send_error(
    send: Send,
    status: int,
    kind: str,
    message: str,
    times_ms: Mapping[str, float] = _NO_TIMES,
) -> None:
    error = {"message": message, "type": kind, "code": status, **times_ms}
    headers = []
    if status == 429 and (retry_after_s := _retry_after_s(times_ms)) is not None:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    await _send_json(send, status, {"error": error}, headers)


async def _send_json(
    send: Send, status: int, document: object, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    body = json.dumps(document).encode()
    kind, length = (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))
    start = {"type": "http.response.start", "status": status, "headers": [kind, length, *headers]}
    await send(start)
    await send({"type": "http.response.body", "body": body})


def _retry_after_s(times_ms: Mapping[str, float]) -> int | None:
    """Return the whole seconds after which to come again; None if that would never help."""
    if "retry_after_ms" in times_ms:
        return math.ceil(times_ms["retry_after_ms"] / 1000)
    return None if "expected_ms" in times_ms else _RETRY_AFTER_S


def _tenants_of(scope: Message) -> Tenants:
    """Return the tenants in the configuration of the vLLM that a request comes to."""
    state = getattr(scope.get("app"), "state", None)
    chosen = getattr(getattr(state, "vllm_config", None), "additional_config", None)
    section = chosen.get(SECTION, {}) if isinstance(chosen, Mapping) else {}
    return read_tenants(section.get("tenants") or {})


def _with_promises(
    scope: Message, body: bytes, tenants: Tenants, xargs_at: tuple[str, ...]
) -> tuple[Message, bytes]:
    """Return the request with its SLO headers, `on_infeasible` and its tenant at `xargs_at`.

    What its body says there comes first.  Where tenants have keys, the body cannot name one.
    """
    try:
        document = json.loads(body)
        *parts, name = xargs_at
        holder = reduce(getitem, parts, document)
        said = holder.get(name) or {}
        wanted = _wanted(_headers_of(scope), document, said, tenants)
    except BadPromiseError:
        raise
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
        return scope, body  # vLLM reports what is wrong with the body
    promised = _in_ms(wanted)
    if wanted == said:
        return scope, body
    holder[name] = promised
    body = json.dumps(document).encode()
    pairs = [pair for pair in scope["headers"] if pair[0].lower() != b"content-length"]
    return {**scope, "headers": [*pairs, (b"content-length", b"%d" % len(body))]}, body


def _wanted(
    headers: Mapping[str, str],
    document: Mapping[str, Any],
    said: Mapping[str, Any],
    tenants: Tenants,
) -> dict[str, Any]:
    """Return what a request asks for: as `said` in its body, then in its headers, by its tenant.

    Raises BadPromiseError for a name that does not exist.
    """
    wanted: dict[str, Any] = {**_promised_in(headers), **said}
    if (asked := document.get(ON_INFEASIBLE_FIELD)) is not None:
        wanted.setdefault(ON_INFEASIBLE_FIELD, asked)
    if tenants:
        wanted.pop(TENANT_FIELD, None)
    if (tenant := tenant_of(headers, tenants)) is not None:
        wanted[TENANT_FIELD] = tenant.proof
        if tenant.slo_tier is not None:
            wanted.setdefault(TIER_FIELD, tenant.slo_tier)
    check_names(wanted)
    return wanted


def _in_ms(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a request asks for, with times as numbers.

    Raises BadPromiseError for a time that is none.
    """
    promises = {
        names.field: 1000 * seconds_of(names.field, wanted[names.field])
        for names in PROMISES
        if names.field in wanted
    }
    return {**wanted, **promises}


def _document_of(body: bytes) -> Mapping[str, Any]:
    """Return the JSON object in a body; an empty one if there is none, which vLLM reports."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _headers_of(scope: Message) -> dict[str, str]:
    """Return a request's headers; raise BadPromiseError if one with an SLO comes twice."""
    pairs = [
        (name.decode("latin-1").lower(), value.decode("latin-1"))
        for name, value in scope["headers"]
    ]
    if repeated := repeated_header(name for name, _ in pairs):
        raise BadPromiseError(f"the header {repeated} comes more than once; send it once")
    return dict(pairs)


def _promised_in(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the SLO times in a request's headers, as written, by the name of their field."""
    return {
        names.field: headers[header]
        for names in PROMISES
        if (header := names.header_in(headers)) is not None
    }


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _once(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives `body` once, then what comes, such as a client's disconnect."""
    is_sent = False

    async def replay() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
