"""The response to one body: what all endpoints that generate text have in common."""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from slosched.core import EndReason, OnInfeasible
from slosched.engine.server.errors import ApiError, of_end, of_refusal
from slosched.engine.server.generations import Generation, Update
from slosched.engine.server.long_json import in_parts, paced
from slosched.engine.server.pieces import Piece, interleaved, pieces_of
from slosched.engine.server.protocol import Options
from slosched.engine.server.tokenizer import Tokenizer
from slosched.engine.server.worker import EngineWorker
from slosched.workload.http_slo import BEST_EFFORT_HEADER

log = logging.getLogger(__name__)

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
"""The end marker of a stream."""

Json = dict[str, object]


@dataclass(frozen=True)
class Exchange:
    """A body whose requests are queued, and what answering it takes."""

    worker: EngineWorker
    tokenizer: Tokenizer
    prompts: Sequence[Generation]
    """The first generation of each prompt; the others are its siblings."""
    options: Options
    model_name: str
    retry_after_s: float
    timeout_s: float | None = None
    """The time after which unfinished requests are ended."""
    prompt_texts: Sequence[str] = ()
    """The text of each prompt, if the client wants it in front of the answers."""
    turns: asyncio.Lock = field(default_factory=asyncio.Lock)
    """What long answers share that are written in parts."""

    @property
    def generations(self) -> list[Generation]:
        """Return all generations, those of a prompt one after the other."""
        return [each for first in self.prompts for each in (first, *first.siblings)]

    @property
    def tells_prompts(self) -> bool:
        """Tell whether the answer has log-probabilities of prompts, which may be many."""
        return self.options.sampling.num_prompt_logprobs is not None

    @property
    def is_relegated(self) -> bool:
        """Tell whether an answer has to do without its SLO."""
        return any(generation.request.is_relegated for generation in self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        """Return the tokens of all prompts, each counted once."""
        return sum(generation.request.num_prompt_tokens for generation in self.prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Return how many of them were found in the prefix cache."""
        return sum(generation.request.num_cached_tokens for generation in self.prompts)

    def metrics(self) -> Json:
        """Return the server's own times, which `vllm bench serve` reads from the usage chunk.

        They are those of the first answer.
        """
        generation = self.prompts[0]
        request, scheduled_s = generation.request, generation.first_scheduled_s
        assert scheduled_s is not None
        return {
            "queue_time_ms": 1000 * (scheduled_s - request.arrival_s),
            "time_to_first_token_ms": 1000 * (request.token_times_s[0] - request.arrival_s),
        }


class GenerationResponse(ABC):
    """An ASGI response that follows the answers to one prompt, or to several, to their ends.

    It sends nothing before the first token, so that a rejection is a 429 for streams, too.  When
    the client disconnects, or the response ends for any other reason, all requests are aborted.
    Subclasses write the answers as their endpoint does.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @abstractmethod
    async def _whole(self, first: Piece, pieces: AsyncIterator[Piece]) -> Json:
        """Return the document of the whole answer; raise ApiError if a request ends without one."""

    @abstractmethod
    def _events(self, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        """Yield the events of a stream; an error becomes its last event."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, timeout_s = asyncio.get_running_loop(), self._exchange.timeout_s
        timer = timeout_s and loop.call_later(timeout_s, self._time_out)
        watch = asyncio.create_task(self._abort_on_disconnect(receive))
        try:
            response = await self._respond()
            await response(scope, receive, send)
        finally:
            if timer:
                timer.cancel()
            watch.cancel()
            self._abort()

    async def _abort_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._abort()

    def _abort(self, reason: EndReason = EndReason.CLIENT) -> None:
        for generation in self._exchange.generations:
            self._exchange.worker.abort(generation.request.request_id, reason)

    def _time_out(self) -> None:
        """End all requests, and answer without waiting for the engine, which may hang in a step."""
        self._abort(EndReason.TIMEOUT)
        for generation in self._exchange.generations:
            generation.updates.put_nowait(Update(end_reason=EndReason.TIMEOUT))

    async def _respond(self) -> Response:
        for generation in self._exchange.prompts:
            refusal, request = generation.refusal, generation.request
            if refusal is not None and request.on_infeasible is OnInfeasible.REJECT:
                return of_refusal(refusal).response()
        try:
            pieces = self._pieces()
            first = await anext(pieces)
            headers = {BEST_EFFORT_HEADER: "true"} if self._exchange.is_relegated else {}
            if self._exchange.options.is_streaming:
                events = self._events(first, pieces)
                return StreamingResponse(
                    events, media_type="text/event-stream", headers={**_STREAM_HEADERS, **headers}
                )
            document = await self._whole(first, pieces)
            if not self._exchange.tells_prompts:
                return JSONResponse(document, headers=headers)
            parts = paced(in_parts(document), self._exchange.turns)
            return StreamingResponse(parts, media_type="application/json", headers=headers)
        except ApiError as error:
            return error.response()
        except Exception as error:
            return self._fail(error).response()

    def _pieces(self) -> AsyncIterator[Piece]:
        of = self._exchange
        return interleaved(
            [
                pieces_of(index, generation, of.worker, of.tokenizer, of.options, of.retry_after_s)
                for index, generation in enumerate(of.generations)
            ]
        )

    def _fail(self, error: Exception) -> ApiError:
        """End all requests as a fault, log the traceback, and return the error for the client."""
        log.exception("the answer to %s failed", self._exchange.prompts[0].request.request_id)
        self._abort(EndReason.FAULT)
        return of_end(EndReason.FAULT, f"{type(error).__name__} while its text was written", 1.0)


def last_events(error: ApiError) -> bytes:
    """Return the last events of a stream that fails: the error and the end marker."""
    return event(error.body()) + DONE


def event(document: Mapping[str, object]) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def event_in_parts(document: Mapping[str, object]) -> Iterator[bytes]:
    """Yield an event of a stream in parts; a `LongList` may stand anywhere in it."""
    yield from chain([b"data: "], in_parts(document), [b"\n\n"])
