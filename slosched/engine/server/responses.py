"""The answers of /v1/responses: an object with an output message, whole or as a stream of events.

The objects and events are those of OpenAI's API reference ("Responses", streaming events), as far
as they are about text.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence

from slosched.engine.server.errors import ApiError
from slosched.engine.server.pieces import Piece
from slosched.engine.server.respond import Exchange, GenerationResponse, Json
from slosched.engine.server.values import Body, mapping

_AT = {"output_index": 0, "content_index": 0}
"""The place of the only part of the only message."""


class ResponsesResponse(GenerationResponse):
    """Answers with a response object.  Nothing is stored, so that none can be fetched later."""

    def __init__(self, exchange: Exchange, body: Body) -> None:
        """`body` is what the client sent, from which the answer repeats the settings."""
        super().__init__(exchange)
        self._body = body
        self._id = exchange.prompts[0].request.request_id
        self._message_id = f"msg-{self._id.removeprefix('resp-')}"
        self._created_s = int(time.time())
        self._num_events = 0

    async def _whole(self, first: Piece, pieces: AsyncIterator[Piece]) -> Json:
        answer = [first]
        async for piece in pieces:
            answer.append(piece)
        return self._final(answer)

    async def _events(self, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))
        message = self._message("in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=message)
        part = _part("")
        item_id = self._message_id
        yield self._event("response.content_part.added", item_id=item_id, part=part, **_AT)
        answer: list[Piece] = []
        piece: Piece | None = first
        try:
            while piece is not None:
                answer.append(piece)
                if piece.text:
                    kind = "response.output_text.delta"
                    delta = {"item_id": item_id, "delta": piece.text, "logprobs": [], **_AT}
                    yield self._event(kind, **delta)
                piece = await anext(pieces, None)
        except ApiError as error:
            yield self._failed(error, answer)
            return
        except Exception as error:
            yield self._failed(self._fail(error), answer)
            return
        text = _text(answer)
        done: Json = {"item_id": item_id, "text": text, "logprobs": [], **_AT}
        yield self._event("response.output_text.done", **done)
        yield self._event("response.content_part.done", item_id=item_id, part=_part(text), **_AT)
        final = self._final(answer)
        [message] = _list(final["output"])
        yield self._event("response.output_item.done", output_index=0, item=message)
        yield self._event(f"response.{final['status']}", response=final)

    def _event(self, kind: str, **fields: object) -> bytes:
        document = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {json.dumps(document, ensure_ascii=False)}\n\n".encode()

    def _failed(self, error: ApiError, answer: Sequence[Piece]) -> bytes:
        """Return the last event of a stream that fails."""
        failed = self._response("failed", output=[self._message("incomplete", answer)])
        failed["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=failed)

    def _final(self, answer: Sequence[Piece]) -> Json:
        """Return the response with the whole answer."""
        is_cut_off = answer[-1].finish_reason == "length"
        status = "incomplete" if is_cut_off else "completed"
        response = self._response(status, output=[self._message(status, answer)])
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut_off else None
        num_input_tokens, num_output_tokens = self._exchange.num_prompt_tokens, len(answer)
        response["usage"] = {
            "input_tokens": num_input_tokens,
            "input_tokens_details": {"cached_tokens": self._exchange.num_cached_tokens},
            "output_tokens": num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input_tokens + num_output_tokens,
        }
        response["completed_at"] = int(time.time())
        return response | {"metrics": self._exchange.metrics()}

    def _message(self, status: str, answer: Sequence[Piece]) -> Json:
        content = [_part(_text(answer))] if answer else []
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "service_tier": tier,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": mapping(mapping(body, "text"), "format") or {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _text(answer: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in answer)


def _list(value: object) -> list[Json]:
    assert isinstance(value, list)
    return value
