"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

import logging
from pathlib import Path

from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from slosched.engine.server.adapters import Adapters
from slosched.engine.server.bodies import BodyReader
from slosched.engine.server.errors import ApiError
from slosched.engine.server.fields import LOAD_ADAPTER_FIELDS, UNLOAD_ADAPTER_FIELDS
from slosched.engine.server.values import Body, flag, wrong

log = logging.getLogger(__name__)


def adapter_routes(adapters: Adapters, bodies: BodyReader) -> list[Route]:
    """Return the endpoints by which clients change which adapters are loaded."""

    async def load(http: HTTPRequest) -> Response:
        body = await bodies.read(http, LOAD_ADAPTER_FIELDS)
        name, path = _text(body, "lora_name"), _text(body, "lora_path")
        if name == bodies.model_name:
            raise ApiError(400, f"{name!r:.100} is the model itself", param="lora_name")
        await adapters.load(name, Path(path), may_replace=flag(body, "load_inplace"))
        log.info("the LoRA adapter %r was loaded from %s", name, path)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(http: HTTPRequest) -> Response:
        body = await bodies.read(http, UNLOAD_ADAPTER_FIELDS)
        name = _text(body, "lora_name")
        adapters.unload(name)
        log.info("the LoRA adapter %r was unloaded", name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return [
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    ]


def _text(body: Body, name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise wrong(name, value, "a string that is not empty")
    return value
