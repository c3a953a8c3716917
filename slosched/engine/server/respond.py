"""The response to one generation: a stream of events, or the whole text as one object."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from slosched.core import EndReason
from slosched.engine.server.errors import ApiError, is_for_later, of_end, of_refusal
from slosched.engine.server.protocol import Options
from slosched.engine.server.stop_strings import StopStrings
from slosched.engine.server.text import Detokenizer
from slosched.engine.server.tokenizer import Tokenizer
from slosched.engine.server.worker import EngineWorker, Generation

log = logging.getLogger(__name__)

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE = b"data: [DONE]\n\n"

Json = dict[str, object]


class Piece(NamedTuple):
    """The text that became certain with one token, often empty; the last has a finish reason."""

    token_id: int
    text: str
    finish_reason: str | None


class Format(Protocol):
    """The JSON objects in which an endpoint returns text."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, text: str) -> Json:
        """Return the whole text as a part of `choices[0]`."""

    def delta(self, text: str, is_first: bool, /) -> Json:
        """Return the new text of a stream as a part of `choices[0]`."""

    def with_prompt(self, document: Json, choice: Json, token_ids: Sequence[int], /) -> None:
        """Put the prompt's token ids where vLLM puts them."""


class CompletionFormat:
    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def whole(self, text: str) -> Json:
        return {"text": text}

    def delta(self, text: str, _is_first: bool, /) -> Json:
        return {"text": text}

    def with_prompt(self, _document: Json, choice: Json, token_ids: Sequence[int], /) -> None:
        choice["prompt_token_ids"] = list(token_ids)


class ChatFormat:
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}}

    def delta(self, text: str, is_first: bool, /) -> Json:
        role: Json = {"role": "assistant"} if is_first else {}
        return {"delta": {**role, "content": text}}

    def with_prompt(self, document: Json, _choice: Json, token_ids: Sequence[int], /) -> None:
        document["prompt_token_ids"] = list(token_ids)


