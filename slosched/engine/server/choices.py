"""The answers of /v1/completions and /v1/chat/completions: choices, whole or as a stream."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import chain
from typing import Protocol

from slosched.engine.server.errors import ApiError
from slosched.engine.server.generations import Generation
from slosched.engine.server.logprobs import Told, of_chat, of_completion
from slosched.engine.server.long_json import paced
from slosched.engine.server.pieces import Piece
from slosched.engine.server.respond import (
    DONE,
    Exchange,
    GenerationResponse,
    Json,
    event,
    event_in_parts,
    last_events,
)
from slosched.engine.server.told_prompt import ToldPrompt


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

    def place_of_prompt(self, document: Json, choice: Json, /) -> Json:
        """Return the object in which vLLM tells of the prompt."""

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

    def place_of_prompt(self, _document: Json, choice: Json, /) -> Json:
        return choice

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

    def place_of_prompt(self, document: Json, _choice: Json, /) -> Json:
        return document

    def logprobs(self, tokens: Sequence[Told], offset: int, /) -> Json:
        return of_chat(tokens, offset)


class ChoicesResponse(GenerationResponse):
    """Answers with one choice for each answer, in the format of its endpoint."""

    def __init__(self, exchange: Exchange, answer_format: Format) -> None:
        super().__init__(exchange)
        self._format = answer_format
        self._told_prompts: dict[str, ToldPrompt] = {}

    async def _whole(self, first: Piece, pieces: AsyncIterator[Piece]) -> Json:
        answers: list[list[Piece]] = [[] for _ in self._exchange.generations]
        answers[first.place].append(first)
        async for piece in pieces:
            answers[piece.place].append(piece)
        document = self._head(self._format.whole_object)
        choices = []
        for index, answer in enumerate(self._best(answers)):
            text = self._echo(index) + "".join(piece.text for piece in answer)
            content = self._format.whole(text, index)
            choices.append(self._choice(document, index, content, answer))
        document["choices"] = choices
        usage = self._usage(sum(piece.token_id is not None for piece in chain(*answers)))
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
        turns = self._exchange.turns
        begun: set[int] = set()
        offsets: Counter[int] = Counter()
        piece: Piece | None = first
        end = DONE
        try:
            while piece is not None:
                is_first = piece.place not in begun
                begun.add(piece.place)
                delta = self._format.delta(
                    self._echo(piece.place) + piece.text if is_first else piece.text,
                    piece.place,
                    is_first=is_first,
                    is_last=piece.finish_reason is not None,
                )
                document = self._head(self._format.chunk_object)
                choice = self._choice(
                    document, piece.place, delta, [piece], is_begin=is_first, offsets=offsets
                )
                document["choices"] = [choice]
                num_tokens += piece.token_id is not None
                if self._exchange.options.continuous_usage:
                    document["usage"] = self._usage(num_tokens)
                if is_first and self._exchange.tells_prompts:
                    async for part in paced(event_in_parts(document), turns):
                        yield part
                else:
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
        is_begin: bool = True,
        offsets: Counter[int] | None = None,
    ) -> Json:
        """Return the choice of a whole answer or an event, with its last piece's finish reason.

        `is_begin` tells whether it is the begin of its answer, to which the prompt belongs.
        `offsets` has the characters of each answer's tokens in earlier events.
        """
        options, prompt = self._exchange.options, self._prompt(index).request
        offsets = Counter() if offsets is None else offsets
        choice: Json = {
            "index": index,
            **content,
            "logprobs": self._logprobs(index, pieces, offsets, is_begin=is_begin),
            "finish_reason": self._format.finish_reason(pieces[-1].finish_reason, index),
        }
        if options.returns_token_ids:
            choice["token_ids"] = [piece.token_id for piece in pieces if piece.token_id is not None]
            if is_begin:
                ids = list(prompt.prompt_token_ids or ())
                self._format.place_of_prompt(document, choice)["prompt_token_ids"] = ids
        if options.num_prompt_logprobs is not None:
            told = self._told_prompt(index).of_vllm(options.num_prompt_logprobs)
            self._format.place_of_prompt(document, choice)["prompt_logprobs"] = told
        return choice

    def _logprobs(
        self, index: int, pieces: Sequence[Piece], offsets: Counter[int], *, is_begin: bool
    ) -> Json | None:
        options = self._exchange.options
        tokens = [piece.told for piece in pieces if piece.told is not None]
        offset = offsets[index]
        offsets[index] += sum(len(token.text) for token in tokens)
        if options.echoes and options.num_logprobs is not None:
            prompt = self._told_prompt(index)
            if is_begin:
                return prompt.of_echo(options.num_logprobs, tokens)
            offset += prompt.num_chars
        return self._format.logprobs(tokens, offset) if tokens else None

    def _prompt(self, index: int) -> Generation:
        """Return the first generation of the prompt that an answer belongs to."""
        return self._exchange.prompts[index // self._exchange.options.num_answers]

    def _echo(self, index: int) -> str:
        """Return the text of the prompt if it is to stand in front of the answer."""
        texts, options = self._exchange.prompt_texts, self._exchange.options
        return texts[index // options.num_answers] if texts else ""

    def _told_prompt(self, index: int) -> ToldPrompt:
        """Return what is told of the prompt that an answer belongs to, the same for all of them."""
        prompt = self._prompt(index)
        name = prompt.request.request_id
        if name not in self._told_prompts:
            ids, tokenizer = prompt.request.prompt_token_ids or (), self._exchange.tokenizer
            self._told_prompts[name] = ToldPrompt(ids, prompt.prompt_logprobs, tokenizer)
        return self._told_prompts[name]

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
