"""Beam search, as the client of an engine that computes one token of every beam at a time.

vLLM V1 does likewise: each beam is a request for one token, whose prompt ends with the beam's
tokens.  The prefix cache holds what was computed before, and a scheduler needs to know nothing of
beams.  A token is due when the client's SLO says so.

Source: vLLM 0.11 and later, `beam_search` of the OpenAI server, and its score of a beam.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from slosched.core import SLO, EndReason, OnInfeasible, Request, SamplingParams
from slosched.engine.server.beam_progress import BeamProgress
from slosched.engine.server.choices import Format
from slosched.engine.server.errors import (
    ApiError,
    not_serving,
    of_end,
    of_refusal,
)
from slosched.engine.server.generations import Generation, Update
from slosched.engine.server.pieces import error_of
from slosched.engine.server.protocol import Options
from slosched.engine.server.respond import Json
from slosched.engine.server.text import text_behind
from slosched.engine.server.tokenizer import Tokenizer
from slosched.engine.server.worker import EngineWorker, NotServingError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beam:
    """A beginning of an answer, or a whole one."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    """The log-probability of its tokens, the end token among them."""
    score: float = 0.0
    """The log-probability over a power of the number of tokens, prompt included."""
    has_stopped: bool = False
    """Whether its last token is one at which the model stops."""


class BeamSearch:
    """The search for the likeliest answers to one prompt."""

    def __init__(
        self,
        worker: EngineWorker,
        request: Request,
        options: Options,
        end_token_ids: frozenset[int],
        retry_after_s: float,
        note_ended: Callable[[Sequence[Generation]], None],
    ) -> None:
        """Prepare it; `request` is what the client asked for, and is not queued itself.

        At the end `note_ended` gets a generation for each answer, or one for all that there is if
        the search failed.
        """
        self._worker = worker
        self._request = request
        self._num_beams = options.num_answers
        self._length_penalty = options.length_penalty
        self._ends = frozenset() if options.sampling.ignore_eos else end_token_ids
        self._retry_after_s = retry_after_s
        self._running: list[Generation] = []
        self._progress = BeamProgress(request)
        self._note_ended: Callable[[Sequence[Generation]], None] | None = note_ended

    async def run(self) -> list[Beam]:
        """Return the best answers, the best first; raise ApiError if a step is not served."""
        answers = await self._search()
        self._end(
            (len(beam.token_ids), EndReason.STOP if beam.has_stopped else EndReason.LENGTH)
            for beam in answers
        )
        return answers

    async def _search(self) -> list[Beam]:
        beams, answers = [Beam()], list[Beam]()
        for num_tokens in range(self._request.max_tokens):
            updates = await self._step(beams, num_tokens)
            found = [
                self._longer(beam, *pair)
                for beam, update in zip(beams, updates, strict=True)
                for pair in _likeliest(update)
            ]
            answers += [beam for beam in found if beam.has_stopped]
            beams = self._best([beam for beam in found if not beam.has_stopped])
            if not beams:
                break
        return self._best([*answers, *beams])

    def abort(self, reason: EndReason = EndReason.CLIENT) -> None:
        """End the requests of the step that runs; do nothing if the search is over."""
        for generation in self._running:
            self._worker.abort(generation.request.request_id, reason)
        self._give_up(reason)

    def _give_up(self, reason: EndReason) -> None:
        self._end([(self._progress.num_tokens, reason)])

    def _end(self, ends: Iterable[tuple[int, EndReason]]) -> None:
        """Tell what came of the search, the first time that it ends."""
        if self._note_ended is not None:
            self._note_ended(self._progress.ended(ends, self._worker.now_s()))
            self._note_ended = None

    async def _step(self, beams: Sequence[Beam], num_tokens: int) -> list[Update]:
        """Compute the next token of each beam, all of which have `num_tokens`."""
        try:
            self._running = [
                self._worker.submit(self._request_for(beam, num_tokens, place))
                for place, beam in enumerate(beams)
            ]
        except NotServingError as error:
            self._give_up(EndReason.SHUTDOWN)
            raise not_serving(str(error), self._retry_after_s) from error
        updates = [await self._update_of(generation) for generation in self._running]
        self._progress.note_step(self._running)
        return updates

    def _request_for(self, beam: Beam, num_tokens: int, place: int) -> Request:
        asked, slo = self._request, self._request.slo
        assert asked.prompt_token_ids is not None
        prompt = [*asked.prompt_token_ids, *beam.token_ids]
        due_s = slo.ttft_s + (num_tokens * slo.tpot_s if num_tokens else 0.0)
        return replace(
            asked,
            request_id=f"{asked.request_id}.{num_tokens}.{place}",
            num_prompt_tokens=len(prompt),
            prompt_token_ids=prompt,
            max_tokens=1,
            slo=SLO(due_s, math.inf, slo.e2e_s),
            sampling=SamplingParams(ignore_eos=True, num_logprobs=2 * self._num_beams),
            num_cached_tokens=0,
            output_token_ids=[],
            token_times_s=[],
        )

    async def _update_of(self, generation: Generation) -> Update:
        """Return the token of a request; raise ApiError if there is none."""
        refusal = generation.refusal
        if refusal is not None and generation.request.on_infeasible is OnInfeasible.REJECT:
            self._give_up(refusal.reason)
            raise of_refusal(refusal)
        update = await generation.updates.get()
        if update.token_id is not None and update.end_reason is EndReason.LENGTH:
            return update
        assert update.end_reason is not None
        self._give_up(update.end_reason)
        raise error_of(generation, update, self._worker, self._retry_after_s)

    def _longer(self, beam: Beam, token_id: int, logprob: float) -> Beam:
        has_stopped = token_id in self._ends
        token_ids, total = (*beam.token_ids, token_id), beam.logprob + logprob
        num_tokens = self._request.num_prompt_tokens + len(token_ids) - has_stopped
        return Beam(token_ids, total, total / num_tokens**self._length_penalty, has_stopped)

    def _best(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=attrgetter("score"), reverse=True)[: self._num_beams]


def _likeliest(update: Update) -> Sequence[tuple[int, float]]:
    """Return the likeliest next tokens of a beam with their log-probabilities."""
    if update.logprobs is None:
        raise ApiError(
            400,
            "this device computes no probabilities, so that it cannot search: leave out "
            "use_beam_search",
            param="use_beam_search",
        )
    return update.logprobs.likeliest


@dataclass(frozen=True)
class BeamResponse:
    """An ASGI response with the answers that a beam search finds.

    When the client disconnects, the search ends.
    """

    search: BeamSearch
    request: Request
    tokenizer: Tokenizer
    options: Options
    format: Format
    model_name: str
    timeout_s: float | None = None
    """The time after which an unfinished search is ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self._respond())
        watch = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait(
                {answer, watch}, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if answer.done():
                await answer.result()(scope, receive, send)
            elif not watch.done():
                self.search.abort(EndReason.TIMEOUT)
                await of_end(EndReason.TIMEOUT, "", 1.0).response()(scope, receive, send)
        finally:
            watch.cancel()
            answer.cancel()
            self.search.abort()

    async def _respond(self) -> Response:
        try:
            return JSONResponse(self._document(await self.search.run()))
        except ApiError as error:
            return error.response()
        except Exception as error:
            log.exception("the beam search of %s failed", self.request.request_id)
            self.search.abort(EndReason.FAULT)
            why = f"{type(error).__name__} in its beam search"
            return of_end(EndReason.FAULT, why, 1.0).response()

    def _document(self, beams: Sequence[Beam]) -> Json:
        num_prompt_tokens = self.request.num_prompt_tokens
        num_output_tokens = sum(len(beam.token_ids) for beam in beams)
        document: Json = {
            "id": self.request.request_id,
            "object": self.format.whole_object,
            "created": int(time.time()),
            "model": self.model_name,
            "usage": {
                "prompt_tokens": num_prompt_tokens,
                "completion_tokens": num_output_tokens,
                "total_tokens": num_prompt_tokens + num_output_tokens,
                "prompt_tokens_details": {"cached_tokens": self.request.num_cached_tokens},
            },
        }
        document["choices"] = [self._choice(document, i, beam) for i, beam in enumerate(beams)]
        return document

    def _choice(self, document: Json, index: int, beam: Beam) -> Json:
        is_hidden = beam.has_stopped and not self.options.shows_stop
        shown = beam.token_ids[:-1] if is_hidden else beam.token_ids
        decode = partial(
            self.tokenizer.decode, skip_special_tokens=self.options.skips_special_tokens
        )
        ids = list(self.request.prompt_token_ids or ())
        choice: Json = {
            "index": index,
            **self.format.whole(text_behind(ids, shown, decode), index),
            "logprobs": None,
            "finish_reason": "stop" if beam.has_stopped else "length",
        }
        if self.options.returns_token_ids:
            choice["token_ids"] = list(beam.token_ids)
            self.format.place_of_prompt(document, choice)["prompt_token_ids"] = ids
        return choice


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
