"""The OpenAI-compatible HTTP application over an engine's worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from slosched.core import Request
from slosched.engine.grammar import GrammarCompiler, NoGrammars
from slosched.engine.log_lines import num_missing_lines
from slosched.engine.server.account import KeepAccounts, Reporter
from slosched.engine.server.adapter_metrics import adapter_lines
from slosched.engine.server.adapter_routes import adapter_routes
from slosched.engine.server.adapters import Adapters
from slosched.engine.server.api_keys import RequireKey
from slosched.engine.server.bodies import BodyReader
from slosched.engine.server.config import ServerConfig
from slosched.engine.server.cross_origin import cross_origin
from slosched.engine.server.cut_short import CutShort
from slosched.engine.server.error_handlers import EXCEPTION_HANDLERS, refuse_slashes
from slosched.engine.server.errors import not_serving
from slosched.engine.server.event_loop import event_loop_lines
from slosched.engine.server.fields import (
    DETOKENIZE_FIELDS,
    TOKENIZE_FIELDS,
)
from slosched.engine.server.grammars import GrammarQueue
from slosched.engine.server.http_metrics import CountRequests, HTTPMetrics
from slosched.engine.server.limit_requests import LimitRequests
from slosched.engine.server.long_json import LongList, in_parts, paced
from slosched.engine.server.model_cards import ModelCards, model_routes
from slosched.engine.server.model_control import ModelControl
from slosched.engine.server.operator_routes import operator_routes
from slosched.engine.server.page import answer_page
from slosched.engine.server.prometheus import CONTENT_TYPE, labels_of, sample
from slosched.engine.server.prompts import PromptEncoder
from slosched.engine.server.quote import parse_promise, parse_prompt_tokens, quotes_of
from slosched.engine.server.request_id import EchoRequestId
from slosched.engine.server.request_log import RequestLog
from slosched.engine.server.root_path import UnderRootPath
from slosched.engine.server.slo import parse_slo, refuse_repeated
from slosched.engine.server.steps import StepsResponse
from slosched.engine.server.text_endpoints import TextEndpoints
from slosched.engine.server.tiers import parse_service
from slosched.engine.server.tokenizer import Tokenizer
from slosched.engine.server.values import token_ids, wrong
from slosched.engine.server.worker import EngineWorker
from slosched.engine.step_lines import PATH as STEPS_PATH
from slosched.workload.http_quote import QUOTE_PATH

_NOTHING_DRAWN = NoGrammars("this server draws no tokens, so that no answer can follow a grammar")
_IDS_AT_A_TIME = 20_000
"""Token ids that are written as JSON in a turn of the event loop, which takes about 2 ms."""
_MISSING_LINES = (
    "slosched:log_lines_missing_total",
    "counter",
    "Log lines that could not be written.",
)


def build_app(
    worker: EngineWorker,
    tokenizer: Tokenizer,
    config: ServerConfig,
    grammars: GrammarCompiler = _NOTHING_DRAWN,
    adapters: Adapters | None = None,
    control: ModelControl | None = None,
    reporters: Sequence[Reporter] = (),
) -> Starlette:
    """Return the application; the caller starts and drains the worker, as `run.serve` does.

    `grammars` compiles the grammars of structured output, for a device that follows them, and
    `adapters` are LoRA adapters, for one that applies them.  `control` lets the operator change the
    weights and record profiles.  `reporters` are told of every request for text when it has ended.
    """
    adapters = adapters or Adapters()
    api = _Api(worker, tokenizer, config, grammars, adapters)
    keys = (*config.api_keys, *config.tenants)
    operator: list[Route] = []
    if (admin := config.admin_api_key) is not None:
        operator = operator_routes(worker, api.bodies, control, admin)
        keys = (*keys, admin) if keys else ()
    worker.metrics.by_tier.add(config.tiers)
    worker.metrics.by_tenant.add(config.tenants.values())
    if config.logs_requests:
        reporters = (*reporters, RequestLog(worker.scheduler.limits.deadline_rule))
    app = Starlette(
        routes=[
            Route("/", answer_page),
            Route("/health", api.health),
            Route("/ping", api.health, methods=["GET", "POST"]),
            Route("/version", api.version),
            *model_routes(api.cards, api.bodies),
            Route("/v1/completions", api.text.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.text.chat_completions, methods=["POST"]),
            Route("/v1/responses", api.text.responses, methods=["POST"]),
            Route(QUOTE_PATH, api.quote),
            Route("/tokenize", api.tokenize, methods=["POST"]),
            Route("/detokenize", api.detokenize, methods=["POST"]),
            Route("/metrics", api.metrics),
            Route("/load", api.load),
            Route(STEPS_PATH, api.steps),
            *(adapter_routes(adapters, api.bodies) if config.changes_adapters else []),
            *operator,
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        middleware=[
            *([Middleware(UnderRootPath, root_path=config.root_path)] if config.root_path else []),
            *cross_origin(config.allowed_origins),
            Middleware(EchoRequestId),
            Middleware(KeepAccounts, reporters=reporters),
            Middleware(CountRequests, metrics=api.http_metrics),
            *([Middleware(RequireKey, keys=keys)] if keys else []),
            *([Middleware(LimitRequests, most=most)] if (most := config.max_requests) else []),
            Middleware(CutShort, retry_after_s=config.retry_after_s),
        ],
    )
    refuse_slashes(app)
    return app


class _Api:
    """The handlers of the endpoints."""

    def __init__(
        self,
        worker: EngineWorker,
        tokenizer: Tokenizer,
        config: ServerConfig,
        grammars: GrammarCompiler,
        adapters: Adapters,
    ) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._config = config
        self.http_metrics = HTTPMetrics()
        self._max_model_len = min(config.max_model_len, worker.capacity_tokens)
        self._encoder = PromptEncoder(tokenizer, self._max_model_len)
        self.cards = ModelCards(
            config.model_name, self._max_model_len, tokenizer.vocab_size, adapters
        )
        self.bodies = BodyReader(config, self._max_model_len, adapters)
        self._adapters = adapters
        self._long_answers = asyncio.Lock()
        self._grammars = GrammarQueue(grammars, config.retry_after_s)
        self.text = TextEndpoints(
            worker,
            tokenizer,
            config,
            self._encoder,
            self.bodies,
            self._grammars,
            adapters,
            self._max_model_len,
        )

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

    async def version(self, _http: HTTPRequest) -> Response:
        return JSONResponse({"version": version("slosched")})

    async def metrics(self, _http: HTTPRequest) -> Response:
        text = self._worker.metrics.render(self._config.model_name)
        label = labels_of(model_name=self._config.model_name)
        lines = [
            *self._grammars.lines(label),
            *self.http_metrics.lines(),
            *event_loop_lines(asyncio.get_running_loop()),
            *sample(*_MISSING_LINES, "", num_missing_lines()),
        ]
        if self._config.changes_adapters or self._adapters.loaded:
            max_loras = self._worker.scheduler.limits.max_loras
            lines += adapter_lines(self._worker.requests, self._adapters, max_loras)
        return PlainTextResponse(text + "\n".join(lines) + "\n", media_type=CONTENT_TYPE)

    async def load(self, _http: HTTPRequest) -> Response:
        """Answer as vLLM's endpoint of this name, with the parts of the sum besides."""
        scheduler = self._worker.scheduler
        return JSONResponse(
            {
                "server_load": scheduler.num_unfinished,
                "num_requests_running": scheduler.num_running,
                "num_requests_waiting": scheduler.num_waiting,
                "kv_cache_usage_perc": scheduler.kv.used_fraction,
            }
        )

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
        promise = parse_promise(http.query_params)
        refuse_repeated(http.headers)
        service = parse_service(http.headers, promise, self._config)
        slo = parse_slo(http.headers, promise, service.default_slo)
        arrival_s = self._worker.now_s() - self._config.per_request_s  # as those to be served
        requests = []
        for num_tokens in parse_prompt_tokens(http.query_params, self._max_model_len):
            request = Request("quote", arrival_s, num_tokens, max_tokens=2, slo=slo)
            request.server_s = self._config.per_request_s
            requests.append(request)
        model_name, on_infeasible = self._config.model_name, service.on_infeasible
        return JSONResponse(quotes_of(self._worker, requests, model_name, on_infeasible))

    async def tokenize(self, http: HTTPRequest) -> Response:
        body = await self.bodies.read(http, TOKENIZE_FIELDS)
        is_chat = "messages" in body
        encode = self._encoder.encode_chat if is_chat else self._encoder.encode_prompts
        prompts = await encode(body)
        if len(prompts) > 1:
            raise wrong("prompt", body["prompt"], "one prompt: this endpoint takes no list of them")
        [ids] = prompts
        tokens = LongList(ids, _IDS_AT_A_TIME)
        document = {"tokens": tokens, "count": len(ids), "max_model_len": self._max_model_len}
        parts = paced(in_parts(document), self._long_answers)
        content = b"".join([part async for part in parts])
        return Response(content, media_type="application/json")

    async def detokenize(self, http: HTTPRequest) -> Response:
        body = await self.bodies.read(http, DETOKENIZE_FIELDS)
        ids = token_ids(body, "tokens", self._tokenizer.vocab_size, self._max_model_len)
        if ids is None:
            raise wrong("tokens", None, "a list of token ids")
        return JSONResponse({"prompt": self._tokenizer.decode(ids, skip_special_tokens=False)})
