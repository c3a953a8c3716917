"""The answers of /v1/completions and /v1/chat/completions: choices, whole or as a stream."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from slosched.engine.server.errors import ApiError
from slosched.engine.server.logprobs import Told, of_chat, of_completion
from slosched.engine.server.pieces import Piece
from slosched.engine.server.respond import (
    DONE,
    Exchange,
    GenerationResponse,
    Json,
    event,
    last_events,
)


class Format(Protocol):
    """The JSON objects in which an endpoint returns text."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, text: str, place: int, /) -> Json:
        """Return the whole text of the answer at a place as a part of its choice."""

    def delta(self, text: str, place: int, /, *, is_first: bool, is_last: bool) -> Json:
        """Return the new text of the answer at a place of a stream as a part of its choice."""

    def finish_reason(self, reason: str | None, place: int, /) -> str | None:
        """Return how the endpoint names the reason for which the answer at a place ended.

        To be asked after the whole text, or the delta.
        """

    def with_prompt(self, document: Json, choice: Json, token_ids: Sequence[int], /) -> None:
        """Put the prompt's token ids where vLLM puts them."""

    def logprobs(self, tokens: Sequence[Told], offset: int, /) -> Json:
        """Return the log-probabilities of tokens that begin `offset` characters behind."""


class CompletionFormat:
    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def whole(self, text: str, _place: int, /) -> Json:
        return {"text": text}

    def delta(self, text: str, _place: int, /, *, is_first: bool, is_last: bool) -> Json:  # noqa: ARG002
        return {"text": text}

    def finish_reason(self, reason: str | None, _place: int, /) -> str | None:
        return reason

    def with_prompt(self, _document: Json, choice: Json, token_ids: Sequence[int], /) -> None:
        choice["prompt_token_ids"] = list(token_ids)

    def logprobs(self, tokens: Sequence[Told], offset: int, /) -> Json:
        return of_completion(tokens, offset)


class ChatFormat:
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, text: str, _place: int, /) -> Json:
        return {"message": {"role": "assistant", "content": text}}

    def delta(self, text: str, _place: int, /, *, is_first: bool, is_last: bool) -> Json:  # noqa: ARG002
        role: Json = {"role": "assistant"} if is_first else {}
        return {"delta": {**role, "content": text}}

    def finish_reason(self, reason: str | None, _place: int, /) -> str | None:
        return reason

    def with_prompt(self, document: Json, _choice: Json, token_ids: Sequence[int], /) -> None:
        document["prompt_token_ids"] = list(token_ids)

    def logprobs(self, tokens: Sequence[Told], offset: int, /) -> Json:
        return of_chat(tokens, offset)


class ChoicesResponse(GenerationResponse):
    """Answers with one choice for each answer, in the format of its endpoint."""

    def __init__(self, exchange: Exchange, answer_format: Format) -> None:
        super().__init__(exchange)
        self._format = answer_format

    async def _whole(self, first: Piece, pieces: AsyncIterator[Piece]) -> Json:
        answers: list[list[Piece]] = [[] for _ in self._exchange.generations]
        answers[first.place].append(first)
        async for piece in pieces:
            answers[piece.place].append(piece)
        document = self._head(self._format.whole_object)
        choices = []
        for index, answer in enumerate(self._best(answers)):
            content = self._format.whole("".join(piece.text for piece in answer), index)
            choices.append(self._choice(document, index, content, answer))
        document["choices"] = choices
        usage = self._usage(sum(map(len, answers)))
        return {**document, "usage": usage, "metrics": self._exchange.metrics()}

    def _best(self, answers: list[list[Piece]]) -> list[list[Piece]]:
        """Return the answers that the client gets: of each prompt the likeliest by the token."""
        num_each, num_kept = (
            self._exchange.options.num_candidates,
            self._exchange.options.num_answers,
        )
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
        offsets: Counter[int] = Counter()
        piece: Piece | None = first
        end = DONE
        try:
            while piece is not None:
                is_first = piece.place not in begun
                begun.add(piece.place)
                delta = self._format.delta(
                    piece.text,
                    piece.place,
                    is_first=is_first,
                    is_last=piece.finish_reason is not None,
                )
                document = self._head(self._format.chunk_object)
                choice = self._choice(
                    document, piece.place, delta, [piece], has_prompt=is_first, offsets=offsets
                )
                document["choices"] = [choice]
                num_tokens += 1
                if self._exchange.options.continuous_usage:
                    document["usage"] = self._usage(num_tokens)
                yield event(document)
                piece = await anext(pieces, None)
            if self._exchange.options.include_usage:
                usage = {"usage": self._usage(num_tokens), "metrics": self._exchange.metrics()}
                yield event({**self._head(self._format.chunk_object), "choices": [], **usage})
        except ApiError as error:
            end = last_events(error)
        except Exception as error:
            end = last_events(self._fail(error))
        yield end

    def _choice(
        self,
        document: Json,
        index: int,
        content: Json,
        pieces: Sequence[Piece],
        *,
        has_prompt: bool = True,
        offsets: Counter[int] | None = None,
    ) -> Json:
        """Return the choice of a whole answer or an event, with its last piece's finish reason.

        `offsets` has the characters of each answer's tokens in earlier events.
        """
        choice: Json = {
            "index": index,
            **content,
            "logprobs": self._logprobs(index, pieces, Counter() if offsets is None else offsets),
            "finish_reason": self._format.finish_reason(pieces[-1].finish_reason, index),
        }
        if self._exchange.options.returns_token_ids:
            choice["token_ids"] = [piece.token_id for piece in pieces]
            if has_prompt:
                prompt = self._exchange.prompts[index // self._exchange.options.num_answers].request
                self._format.with_prompt(document, choice, prompt.prompt_token_ids or ())
        return choice

    def _logprobs(self, index: int, pieces: Sequence[Piece], offsets: Counter[int]) -> Json | None:
        tokens = [piece.told for piece in pieces if piece.told is not None]
        if not tokens:
            return None
        offset = offsets[index]
        offsets[index] += sum(len(token.text) for token in tokens)
        return self._format.logprobs(tokens, offset)

    def _head(self, kind: str) -> Json:
        tier = self._exchange.prompts[0].request.tier
        return {
            "id": self._exchange.prompts[0].request.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self._exchange.model_name,
            **({} if tier is None else {"service_tier": tier}),
        }

    def _usage(self, num_output_tokens: int) -> Json:
        """Return the tokens of all prompts, each counted once, and of all answers."""
        num_prompt_tokens = self._exchange.num_prompt_tokens
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._exchange.num_cached_tokens},
        }


def _mean_logprob(answer: Sequence[Piece]) -> float:
    """Return the mean log-probability of the tokens; 0 on a device that draws none."""
    return sum(piece.logprob or 0.0 for piece in answer) / len(answer)
