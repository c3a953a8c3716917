"""The deployment that clients reach."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import ray.exceptions
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse

from slosched.engine.server.bodies import check_work, read_content
from slosched.engine.server.errors import ApiError
from slosched.engine.server.respond import last_events
from slosched.gateway.errors import replica_failed
from slosched.gateway.headers import sendable
from slosched.gateway.ray_serve.call import Call, Head
from slosched.replay.keys import key_headers

_MOST_TRIED = 2
"""Replicas that may fail at a request before its client is told so."""
_MOVABLE = (502, 503)
"""Answers after which another replica is asked."""
_ADDED_BY_RAY = b"x-request-id"
_BODY_TIMEOUT_S = 60.0
_UNTOLD_MODEL_LEN = 131_072
"""The context that limits bodies as long as no replica has told its own."""
_TELL_TIMEOUT_S = 5.0
_MODELS = "/v1/models"


class Front:
    """Hands each request to a replica, and its answer back as it comes.

    A request goes on to another replica if the first one breaks off before it answers, or answers
    503.
    """

    def __init__(self, replicas: Any, api_key: str | None = None) -> None:
        """Take the handle of the deployment of `EngineReplica`, and the key that servers want."""
        self._replicas = replicas.options(stream=True)
        self._api_key = api_key
        self._max_model_len: int | None = None

    async def __call__(self, http: HTTPRequest) -> Response:
        """Answer one request."""
        try:
            max_model_len = await self._context() if http.method == "POST" else _UNTOLD_MODEL_LEN
            content = await read_content(http, max_model_len, _BODY_TIMEOUT_S)
            await check_work(content, max_model_len)
            return await self._answer(_call(http, bytes(content)))
        except ApiError as error:
            return error.response()

    async def _context(self) -> int:
        """Return the tokens that a replica's model holds, by which bodies are limited."""
        if self._max_model_len is None:
            headers = [*key_headers(self._api_key).items()]
            answer = self._replicas.answer.remote(Call("GET", _MODELS, headers, b""))
            try:
                async with asyncio.timeout(_TELL_TIMEOUT_S):
                    _, *pieces = [piece async for piece in answer]
                self._max_model_len = _longest(json.loads(b"".join(pieces)))
            except asyncio.CancelledError:
                answer.cancel()
                raise
            except (ray.exceptions.RayError, OSError, ValueError, LookupError, TypeError):
                answer.cancel()  # what is wrong with the replica, the request itself will tell
        return self._max_model_len or _UNTOLD_MODEL_LEN

    async def _answer(self, call: Call) -> Response:
        for num_left in reversed(range(_MOST_TRIED)):
            answer = self._replicas.answer.remote(call)
            try:
                head = await anext(answer)
            except asyncio.CancelledError:
                answer.cancel()
                raise
            except (ray.exceptions.RayError, OSError) as error:
                if not num_left:
                    raise replica_failed(f"no replica answered: {error}") from error
                continue
            if head.status not in _MOVABLE:
                break
            call = call.after(head.url)
        return _passed_on(head, answer)


def _longest(document: Any) -> int:
    """Return the longest context of the models in a server's list of them."""
    return max(int(model["max_model_len"]) for model in document["data"])


def _call(http: HTTPRequest, content: bytes) -> Call:
    query = http.url.query
    target = http.url.path + (f"?{query}" if query else "")
    return Call(http.method, target, sendable(http.scope["headers"]), content)


def _passed_on(head: Head, answer: Any) -> Response:
    streams = any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in head.headers
    )
    body = _until_it_ends(answer)
    body = _until_it_breaks(body) if streams else body
    response = StreamingResponse(body, head.status)
    response.raw_headers = [each for each in head.headers if each[0] != _ADDED_BY_RAY]
    return response


async def _until_it_ends(answer: Any) -> AsyncIterator[bytes]:
    """Yield the body of an answer; cancel the call if the client goes before its end.

    Ray Serve cancels it only while the next piece is waited for.
    """
    try:
        async for piece in answer:
            yield piece
    except (asyncio.CancelledError, GeneratorExit):
        answer.cancel()
        raise


async def _until_it_breaks(answer: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the events of a stream; an error is the last one if the replica breaks off."""
    try:
        async for piece in answer:
            yield piece
    except (ray.exceptions.RayError, OSError) as error:
        why = f"the replica broke off in the middle of its answer: {error}"
        yield last_events(replica_failed(why))
