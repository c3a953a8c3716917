"""GET /v1/models and /v1/models/{id}: the model and its adapters, with vLLM's names of fields."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from slosched.engine.server.adapters import Adapters, NamedAdapter
from slosched.engine.server.bodies import BodyReader


@dataclass(frozen=True, slots=True)
class ModelCards:
    """What clients are told about the names that `model` may have."""

    model_name: str
    max_model_len: int
    vocab_size: int
    adapters: Adapters

    def all(self) -> list[dict[str, object]]:
        """Return the cards of the model and of its adapters, in this order."""
        return [self._of_model(), *map(self._of_adapter, self.adapters.loaded)]

    def find(self, name: str) -> dict[str, object]:
        """Return the adapter's card, or the model's if there is no adapter of this name."""
        adapter = self.adapters.find(name)
        return self._of_model() if adapter is None else self._of_adapter(adapter)

    def _of_model(self) -> dict[str, object]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "slosched",
            "max_model_len": self.max_model_len,
            "vocab_size": self.vocab_size,
        }

    def _of_adapter(self, adapter: NamedAdapter) -> dict[str, object]:
        names = {"id": adapter.name, "parent": self.model_name, "root": str(adapter.path)}
        return {**self._of_model(), **names}


def model_routes(cards: ModelCards, bodies: BodyReader) -> list[Route]:
    """Return the endpoints that list the models."""

    async def models(_http: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": cards.all()})

    async def model(http: HTTPRequest) -> Response:
        name = http.path_params["id"]
        bodies.check_model(name)
        return JSONResponse(cards.find(name))

    return [Route("/v1/models", models), Route("/v1/models/{id:path}", model)]
