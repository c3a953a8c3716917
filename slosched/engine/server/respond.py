"""The response to one generation: a stream of events, or the whole text as one object."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from slosched.core import EndReason, OnInfeasible
from slosched.engine.server.errors import ApiError, of_end, of_refusal
from slosched.engine.server.generations import Generation, Update
from slosched.engine.server.pieces import Piece, interleaved, pieces_of
from slosched.engine.server.protocol import Options
from slosched.engine.server.tokenizer import Tokenizer
from slosched.engine.server.worker import EngineWorker

log = logging.getLogger(__name__)

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE = b"data: [DONE]\n\n"

Json = dict[str, object]


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
    """An ASGI response that follows the answers to one prompt, or to several, to their ends.

    It sends nothing before the first token, so that a rejection is a 429 for streams, too.  When
    the client disconnects, or the response ends for any other reason, all requests are aborted.
    """

    worker: EngineWorker
    tokenizer: Tokenizer
    prompts: Sequence[Generation]
    """The first generation of each prompt; the others are its siblings."""
    options: Options
    format: Format
    model_name: str
    retry_after_s: float
    timeout_s: float | None = None
    """The time after which unfinished requests are ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        timer = self.timeout_s and loop.call_later(self.timeout_s, self._time_out)
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
        for generation in self._generations:
            self.worker.abort(generation.request.request_id, reason)

    def _time_out(self) -> None:
        """End all requests, and answer without waiting for the engine, which may hang in a step."""
        self._abort(EndReason.TIMEOUT)
        for generation in self._generations:
            generation.updates.put_nowait(Update(end_reason=EndReason.TIMEOUT))

    @property
    def _generations(self) -> list[Generation]:
        """Return all generations, those of a prompt one after the other."""
        return [each for first in self.prompts for each in (first, *first.siblings)]

    async def _respond(self) -> Response:
        for generation in self.prompts:
            refusal, request = generation.refusal, generation.request
            if refusal is not None and request.on_infeasible is OnInfeasible.REJECT:
                return of_refusal(refusal).response()
        try:
            pieces = self._pieces()
            first = await anext(pieces)
            is_relegated = any(generation.request.is_relegated for generation in self.prompts)
            headers = {"x-slo-best-effort": "true"} if is_relegated else {}
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

    def _pieces(self) -> AsyncIterator[Piece]:
        return interleaved(
            [
                pieces_of(
                    index,
                    generation,
                    self.worker,
                    self.tokenizer,
                    self.options,
                    self.retry_after_s,
                )
                for index, generation in enumerate(self._generations)
            ]
        )

    async def _whole(self, first: Piece, pieces: AsyncIterator[Piece]) -> Json:
        answers: list[list[Piece]] = [[] for _ in self._generations]
        answers[first.place].append(first)
        async for piece in pieces:
            answers[piece.place].append(piece)
        document = self._head(self.format.whole_object)
        document["choices"] = [
            self._choice(
                document, index, self.format.whole("".join(p.text for p in answer)), answer
            )
            for index, answer in enumerate(self._best(answers))
        ]
        usage = self._usage(sum(map(len, answers)))
        return {**document, "usage": usage, "metrics": self._metrics()}

    def _best(self, answers: list[list[Piece]]) -> list[list[Piece]]:
        """Return the answers that the client gets: of each prompt the likeliest by the token."""
        num_each, num_kept = self.options.num_candidates, self.options.num_answers
        if num_each == num_kept:
            return answers
        by_prompt = [answers[i : i + num_each] for i in range(0, len(answers), num_each)]
        return [
            answer
            for candidates in by_prompt
            for answer in sorted(candidates, key=_mean_logprob, reverse=True)[:num_kept]
        ]

    async def _events(self, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        num_tokens = 0
        begun: set[int] = set()
        piece: Piece | None = first
        end = _DONE
        try:
            while piece is not None:
                is_first = piece.place not in begun
                begun.add(piece.place)
                delta = self.format.delta(piece.text, is_first)
                document = self._head(self.format.chunk_object)
                choice = self._choice(document, piece.place, delta, [piece], has_prompt=is_first)
                document["choices"] = [choice]
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
        """End all requests as a fault, log the traceback, and return the error for the client."""
        log.exception("the answer to %s failed", self.prompts[0].request.request_id)
        self._abort(EndReason.FAULT)
        return of_end(EndReason.FAULT, f"{type(error).__name__} while its text was written", 1.0)

    def _choice(
        self,
        document: Json,
        index: int,
        content: Json,
        pieces: Sequence[Piece],
        *,
        has_prompt: bool = True,
    ) -> Json:
        """Return the choice of a whole answer or an event, with its last piece's finish reason."""
        choice: Json = {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": pieces[-1].finish_reason,
        }
        if self.options.returns_token_ids:
            choice["token_ids"] = [piece.token_id for piece in pieces]
            if has_prompt:
                prompt = self.prompts[index // self.options.num_answers].request
                self.format.with_prompt(document, choice, prompt.prompt_token_ids or ())
        return choice

    def _head(self, kind: str) -> Json:
        tier = self.prompts[0].request.tier
        return {
            "id": self.prompts[0].request.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model_name,
            **({} if tier is None else {"service_tier": tier}),
        }

    def _usage(self, num_output_tokens: int) -> Json:
        """Return the tokens of all prompts, each counted once, and of all answers."""
        requests = [generation.request for generation in self.prompts]
        num_prompt_tokens = sum(request.num_prompt_tokens for request in requests)
        num_cached = sum(request.num_cached_tokens for request in requests)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _metrics(self) -> Json:
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


def _mean_logprob(answer: Sequence[Piece]) -> float:
    """Return the mean log-probability of the tokens; 0 on a device that draws none."""
    return sum(piece.logprob or 0.0 for piece in answer) / len(answer)


def last_events(error: ApiError) -> bytes:
    """Return the last events of a stream that fails: the error and the end marker."""
    return _event(error.body()) + _DONE


def _event(document: Mapping[str, object]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"
