"""The bodies of requests: read with limits, and checked to be what the endpoint takes."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HTTPRequest

from slosched.engine.server.adapters import Adapters
from slosched.engine.server.config import ServerConfig
from slosched.engine.server.errors import (
    ApiError,
    encoded,
    too_large,
    too_many_values,
    too_slow,
)
from slosched.engine.server.fields import check_fields
from slosched.engine.server.json_limit import exceeds_work
from slosched.engine.server.json_text import parse_json
from slosched.engine.server.values import Body, shown

_MIN_BODY_BYTES = 2**20
_MORE_VALUES = 2**17
"""How many more values a body may have than the model's context has tokens."""
_LARGE_BYTES = 2**16
"""From here on bodies are parsed one after the other, and others get their turn in between."""
_BODY_BYTES_PER_TOKEN = 32
"""Bytes that a request's body may have for each token of the model's context.  A token is about
four bytes of text, and a token id takes eight; JSON may spell a character in up to twelve
(`\\ud83d\\ude42`)."""
_MOST_DISCARDED = 4
"""How many times as large as allowed a body may be for its rest to be read.  A connection that is
closed while its client sends is reset, and the client may never see the answer."""
_MOST_WAITED_FOR = 16
"""How many times as large as allowed a body may be declared for any of it to be read.  What the
system keeps between client and server does not hold the rest of a longer one, so that reading its
beginning would not spare the client the reset."""
_PLAIN = ("", "identity")
"""Values of `content-encoding` for a body that is sent as it is."""


class BodyReader:
    """Reads bodies for one model, which holds `max_model_len` tokens of prompt and output."""

    def __init__(self, config: ServerConfig, max_model_len: int, adapters: Adapters) -> None:
        self._config = config
        self._adapters = adapters
        self._max_model_len = max_model_len
        self._one_large = asyncio.Lock()

    @property
    def model_name(self) -> str:
        """Return the name of the model without an adapter."""
        return self._config.model_name

    async def read(self, http: HTTPRequest, fields: frozenset[str]) -> Body:
        """Return the body, a JSON object with no other `fields` than these.

        Raises ApiError if it is none, has another field, or names another model.
        """
        try:
            content = await read_content(http, self._max_model_len, self._config.body_timeout_s)
            body = await self._parsed(content)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ApiError(400, f"the body must be a JSON object, not {shown(body)}")
        if (model := body.get("model")) is not None:
            self.check_model(model)
        check_fields(body, fields)
        return body

    async def _parsed(self, content: bytearray) -> object:
        if len(content) <= _LARGE_BYTES:
            return await self._parsed_at_once(content)
        async with self._one_large:
            body = await self._parsed_at_once(content)
            await asyncio.sleep(0)  # that took a while: others first
        return body

    async def _parsed_at_once(self, content: bytearray) -> object:
        """Return what the JSON says; raise ApiError (413) if parsing it would take too long."""
        await check_work(content, self._max_model_len)
        if len(content) > _LARGE_BYTES:
            await asyncio.sleep(0)
        return parse_json(content)

    def check_model(self, model: object) -> None:
        """Raise ApiError (404) if this is neither the served model nor one of its adapters."""
        names = [self._config.model_name, *(adapter.name for adapter in self._adapters.loaded)]
        if model not in names:
            adapters = "" if self._adapters.loaded else "; no LoRA adapters are loaded"
            raise ApiError(
                404,
                f"there is no model {shown(model)} here, only {', '.join(map(repr, names))}"
                f"{adapters}",
                param="model",
                code="model_not_found",
            )


def max_body_bytes(max_model_len: int) -> int:
    """Return how large the body of a request may be for a model with this context."""
    return max(_MIN_BODY_BYTES, _BODY_BYTES_PER_TOKEN * max_model_len)


async def check_work(content: bytearray, max_model_len: int) -> None:
    """Raise ApiError (413) if parsing a body would take too long: nobody is answered meanwhile."""
    if await exceeds_work(content, most := _MORE_VALUES + max_model_len):
        raise too_many_values(most)


async def read_content(http: HTTPRequest, max_model_len: int, timeout_s: float) -> bytearray:
    """Return the body.

    Raises ApiError (413) if it exceeds the largest size allowed, (408) if it takes longer than
    `timeout_s` to come, and (415) if it is compressed or encoded in another way.  Of a body that is
    too large only so much is read as its client is likely to send before it looks for the answer,
    and nothing is kept.  One that is declared to be far too large is refused before any of it is
    read.
    """
    content, most = bytearray(), max_body_bytes(max_model_len)
    if _declared_bytes(http) > _MOST_WAITED_FOR * most:
        raise too_large(most, max_model_len)
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in http.stream():
                num_bytes += len(part)
                if num_bytes > _MOST_DISCARDED * most:
                    break
                if num_bytes <= most:
                    content += part
                else:
                    content.clear()
    except TimeoutError:
        raise too_slow(num_bytes, timeout_s) from None
    if num_bytes > most:
        raise too_large(most, max_model_len)
    encodings = ", ".join(http.headers.getlist("content-encoding"))
    if encodings.strip().lower() not in _PLAIN:  # its client has sent it all, and will listen
        raise encoded(encodings)
    return content


def _declared_bytes(http: HTTPRequest) -> int:
    """Return the length of the body that its header tells; 0 if it tells none."""
    told = http.headers.get("content-length", "")
    return int(told) if told.isascii() and told.isdigit() else 0
