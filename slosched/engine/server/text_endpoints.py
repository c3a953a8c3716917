"""The endpoints that generate text: they check a body, queue its requests and return a response."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request as HTTPRequest

from slosched.core import Request, fan_out
from slosched.engine.server.account import account_of
from slosched.engine.server.adapters import Adapters
from slosched.engine.server.api_keys import tenant_of
from slosched.engine.server.beams import BeamResponse, BeamSearch
from slosched.engine.server.bodies import BodyReader
from slosched.engine.server.choices import ChatFormat, ChoicesResponse, CompletionFormat, Format
from slosched.engine.server.config import ServerConfig
from slosched.engine.server.errors import ApiError, not_serving, too_long
from slosched.engine.server.fields import CHAT_FIELDS, COMPLETION_FIELDS, RESPONSES_FIELDS
from slosched.engine.server.generations import Generation
from slosched.engine.server.grammars import GrammarQueue
from slosched.engine.server.prompts import PromptEncoder
from slosched.engine.server.protocol import Options, parse_options
from slosched.engine.server.respond import Exchange
from slosched.engine.server.responses import ResponsesResponse
from slosched.engine.server.responses_body import as_chat
from slosched.engine.server.slo import parse_slo, refuse_repeated
from slosched.engine.server.tiers import parse_service
from slosched.engine.server.tokenizer import ByteTokenizer, Tokenizer
from slosched.engine.server.tool_format import ToolFormat
from slosched.engine.server.values import Body
from slosched.engine.server.worker import EngineWorker, NotServingError
from slosched.workload.request import MOST_SEQUENCES

_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions.  A chat may go on to the end of the context."""

_MOST_PROMPT_LOGPROBS = 2**18
"""About 20 MB of JSON, and half a second of the server's time, in pieces."""

Encode = Callable[[Body, int], Awaitable[list[list[int]]]]


@dataclass(frozen=True)
class _Asked:
    """A body that was understood: what is to be queued for it."""

    requests: list[Request]
    """The request for each prompt."""
    options: Options
    model_name: str
    prompt_texts: Sequence[str]
    """The text of each prompt, if it is to stand in front of the answers."""


