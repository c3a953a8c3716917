"""The HTTP application of a gateway: what `slosched route` serves."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from urllib.parse import SplitResult, urlsplit

import aiohttp
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from slosched.engine.server.cross_origin import cross_origin
from slosched.engine.server.cut_short import CutShort
from slosched.engine.server.error_handlers import EXCEPTION_HANDLERS, refuse_slashes
from slosched.engine.server.http_metrics import CountRequests, HTTPMetrics
from slosched.engine.server.limit_requests import LimitRequests
from slosched.engine.server.process_metrics import process_lines
from slosched.engine.server.prometheus import CONTENT_TYPE
from slosched.engine.server.request_id import EchoRequestId
from slosched.engine.server.root_path import UnderRootPath
from slosched.gateway.config import GatewayConfig
from slosched.gateway.errors import no_such_model
from slosched.gateway.fleet import LiveFleet
from slosched.gateway.generate import Generate
from slosched.gateway.metrics import GatewayMetrics
from slosched.gateway.request_id import GiveRequestId

_KEEPALIVE_S = 2.0
"""Shorter than any server's limit, so that no request uses a connection that is just closing."""


class Gateway:
    """A front for servers.  `run.serve_gateway` starts it, serves its `app` and drains it."""

    def __init__(
        self, urls: Sequence[str], router: str, config: GatewayConfig | None = None
    ) -> None:
        """Take the servers' base URLs, and the router's spec as `make_router` reads it.

        Raises ValueError for wrong URLs, and RouterSpecError for a wrong spec.
        """
        config = config or GatewayConfig()
        self.fleet = LiveFleet(_checked(urls), router, config)
        self.metrics = GatewayMetrics(self.fleet.replicas)
        self.generate = Generate(self.fleet, self.metrics, config)
        self._http_metrics = HTTPMetrics()
        self._session: aiohttp.ClientSession | None = None
        self.app = self._build_app(config)

    async def start(self) -> None:
        """Ask the replicas for their state, and go on asking.

        Raises RouterNeedsError if one answers, but does not tell what the router needs.
        """
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        )
        self.generate.open(self._session)
        try:
            await self.fleet.start(self._session)
        except BaseException:
            await self._session.close()
            raise

    async def stop(self) -> None:
        """Ask no more, and close all connections to replicas."""
        await self.fleet.stop()
        if self._session is not None:
            await self._session.close()

    def _build_app(self, config: GatewayConfig) -> Starlette:
        app = Starlette(
            routes=[  # the first that matches is taken: those with the most requests come first
                Route("/v1/completions", self.generate, methods=["POST"]),
                Route("/v1/chat/completions", self.generate, methods=["POST"]),
                Route("/v1/responses", self.generate, methods=["POST"]),
                Route("/health", self._health),
                Route("/ping", self._health, methods=["GET", "POST"]),
                Route("/version", self._version),
                Route("/metrics", self._metrics_page),
                Route("/load", self._load),
                Route("/v1/models", self._models),
                Route("/v1/models/{id:path}", self._model),
            ],
            exception_handlers=EXCEPTION_HANDLERS,
            middleware=[
                *(
                    [Middleware(UnderRootPath, root_path=config.root_path)]
                    if config.root_path
                    else []
                ),
                *cross_origin(config.allowed_origins),
                Middleware(GiveRequestId),
                Middleware(EchoRequestId),
                Middleware(CountRequests, metrics=self._http_metrics),
                *([Middleware(LimitRequests, most=most)] if (most := config.max_requests) else []),
                Middleware(CutShort, retry_after_s=config.retry_after_s),
            ],
        )
        refuse_slashes(app)
        return app

    async def _health(self, _http: HTTPRequest) -> Response:
        """Answer 200 while at least one replica takes requests, with the state of each."""
        replicas = {
            each.url: "up" if each.is_up else f"down: {each.why_down}"
            for each in self.fleet.replicas
        }
        why = self.generate.why_not_serving
        if why is None and not self.fleet.up:
            why = "no replica is up"
        if why is not None:
            document = {"status": "unavailable", "reason": why, "replicas": replicas}
            return JSONResponse(document, 503)
        return JSONResponse({"status": "ok", "replicas": replicas})

    async def _version(self, _http: HTTPRequest) -> Response:
        return JSONResponse({"version": version("slosched")})

    async def _metrics_page(self, _http: HTTPRequest) -> Response:
        lines = [*self.metrics.lines(), *self._http_metrics.lines(), *process_lines()]
        return PlainTextResponse("\n".join(lines) + "\n", media_type=CONTENT_TYPE)

    async def _load(self, _http: HTTPRequest) -> Response:
        running = sum(each.num_in_flight for each in self.fleet.replicas)
        return JSONResponse({"server_load": running})

    async def _models(self, _http: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": list(self.fleet.models.values())})

    async def _model(self, http: HTTPRequest) -> Response:
        name, models = http.path_params["id"], self.fleet.models
        if name not in models:
            raise no_such_model(name, models)
        return JSONResponse(models[name])


def _checked(urls: Sequence[str]) -> list[str]:
    """Return base URLs without a slash at the end; raise ValueError if one is wrong."""
    checked = [url.rstrip("/") for url in urls]
    for url in checked:
        parts = _parts(url)
        if parts is None:
            raise ValueError(f"{url!r} is no address of a server; write http://127.0.0.1:8000")
        if parts.path.endswith("/v1"):
            raise ValueError(f"{url!r}: leave out /v1, which is a part of each request's path")
        if "@" in parts.netloc:
            raise ValueError(
                f"the address of {parts.hostname}: leave out user and password; clients send their "
                "own keys, and --api-key is that of the router"
            )
    if twice := next((url for url in checked if checked.count(url) > 1), None):
        raise ValueError(f"the replica {twice} is named twice")
    if not checked:
        raise ValueError("a router needs at least one replica: --url http://127.0.0.1:8000")
    return checked


def _parts(url: str) -> SplitResult | None:
    """Return the parts of a server's base URL; None if it is none."""
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0
    except ValueError:  # a port that is no number up to 65535, or a bracket that is not closed
        return None
    is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and has_port
    return parts if is_http and not (parts.query or parts.fragment) else None
