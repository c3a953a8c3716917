"""The operator's endpoints, which act on all requests: they exist only with a key of their own.

Names and fields are those of vLLM (/reset_prefix_cache, /start_profile, /stop_profile) and SGLang
(/update_weights_from_disk, with the modes of its /pause_generation).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from slosched.core import EndReason, OperationError
from slosched.engine.loop import Engine
from slosched.engine.server.api_keys import has_key
from slosched.engine.server.bodies import BodyReader
from slosched.engine.server.errors import ApiError, not_serving, wrong_key
from slosched.engine.server.model_control import ModelControl, UpdateMode, flush, install
from slosched.engine.server.values import Body, flag, query_flag, strings, wrong
from slosched.engine.server.worker import EngineWorker, NotServingError

log = logging.getLogger(__name__)

_ABORT_FIELDS = frozenset({"request_ids", "abort_all"})
_UPDATE_FIELDS = frozenset({"model_path", "mode", "flush_cache"})
_MOST_IDS, _MOST_ID_CHARS = 10_000, 200

Handler = Callable[[HTTPRequest], Awaitable[Response]]


def operator_routes(
    worker: EngineWorker, bodies: BodyReader, control: ModelControl | None, key: str
) -> list[Route]:
    """Return the endpoints for those who have `key`; `control` is None without a real model."""
    api = _Operator(worker, bodies, control)
    handlers = {
        "/abort": api.abort,
        "/reset_prefix_cache": api.reset_prefix_cache,
        "/update_weights_from_disk": api.update_weights,
        "/start_profile": api.start_profile,
        "/stop_profile": api.stop_profile,
    }
    return [
        Route(path, _guarded(handler, key), methods=["POST"]) for path, handler in handlers.items()
    ]


def _guarded(handler: Handler, key: str) -> Handler:
    """Return the handler for those who have the key; others get a 401."""

    async def guarded(http: HTTPRequest) -> Response:
        if not has_key(http.headers, [key]):
            raise wrong_key("this endpoint wants the key of --admin-api-key")
        try:
            return await handler(http)
        except NotServingError as error:
            raise not_serving(str(error), 1.0) from error
        except OperationError as error:
            raise ApiError(400, str(error), code="cannot_operate") from error

    return guarded


class _Operator:
    def __init__(
        self, worker: EngineWorker, bodies: BodyReader, control: ModelControl | None
    ) -> None:
        self._worker = worker
        self._bodies = bodies
        self._control = control
        self._changing = asyncio.Lock()
        """Held while the weights or the profiler change, which takes two steps or more."""

    async def abort(self, http: HTTPRequest) -> Response:
        body = await self._bodies.read(http, _ABORT_FIELDS)
        ids = strings(body, "request_ids", _MOST_IDS, _MOST_ID_CHARS)
        aborts_all = flag(body, "abort_all")
        if aborts_all == bool(ids):
            raise ApiError(400, "send request_ids (the ids of answers) or abort_all=true, not both")
        names = await self._worker.operate(lambda engine: _abort(engine, ids or None))
        log.info("the operator aborted %d requests", len(names))
        return JSONResponse({"success": True, "aborted": names})

    async def reset_prefix_cache(self, http: HTTPRequest) -> Response:
        retracts = query_flag(http.query_params, "reset_running_requests")
        num_held = await self._worker.operate(lambda engine: flush(engine, retracts=retracts))
        log.info("the prefix cache was reset; %d blocks that requests hold stay in it", num_held)
        return JSONResponse({"success": num_held == 0, "num_held_blocks": num_held})

    async def update_weights(self, http: HTTPRequest) -> Response:
        body = await self._bodies.read(http, _UPDATE_FIELDS)
        path, mode = _path(body), _mode(body)
        flushes = flag(body, "flush_cache", default=True)
        control = self._model()
        async with self._changing:
            weights = await asyncio.to_thread(control.read_weights, path)
            num_paused = await self._worker.operate(
                lambda engine: install(engine, control, weights, mode, flushes=flushes)
            )
        message = f"the weights are those of {path}"
        log.info("%s; requests in flight (%s): %d", message, mode.value, num_paused)
        return JSONResponse(
            {"success": True, "message": message, "num_paused_requests": num_paused}
        )

    async def start_profile(self, _http: HTTPRequest) -> Response:
        control = self._model()
        async with self._changing:
            await self._worker.operate(lambda _: control.start_profile())
        return JSONResponse({"success": True})

    async def stop_profile(self, _http: HTTPRequest) -> Response:
        control = self._model()
        async with self._changing:
            await self._worker.operate(lambda _: control.stop_profile())
            path = await asyncio.to_thread(control.write_profile)
        log.info("wrote %s", path)
        return JSONResponse({"success": True, "path": path})

    def _model(self) -> ModelControl:
        if self._control is None:
            raise ApiError(501, "this server runs no model, only its times", code="no_model")
        return self._control


def _abort(engine: Engine, ids: tuple[str, ...] | None) -> list[str]:
    """Abort the requests of these ids, or all; return the ids of those that had not ended.

    The answers to one HTTP request, and its further prompts, have ids that begin with its own.
    """
    scheduler, now_s = engine.scheduler, engine.clock.now_s()
    names = [
        request.request_id
        for request in scheduler.unfinished()
        if ids is None or any(_is_of(request.request_id, asked) for asked in ids)
    ]
    return [name for name in names if scheduler.end(name, EndReason.CLIENT, now_s)]


def _is_of(name: str, asked: str) -> bool:
    return name == asked or name.startswith((f"{asked}.", f"{asked}-"))


def _path(body: Body) -> str:
    path = body.get("model_path")
    if not isinstance(path, str) or not path:
        raise wrong("model_path", path, "the directory of a model on the server's machine")
    return path


def _mode(body: Body) -> UpdateMode:
    value = body.get("mode", UpdateMode.RETRACT)
    try:
        return UpdateMode(str(value))
    except ValueError:
        raise wrong("mode", value, f"one of {', '.join(UpdateMode)}") from None
