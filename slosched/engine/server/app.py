"""The OpenAI-compatible HTTP application over an engine's worker."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from slosched.core import Request
from slosched.engine.server.config import ServerConfig
from slosched.engine.server.cut_short import CutShort
from slosched.engine.server.errors import ApiError, not_serving, too_large, too_long, too_slow
from slosched.engine.server.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    TOKENIZE_FIELDS,
    check_fields,
)
from slosched.engine.server.prompts import PromptEncoder
from slosched.engine.server.protocol import Options, parse_options
from slosched.engine.server.quote import milliseconds_by_quantile, parse_prompt_tokens
from slosched.engine.server.respond import (
    ChatFormat,
    CompletionFormat,
    Format,
    GenerationResponse,
)
from slosched.engine.server.slo import parse_slo
from slosched.engine.server.steps import StepsResponse
from slosched.engine.server.tokenizer import Tokenizer
from slosched.engine.server.values import Body
from slosched.engine.server.worker import EngineWorker, NoQuoteError, NotServingError
from slosched.engine.step_lines import PATH as STEPS_PATH

_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions.  A chat may go on to the end of the context."""
_MIN_BODY_BYTES = 2**20
_BODY_BYTES_PER_TOKEN = 32
"""Bytes that a request's body may have for each token of the model's context.  A token is about
four bytes of text, and a token id takes eight; JSON may spell a character in up to twelve
(`\\ud83d\\ude42`)."""


def build_app(worker: EngineWorker, tokenizer: Tokenizer, config: ServerConfig) -> Starlette:
    """Return the application; the caller starts and drains the worker, as `run.serve` does."""
    api = _Api(worker, tokenizer, config)
    return Starlette(
        routes=[
            Route("/health", api.health),
            Route("/v1/models", api.models),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/v1/quote", api.quote),
            Route("/tokenize", api.tokenize, methods=["POST"]),
            Route("/metrics", api.metrics),
            Route(STEPS_PATH, api.steps),
        ],
        exception_handlers={
            ApiError: _answer_api_error,
            ClientDisconnect: _answer_nobody,
            HTTPException: _answer_http_error,
            Exception: _answer_bug,
        },
        middleware=[Middleware(CutShort, retry_after_s=config.retry_after_s)],
    )


