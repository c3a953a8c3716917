"""The text of generations, piece by piece as their tokens come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import NamedTuple

from slosched.core import EndReason, Request
from slosched.engine.server.errors import (
    ApiError,
    is_for_later,
    never_fits,
    not_cut,
    of_end,
    of_refusal,
)
from slosched.engine.server.generations import Generation, Update
from slosched.engine.server.logprobs import Told, tell
from slosched.engine.server.protocol import Options
from slosched.engine.server.stop_strings import StopStrings
from slosched.engine.server.text import Detokenizer
from slosched.engine.server.tokenizer import Tokenizer
from slosched.engine.server.worker import EngineWorker
from slosched.scheduler import Scheduler


class Piece(NamedTuple):
    """The text that became certain with one token, often empty; the last has a finish reason."""

    place: int
    """The place of its answer among all that the client asked for."""
    token_id: int | None
    """None if the client asked for no answer."""
    text: str
    finish_reason: str | None
    logprob: float | None
    """That of its token; None where nobody wants it or nothing is drawn."""
    told: Told | None
    """What the client is told of the odds at its place."""


class EndedError(Exception):
    """A request ended without finishing; `interleaved` raises the error for its client instead."""

    def __init__(
        self, generation: Generation, update: Update, worker: EngineWorker, retry_after_s: float
    ) -> None:
        super().__init__(update.end_reason)
        self._ended = generation, update, worker, retry_after_s

    def for_client(self) -> ApiError:
        """Return the error response; to be asked once for each client, who may get a time of its
        own at which to come again."""
        return error_of(*self._ended)


async def pieces_of(
    place: int,
    generation: Generation,
    worker: EngineWorker,
    tokenizer: Tokenizer,
    options: Options,
    retry_after_s: float,
) -> AsyncIterator[Piece]:
    """Yield one piece for each token; raise EndedError if the request ends without finishing."""
    decode = partial(tokenizer.decode, skip_special_tokens=options.skips_special_tokens)
    detokenizer = Detokenizer(decode, generation.request.prompt_token_ids or ())
    shows_stop = options.shows_stop
    stops = StopStrings(options.stops, is_shown=shows_stop)
    num_tokens = 0
    while True:
        update = await generation.updates.get()
        reason = update.end_reason
        if update.token_id is None or reason not in (None, EndReason.STOP, EndReason.LENGTH):
            raise EndedError(generation, update, worker, retry_after_s)
        if not options.has_answer:
            yield Piece(place, None, "", EndReason.LENGTH.value, None, None)
            return
        num_tokens += 1
        # The token at which the model stopped is a part of the text only if the client says so.
        is_hidden = reason is EndReason.STOP and not shows_stop
        text = "" if is_hidden else detokenizer.add(update.token_id)
        if reason is not None:
            text += detokenizer.flush()
        # Stop strings are searched only in text after the first `min_tokens` tokens.
        if num_tokens > options.sampling.min_tokens:
            text = stops.push(text)
        if stops.found:
            worker.abort(generation.request.request_id, EndReason.STOP)
            reason = EndReason.STOP
        elif reason is not None:
            text += stops.flush()
        logprob, told = None, None
        if update.logprobs is not None:
            logprob = update.logprobs.drawn
            # Now and not when the answer is whole: thousands of tokens at once take too long.
            if options.num_logprobs is not None:
                told = tell(update.token_id, update.logprobs, tokenizer)
        yield Piece(place, update.token_id, text, reason and reason.value, logprob, told)
        if reason is not None:
            return


def error_of(
    generation: Generation, update: Update, worker: EngineWorker, retry_after_s: float
) -> ApiError:
    """Return the error response to a request that ended with `update`, without finishing."""
    refusal, reason = generation.refusal, update.end_reason
    assert reason is not None
    if refusal is not None and reason is refusal.reason:
        return of_refusal(refusal)
    if reason is EndReason.TOO_LONG:
        return _too_long(generation.request, worker.scheduler)
    if is_for_later(reason):
        retry_after_s = worker.retry_after_s(generation.request) or retry_after_s
    return of_end(reason, update.detail, retry_after_s)


def _too_long(request: Request, scheduler: Scheduler) -> ApiError:
    kv, num_tokens = scheduler.kv, request.num_prompt_tokens + request.max_tokens
    if kv.fits_alone(num_tokens):
        return not_cut(request.num_prompt_tokens, scheduler.limits.max_num_batched_tokens)
    return never_fits(num_tokens, kv.num_blocks * kv.block_size)


async def interleaved(streams: Sequence[AsyncIterator[Piece]]) -> AsyncIterator[Piece]:
    """Yield the pieces of all streams as they come; raise the first error of any of them.

    Raises ApiError if a request ends without finishing.
    """
    if len(streams) == 1:
        try:
            async for piece in streams[0]:
                yield piece
        except EndedError as error:
            raise error.for_client() from error
        return
    arrived: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, arrived)) for stream in streams]
    try:
        num_left = len(tasks)
        while num_left:
            found = await arrived.get()
            if isinstance(found, EndedError):
                raise found.for_client() from found
            if isinstance(found, Exception):
                raise found
            if found is None:
                num_left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()


async def _pump(
    stream: AsyncIterator[Piece], arrived: asyncio.Queue[Piece | Exception | None]
) -> None:
    """Queue the pieces of a stream, then None, or the error that ended it."""
    try:
        async for piece in stream:
            arrived.put_nowait(piece)
    except Exception as error:
        arrived.put_nowait(error)
    else:
        arrived.put_nowait(None)