class TextEndpoints:
    """The handlers of the endpoints that generate text."""

    def __init__(
        self,
        worker: EngineWorker,
        tokenizer: Tokenizer,
        config: ServerConfig,
        encoder: PromptEncoder,
        bodies: BodyReader,
        grammars: GrammarQueue,
        adapters: Adapters,
        max_model_len: int,
    ) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._config = config
        self._encoder = encoder
        self._bodies = bodies
        self._grammars = grammars
        self._adapters = adapters
        self._max_model_len = max_model_len
        self._turns = asyncio.Lock()

    async def completions(self, http: HTTPRequest) -> ChoicesResponse | BeamResponse:
        arrival_s = self._arrival_s()
        body = await self._bodies.read(http, COMPLETION_FIELDS)
        encode, default = self._encoder.encode_prompts, _DEFAULT_COMPLETION_TOKENS
        return await self._choices(http, arrival_s, body, encode, CompletionFormat(), default)

    async def chat_completions(self, http: HTTPRequest) -> ChoicesResponse | BeamResponse:
        arrival_s = self._arrival_s()
        body = await self._bodies.read(http, CHAT_FIELDS)
        encode, default = self._encoder.encode_chat, self._max_model_len
        return await self._choices(http, arrival_s, body, encode, ChatFormat(), default)

    async def responses(self, http: HTTPRequest) -> ResponsesResponse:
        arrival_s = self._arrival_s()
        body = await self._bodies.read(http, RESPONSES_FIELDS)
        encode, default = self._encoder.encode_chat, self._max_model_len
        asked = await self._asked(http, arrival_s, as_chat(body), encode, "resp", default)
        return ResponsesResponse(self._submit(http, asked), body)

    async def _choices(
        self,
        http: HTTPRequest,
        arrival_s: float,
        body: Body,
        encode: Encode,
        answer_format: Format,
        default_max_tokens: int,
    ) -> ChoicesResponse | BeamResponse:
        prefix = answer_format.id_prefix
        asked = await self._asked(http, arrival_s, body, encode, prefix, default_max_tokens)
        if asked.options.is_beam_search:
            return self._search(http, asked, answer_format)
        if asked.options.tools is not None:
            answer_format = ToolFormat(asked.options.tools)
        return ChoicesResponse(self._submit(http, asked), answer_format)

    def _arrival_s(self) -> float:
        """Return when a request that has just come was sent, on the engine's clock."""
        return self._worker.now_s() - self._config.per_request_s

    async def _asked(
        self,
        http: HTTPRequest,
        arrival_s: float,
        body: Body,
        encode: Encode,
        id_prefix: str,
        default_max_tokens: int,
    ) -> _Asked:
        """Return what a body asks for; raise ApiError if it is wrong or cannot be served now."""
        if (why := self._worker.why_refusing) is not None:
            raise not_serving(why, self._config.retry_after_s)
        options = parse_options(body, self._config.default_temperature, self._tokenizer)
        refuse_repeated(http.headers)
        service = parse_service(http.headers, body, self._config)
        slo = parse_slo(http.headers, body, service.default_slo)
        adapter = self._adapters.find(body.get("model"))
        prompts = await encode(body, options.max_tokens or 1)
        _check_number(len(prompts), options)
        _check_draws(options, self._tokenizer)
        _check_told_prompts(prompts, options)
        sampling = options.sampling
        if options.structured is not None:
            grammar = await self._grammars.compiled(options.structured)
            sampling = replace(sampling, grammar=grammar)
        name = f"{id_prefix}-{uuid.uuid4().hex}"
        requests = [
            Request(
                request_id=f"{name}.{place}" if place else name,
                arrival_s=arrival_s,
                num_prompt_tokens=len(prompt),
                max_tokens=self._max_tokens(len(prompt), options, default_max_tokens),
                slo=slo,
                prompt_token_ids=prompt,
                sampling=sampling,
                priority=options.priority,
                on_infeasible=service.on_infeasible,
                tier=service.tier,
                tenant=tenant_of(http.headers, self._config),
                cache_salt=options.cache_salt,
                server_s=self._config.per_request_s,
                lora_id=None if adapter is None else adapter.lora_id,
                adapter=None if adapter is None else adapter.weights,
            )
            for place, prompt in enumerate(prompts)
        ]
        model_name = self._config.model_name if adapter is None else adapter.name
        account_of(http).note_asked(model_name, options, requests)
        texts = await self._encoder.texts_of(body, prompts) if options.echoes else ()
        return _Asked(requests, options, model_name, texts)

    def _search(self, http: HTTPRequest, asked: _Asked, answer_format: Format) -> BeamResponse:
        """Return the response that searches the answers; raise ApiError (400) if it cannot."""
        if not self._worker.scheduler.kv.caches_prefixes:
            raise ApiError(
                400,
                "use_beam_search computes a token of each beam at a time, and all before it again "
                "without a prefix cache: start the server with --prefix-cache hash",
                param="use_beam_search",
            )
        if len(asked.requests) > 1:
            raise ApiError(
                400, "use_beam_search takes one prompt; send the others apart", param="prompt"
            )
        [request] = asked.requests
        ends, retry_after_s = self._tokenizer.end_token_ids, self._config.retry_after_s
        note_ended = account_of(http).note_submitted
        search = BeamSearch(self._worker, request, asked.options, ends, retry_after_s, note_ended)
        return BeamResponse(
            search,
            request,
            self._tokenizer,
            asked.options,
            answer_format,
            asked.model_name,
            self._config.request_timeout_s,
        )

    def _submit(self, http: HTTPRequest, asked: _Asked) -> Exchange:
        """Queue requests and their siblings; return the exchange that the response answers."""
        generations: list[Generation] = []
        try:
            for request in asked.requests:
                fan_out(request, asked.options.num_candidates)
                generations.append(self._worker.submit(request))
        except NotServingError as error:
            for generation in generations:
                self._worker.abort(generation.request.request_id)
            raise not_serving(str(error), self._config.retry_after_s) from error
        account_of(http).note_submitted(generations)
        return Exchange(
            self._worker,
            self._tokenizer,
            generations,
            asked.options,
            asked.model_name,
            self._config.retry_after_s,
            self._config.request_timeout_s,
            asked.prompt_texts,
            self._turns,
        )

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


def _check_draws(options: Options, tokenizer: Tokenizer) -> None:
    """Raise ApiError (400) if log-probabilities are asked of a device that draws nothing."""
    told = {"logprobs": options.num_logprobs, "prompt_logprobs": options.num_prompt_logprobs}
    for name, num in told.items():
        if num is not None and isinstance(tokenizer, ByteTokenizer):
            raise ApiError(
                400,
                f"{name}: an emulated device draws no tokens, and has no log-probabilities; leave "
                "it out",
                param=name,
            )


def _check_told_prompts(prompts: Sequence[Sequence[int]], options: Options) -> None:
    """Raise ApiError (400) if the log-probabilities of the prompts would be too many."""
    num_each = options.sampling.num_prompt_logprobs
    if num_each is None:
        return
    num = sum(map(len, prompts)) * (1 + num_each) * options.num_answers
    if num > _MOST_PROMPT_LOGPROBS:
        name = "logprobs" if options.num_prompt_logprobs is None else "prompt_logprobs"
        raise ApiError(
            400,
            f"{name}: the prompts' tokens, each with {num_each} of the likeliest and in "
            f"{options.num_answers} answers, have {num} log-probabilities; at most "
            f"{_MOST_PROMPT_LOGPROBS} are told in one request: ask for fewer, or send the prompts "
            "apart",
            param=name,
        )


def _check_number(num_prompts: int, options: Options) -> None:
    """Raise ApiError (400) if the prompts have more answers in all than one body may ask for."""
    num_sequences = num_prompts * options.num_candidates
    if num_sequences > MOST_SEQUENCES:
        raise ApiError(
            400,
            f"{num_prompts} prompts with {options.num_candidates} answers each are {num_sequences} "
            f"answers; ask for at most {MOST_SEQUENCES} in one request",
            param="n",
        )