class _Api:
    """The handlers of the endpoints."""

    def __init__(self, worker: EngineWorker, tokenizer: Tokenizer, config: ServerConfig) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._config = config
        self._max_model_len = min(config.max_model_len, worker.capacity_tokens)
        self._encoder = PromptEncoder(tokenizer, self._max_model_len)
        self._max_body_bytes = max(_MIN_BODY_BYTES, _BODY_BYTES_PER_TOKEN * self._max_model_len)

    async def health(self, _http: HTTPRequest) -> Response:
        if (why := self._worker.why_not_serving) is not None:
            return JSONResponse({"status": "unavailable", "reason": why}, 503)
        if (hang := self._worker.watchdog.hang()) is not None:
            step = {
                "running_s": hang.running_s,
                "predicted_s": hang.predicted_s,
                "limit_s": hang.limit_s,
            }
            return JSONResponse({"status": "hung", "reason": hang.reason, "step": step}, 503)
        return JSONResponse({"status": "ok"})

    async def models(self, _http: HTTPRequest) -> Response:
        model = {
            "id": self._config.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "slosched",
            "max_model_len": self._max_model_len,
            "vocab_size": self._tokenizer.vocab_size,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def metrics(self, _http: HTTPRequest) -> Response:
        text = self._worker.metrics.render(self._config.model_name)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def steps(self, http: HTTPRequest) -> Response | StepsResponse:
        if http.method == "HEAD":  # A HEAD request would wait for a body that never comes.
            return Response()
        if (why := self._worker.why_not_serving) is not None:
            raise not_serving(why, self._config.retry_after_s)
        provenance = {"model": self._config.model_name, **self._config.provenance}
        return StepsResponse(self._worker.steps, provenance, lambda: self._worker.why_over)

    async def quote(self, http: HTTPRequest) -> Response:
        if (why := self._worker.why_not_serving) is not None:
            raise not_serving(why, self._config.retry_after_s)
        request = Request(
            "quote",
            self._worker.now_s() - self._config.per_request_s,  # as those that are to be served
            parse_prompt_tokens(http.query_params, self._max_model_len),
            max_tokens=2,
            slo=parse_slo(http.headers, http.query_params, self._config.default_slo),
        )
        try:
            quote, refusal = self._worker.quote(request)
        except NoQuoteError as error:
            raise ApiError(501, str(error), code="no_quote") from error
        scheduler = self._worker.scheduler
        return JSONResponse(
            {
                "object": "quote",
                "model": self._config.model_name,
                "prompt_tokens": request.num_prompt_tokens,
                "ttft_ms": milliseconds_by_quantile(quote.ttft_s),
                "tpot_ms": milliseconds_by_quantile(quote.tpot_s),
                "would_refuse": refusal,
                "num_requests_running": scheduler.num_running,
                "num_requests_waiting": scheduler.num_waiting,
                "kv_cache_usage_perc": scheduler.kv.used_fraction,
            }
        )

    async def tokenize(self, http: HTTPRequest) -> Response:
        body = await self._body(http, TOKENIZE_FIELDS)
        is_chat = "messages" in body
        encode = self._encoder.encode_chat if is_chat else self._encoder.encode_prompt
        ids = await encode(body)
        return JSONResponse(
            {"tokens": ids, "count": len(ids), "max_model_len": self._max_model_len}
        )

    async def completions(self, http: HTTPRequest) -> Response | GenerationResponse:
        encode = self._encoder.encode_prompt
        return await self._generate(
            http, COMPLETION_FIELDS, encode, CompletionFormat(), _DEFAULT_COMPLETION_TOKENS
        )

    async def chat_completions(self, http: HTTPRequest) -> Response | GenerationResponse:
        encode = self._encoder.encode_chat
        return await self._generate(http, CHAT_FIELDS, encode, ChatFormat(), self._max_model_len)

    async def _generate(
        self,
        http: HTTPRequest,
        fields: frozenset[str],
        encode: Callable[[Body, int], Awaitable[list[int]]],
        answer: Format,
        default_max_tokens: int,
    ) -> GenerationResponse:
        """Check and queue the request, and return the response that follows its generation."""
        arrival_s = self._worker.now_s() - self._config.per_request_s
        body = await self._body(http, fields)
        if (why := self._worker.why_not_serving) is not None:
            raise not_serving(why, self._config.retry_after_s)
        options = parse_options(body, self._config.default_temperature, self._tokenizer)
        slo = parse_slo(http.headers, body, self._config.default_slo)
        prompt = await encode(body, options.max_tokens or 1)
        request = Request(
            request_id=f"{answer.id_prefix}-{uuid.uuid4().hex}",
            arrival_s=arrival_s,
            num_prompt_tokens=len(prompt),
            max_tokens=self._max_tokens(len(prompt), options, default_max_tokens),
            slo=slo,
            prompt_token_ids=prompt,
            sampling=options.sampling,
            priority=options.priority,
            takes_best_effort=options.takes_best_effort,
            cache_salt=options.cache_salt,
        )
        try:
            generation = self._worker.submit(request)
        except NotServingError as error:
            raise not_serving(str(error), self._config.retry_after_s) from error
        return GenerationResponse(
            self._worker,
            self._tokenizer,
            generation,
            options,
            answer,
            self._config.model_name,
            self._config.retry_after_s,
        )

    async def _body(self, http: HTTPRequest, fields: frozenset[str]) -> Body:
        """Return the body, a JSON object with no other `fields` than these.

        Raises ApiError if it is none, has another field, or names another model.
        """
        try:
            body = json.loads(await self._read(http), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error!r:.200}") from error
        if not isinstance(body, dict):
            raise ApiError(400, f"the body must be a JSON object, not {body!r:.100}")
        model = body.get("model")
        if model is not None and model != self._config.model_name:
            raise ApiError(
                404,
                f"there is no model {model!r:.100} here, only {self._config.model_name!r}; "
                "LoRA adapters are not loaded",
                param="model",
                code="model_not_found",
            )
        check_fields(body, fields)
        return body

    async def _read(self, http: HTTPRequest) -> bytearray:
        """Return the body.

        Raises ApiError (413) as soon as it exceeds the largest size allowed, and (408) if it takes
        too long to come.
        """
        content = bytearray()
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                async for part in http.stream():
                    content += part
                    if len(content) > self._max_body_bytes:
                        raise too_large(self._max_body_bytes, self._max_model_len)
        except TimeoutError:
            raise too_slow(len(content), self._config.body_timeout_s) from None
        return content

    def _max_tokens(self, num_prompt_tokens: int, options: Options, default: int) -> int:
        """Return the request's output limit; without one of its own it may fill the context.

        Raises ApiError (400) if the prompt or the limit does not fit into the context.
        """
        room = self._max_model_len - num_prompt_tokens
        wanted = options.max_tokens
        if room < 1 or (wanted is not None and wanted > room):
            self._worker.metrics.observe_refusal()
            raise too_long(num_prompt_tokens, wanted or 1, self._max_model_len)
        max_tokens = min(default, room) if wanted is None else wanted
        min_tokens = options.sampling.min_tokens
        if min_tokens > max_tokens:
            raise ApiError(
                400, f"min_tokens={min_tokens} exceeds max_tokens={max_tokens}", param="min_tokens"
            )
        return max_tokens


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


async def _answer_api_error(_http: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _answer_nobody(_http: HTTPRequest, _error: Exception) -> Response:
    return Response(status_code=499)


async def _answer_http_error(http: HTTPRequest, error: Exception) -> Response:
    """Answer a request for an unknown path or method."""
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path}: {error.detail}"
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    response = ApiError(error.status_code, message, code=code).response()
    response.headers.update(error.headers or {})
    return response


async def _answer_bug(_http: HTTPRequest, error: Exception) -> Response:
    """Answer with status 500; Starlette then logs the traceback."""
    message = f"the server failed on this request: {type(error).__name__}"
    return ApiError(500, message, kind="server_error", code="internal_error").response()
