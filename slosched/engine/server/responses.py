"""The answers of /v1/responses: a response object with its output, whole or as a stream of events.

The objects are those of OpenAI's API reference ("Responses"), as far as they are about text and
functions.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence

from slosched.engine.server.errors import ApiError
from slosched.engine.server.pieces import Piece
from slosched.engine.server.respond import Exchange, GenerationResponse, Json
from slosched.engine.server.responses_output import Event, Output
from slosched.engine.server.tool_calls import reader_of
from slosched.engine.server.values import Body, flag, mapping


class ResponsesResponse(GenerationResponse):
    """Answers with a response object.  Nothing is stored, so that none can be fetched later."""

    def __init__(self, exchange: Exchange, body: Body) -> None:
        """`body` is what the client sent, from which the answer repeats the settings."""
        super().__init__(exchange)
        self._body = body
        self._id = exchange.prompts[0].request.request_id
        tools = exchange.options.tools
        reader = None if tools is None else reader_of(tools)
        self._output = Output(self._id.removeprefix("resp-"), reader)
        self._created_s = int(time.time())
        self._num_events = 0
        self._num_tokens = 0

    async def _whole(self, first: Piece, pieces: AsyncIterator[Piece]) -> Json:
        piece: Piece | None = first
        while piece is not None:
            self._take(piece)
            last, piece = piece, await anext(pieces, None)
        list(self._output.end(_status(last)))
        return self._final(_status(last))

    async def _events(self, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))
        for event in self._output.begin():
            yield self._event(event.kind, **event.fields)
        piece: Piece | None = first
        try:
            while piece is not None:
                for event in self._take(piece):
                    yield self._event(event.kind, **event.fields)
                last, piece = piece, await anext(pieces, None)
        except ApiError as error:
            yield self._failed(error)
            return
        except Exception as error:
            yield self._failed(self._fail(error))
            return
        for event in self._output.end(_status(last)):
            yield self._event(event.kind, **event.fields)
        final = self._final(_status(last))
        yield self._event(f"response.{final['status']}", response=final)

    def _take(self, piece: Piece) -> list[Event]:
        """Return the events of the next token."""
        self._num_tokens += 1
        return list(self._output.push(piece.text, piece.told))

    def _event(self, kind: str, **fields: object) -> bytes:
        document = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {json.dumps(document, ensure_ascii=False)}\n\n".encode()

    def _failed(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails."""
        failed = self._response("failed", self._output.items("incomplete"))
        failed["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=failed)

    def _final(self, status: str) -> Json:
        """Return the response with the whole output."""
        response = self._response(status, self._output.items(status))
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        num_input_tokens, num_output_tokens = self._exchange.num_prompt_tokens, self._num_tokens
        response["usage"] = {
            "input_tokens": num_input_tokens,
            "input_tokens_details": {"cached_tokens": self._exchange.num_cached_tokens},
            "output_tokens": num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input_tokens + num_output_tokens,
        }
        response["completed_at"] = int(time.time())
        return response | {"metrics": self._exchange.metrics()}

    def _response(self, status: str, output: Sequence[Json] = ()) -> Json:
        body, sampling = self._body, self._exchange.options.sampling
        tier = self._exchange.prompts[0].request.tier
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": dict(mapping(body, "metadata")),
            "model": self._exchange.model_name,
            "output": list(output),
            "parallel_tool_calls": flag(body, "parallel_tool_calls", default=True),
            "previous_response_id": None,
            "service_tier": tier,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": mapping(mapping(body, "text"), "format") or {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_logprobs": body.get("top_logprobs") or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _status(last: Piece) -> str:
    """Return the status of an answer by its last token."""
    return "incomplete" if last.finish_reason == "length" else "completed"