@dataclass(frozen=True)
class GenerationResponse:
    """An ASGI response that follows a generation to its end.

    It sends nothing before the first token, so that a rejection is a 429 for streams, too.  When
    the client disconnects, or the response ends for any other reason, the request is aborted.
    """

    worker: EngineWorker
    tokenizer: Tokenizer
    generation: Generation
    options: Options
    format: Format
    model_name: str
    retry_after_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._abort_on_disconnect(receive))
        try:
            response = await self._respond()
            await response(scope, receive, send)
        finally:
            watch.cancel()
            self.worker.abort(self.generation.request.request_id)

    async def _abort_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.worker.abort(self.generation.request.request_id)

    async def _respond(self) -> Response:
        refusal, headers = self.generation.refusal, {}
        if refusal is not None:
            if not self.generation.request.takes_best_effort:
                return of_refusal(refusal).response()
            headers = {"x-slo-best-effort": "true"}
        try:
            pieces = self._pieces()
            first = await anext(pieces)
            if self.options.is_streaming:
                events = self._events(first, pieces)
                return StreamingResponse(
                    events, media_type="text/event-stream", headers={**_STREAM_HEADERS, **headers}
                )
            return JSONResponse(await self._whole(first, pieces), headers=headers)
        except ApiError as error:
            return error.response()
        except Exception as error:
            return self._fail(error).response()

    async def _pieces(self) -> AsyncIterator[Piece]:
        """Yield one piece for each token; raise ApiError if the request ends without finishing."""
        generation, sampling = self.generation, self.options.sampling
        decode = partial(
            self.tokenizer.decode, skip_special_tokens=self.options.skips_special_tokens
        )
        detokenizer = Detokenizer(decode)
        shows_stop = self.options.shows_stop
        stops = StopStrings(self.options.stops, is_shown=shows_stop)
        num_tokens = 0
        while True:
            update = await generation.updates.get()
            reason = update.end_reason
            if update.token_id is None or reason not in (None, EndReason.STOP, EndReason.LENGTH):
                assert reason is not None
                retry_after_s = self.retry_after_s
                if is_for_later(reason):
                    retry_after_s = self.worker.retry_after_s(generation.request) or retry_after_s
                raise of_end(reason, update.detail, retry_after_s)
            num_tokens += 1
            # The token at which the model stopped is a part of the text only if the client says so.
            is_hidden = reason is EndReason.STOP and not shows_stop
            text = "" if is_hidden else detokenizer.add(update.token_id)
            if reason is not None:
                text += detokenizer.flush()
            # Stop strings are searched only in text after the first `min_tokens` tokens.
            if num_tokens > sampling.min_tokens:
                text = stops.push(text)
            if stops.found:
                self.worker.abort(generation.request.request_id, EndReason.STOP)
                reason = EndReason.STOP
            elif reason is not None:
                text += stops.flush()
            yield Piece(update.token_id, text, reason and reason.value)
            if reason is not None:
                return

    async def _whole(self, first: Piece, pieces: AsyncIterator[Piece]) -> Json:
        all_pieces = [first, *[piece async for piece in pieces]]
        text = "".join(piece.text for piece in all_pieces)
        document = self._document(self.format.whole_object, self.format.whole(text), all_pieces)
        return {**document, "usage": self._usage(len(all_pieces)), "metrics": self._metrics()}

    async def _events(self, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        num_tokens = 0
        piece: Piece | None = first
        end = _DONE
        try:
            while piece is not None:
                delta = self.format.delta(piece.text, num_tokens == 0)
                document = self._document(
                    self.format.chunk_object, delta, [piece], has_prompt=num_tokens == 0
                )
                num_tokens += 1
                if self.options.continuous_usage:
                    document["usage"] = self._usage(num_tokens)
                yield _event(document)
                piece = await anext(pieces, None)
            if self.options.include_usage:
                usage = {"usage": self._usage(num_tokens), "metrics": self._metrics()}
                yield _event({**self._head(self.format.chunk_object), "choices": [], **usage})
        except ApiError as error:
            end = last_events(error)
        except Exception as error:
            end = last_events(self._fail(error))
        yield end

    def _fail(self, error: Exception) -> ApiError:
        """End the request as a fault, log the traceback, and return the error for the client."""
        request_id = self.generation.request.request_id
        log.exception("the answer to %s failed", request_id)
        self.worker.abort(request_id, EndReason.FAULT)
        return of_end(EndReason.FAULT, f"{type(error).__name__} while its text was written", 1.0)

    def _document(
        self, kind: str, content: Json, pieces: Sequence[Piece], *, has_prompt: bool = True
    ) -> Json:
        """Return a whole answer or an event, with the finish reason of the last piece."""
        choice: Json = {
            "index": 0,
            **content,
            "logprobs": None,
            "finish_reason": pieces[-1].finish_reason,
        }
        document: Json = {**self._head(kind), "choices": [choice]}
        if self.options.returns_token_ids:
            choice["token_ids"] = [piece.token_id for piece in pieces]
            if has_prompt:
                prompt = self.generation.request.prompt_token_ids or ()
                self.format.with_prompt(document, choice, prompt)
        return document

    def _head(self, kind: str) -> Json:
        return {
            "id": self.generation.request.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model_name,
        }

    def _usage(self, num_output_tokens: int) -> Json:
        request = self.generation.request
        num_prompt_tokens = request.num_prompt_tokens
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": request.num_cached_tokens},
        }

    def _metrics(self) -> Json:
        """Return the server's own times, which `vllm bench serve` reads from the usage chunk."""
        request = self.generation.request
        scheduled_s = self.generation.first_scheduled_s
        assert scheduled_s is not None
        return {
            "queue_time_ms": 1000 * (scheduled_s - request.arrival_s),
            "time_to_first_token_ms": 1000 * (request.token_times_s[0] - request.arrival_s),
        }


def last_events(error: ApiError) -> bytes:
    """Return the last events of a stream that fails: the error and the end marker."""
    return _event(error.body()) + _DONE


def _event(document: Mapping[str, object]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"
