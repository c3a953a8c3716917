"""Requests as their handlers see them: each a queue of updates, filled by the engine's thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from slosched.core import EndReason, PromptLogprobs, Refusal, Request, TokenLogprobs

log = logging.getLogger(__name__)


class Update(NamedTuple):
    """A request's share of one step: a token, its end, or both."""

    token_id: int | None = None
    end_reason: EndReason | None = None
    detail: str = ""
    """What was wrong, if the end reason is EndReason.FAULT or EndReason.NO_TOKEN."""
    logprobs: TokenLogprobs | None = None
    """The log-probabilities at the token's place, if the request wants them."""


class Generation:
    """A request as its handler sees it: a queue of updates, of which the last has an end reason."""

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.loop = loop
        self.updates: asyncio.Queue[Update] = asyncio.Queue()
        self.refusal: Refusal | None = None
        """Why the request cannot have its SLO; found when it arrived, or by the end of it."""
        self.siblings: tuple[Generation, ...] = ()
        """The other requests that answer the same prompt, if this is the first of them."""
        self.first_scheduled_s: float | None = None
        """The start of the first step that computed a part of the request."""
        self.expected_ttft_s: float | None = None
        """The median TTFT that was expected when it arrived, if the policy expects any."""
        self.prompt_logprobs: list[PromptLogprobs] = []
        """What was told of its prompt; all of it is there before the first token."""
        self.ended = asyncio.Event()
        """Set when the update with the end reason is there."""


class Generations:
    """The generations whose requests have not ended.

    Only the engine's thread changes them, until another one fails them all because that thread
    hangs.  From then on updates change nothing, and what is added fails at once, so that each
    generation ends exactly once even if that thread goes on.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Generation] = {}
        self._lock = threading.Lock()
        self._failure: str | None = None
        """Why all have failed; None if they have not."""

    @property
    def num_answers_awaited(self) -> int:
        """Return how many requests have not ended; a group counts as one.

        Any thread may ask.
        """
        return len({answer_id(request) for request in self.requests})

    @property
    def requests(self) -> list[Request]:
        """Return the requests that have not ended.  Any thread may ask."""
        with self._lock:
            return [generation.request for generation in self._by_name.values()]

    def find(self, request_id: str) -> Generation | None:
        """Return the generation of a request that has not ended, or None."""
        return self._by_name.get(request_id)

    def add(self, generation: Generation) -> None:
        """Add the generation of a request, and those of its siblings."""
        with self._lock:
            for each in (generation, *generation.siblings):
                self._by_name[each.request.request_id] = each
            if self._failure is not None:
                self._fail(self._failure)

    def deliver(self, updates: Mapping[str, Sequence[Update]]) -> None:
        """Give each handler its updates, and forget those whose last one has an end reason.

        Each event loop is woken once, however many of its requests have an update.
        """
        with self._lock:
            if self._failure is None:
                self._deliver(updates)

    def fail_all(self, why: str) -> None:
        """End every generation as a fault, also those that are still to be added."""
        with self._lock:
            self._failure = why
            self._fail(why)

    def _fail(self, why: str) -> None:
        self._deliver({name: (Update(None, EndReason.FAULT, why),) for name in self._by_name})

    def _deliver(self, updates: Mapping[str, Sequence[Update]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Generation, Update]]] = {}
        for name, of_request in updates.items():
            generation = self._by_name[name]
            if of_request[-1].end_reason is not None:
                del self._by_name[name]
            deliveries = by_loop.setdefault(generation.loop, [])
            deliveries += [(generation, update) for update in of_request]
        for loop, deliveries in by_loop.items():
            try:
                loop.call_soon_threadsafe(_hand_over, deliveries)
            except RuntimeError:  # the loop is closed, so no handler awaits these updates
                log.warning("%d updates came after their event loop had closed", len(deliveries))


def answer_id(request: Request) -> str:
    """Return the id of what a client waits for: of its group, or of the request itself."""
    return request.request_id if request.group is None else request.group.group_id


def _hand_over(deliveries: Iterable[tuple[Generation, Update]]) -> None:
    for generation, update in deliveries:
        generation.updates.put_nowait(update)
        if update.end_reason is not None:
            generation.ended.set()
