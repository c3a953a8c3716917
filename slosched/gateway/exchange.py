"""One request of a client: sent to a replica, to another one if need be, and ended exactly once."""

from __future__ import annotations

import time
from collections.abc import Sequence

import aiohttp
from starlette.types import Scope, Send

from slosched.gateway.asked import Asked
from slosched.gateway.errors import never_in_time, replica_failed, too_late
from slosched.gateway.fleet import LiveFleet
from slosched.gateway.forward import (
    NotReachedError,
    NotTakenError,
    StreamBrokenError,
    Whole,
    forward,
    newest_or_sooner,
)
from slosched.gateway.metrics import End, GatewayMetrics
from slosched.gateway.replica import LiveReplica

_MOST_BROKEN = 2
"""Replicas that may break off at the same request; it may be the request that breaks them."""


class Exchange:
    """Answers one request.

    A request goes on to another replica as long as its client has seen nothing: if a replica does
    not connect or answers 503, after the first one that takes it and breaks off, and after a 429 if
    another replica is expected to be in time.  A replica that has failed so counts as down until it
    tells its state again, but not one that only has too many requests like this one: else a client
    could keep it from all others.
    """

    def __init__(
        self,
        fleet: LiveFleet,
        metrics: GatewayMetrics,
        session: aiohttp.ClientSession,
        timeout: aiohttp.ClientTimeout,
    ) -> None:
        self._fleet, self._metrics = fleet, metrics
        self._session, self._timeout = session, timeout

    async def answer(self, asked: Asked, content: bytes, scope: Scope, send: Send) -> End:
        """Answer the request; return how it ended.  Raises ApiError for an answer of our own."""
        began_s = time.monotonic()
        tried: list[LiveReplica] = []
        able = self._fleet.able(asked, tried)
        self._shed_if_late(asked, able)
        whole: Whole | None = None
        why, num_broken = "", 0
        while able and num_broken < _MOST_BROKEN:
            replica = self._fleet.choose(asked.request, able)
            if tried:
                self._metrics.moved[tried[-1]] += 1
            tried.append(replica)
            try:
                answer = await self._try(replica, asked, content, scope, send)
            except NotTakenError as error:
                why = f"{replica} did not answer: {error}"
                num_broken += not isinstance(error, NotReachedError)
            except StreamBrokenError:
                return End.FAILED
            else:
                if answer is None:
                    return End.ANSWERED
                whole = newest_or_sooner(answer, whole)
                if not answer.may_be_moved:
                    break
            able = self._fleet.able(asked, tried)
            if whole is not None and whole.status == 429:
                able = self._in_time(able, asked, time.monotonic() - began_s)
        if whole is None:
            raise replica_failed(why)
        await whole.send(send)
        return End.of_status(whole.status)

    async def _try(
        self, replica: LiveReplica, asked: Asked, content: bytes, scope: Scope, send: Send
    ) -> Whole | None:
        """Ask one replica, and count what comes of it."""
        sent = replica.send(asked.request)
        self._metrics.sent[replica] += 1
        try:
            whole = await forward(self._session, replica, sent, scope, content, self._timeout, send)
        except (NotTakenError, StreamBrokenError) as error:
            self._give_up(replica, str(error))
            raise
        finally:
            replica.end(sent)
        if whole is not None and whole.says_down:
            self._give_up(replica, "it answered 503")
        elif whole is not None and whole.status == 503:
            self._metrics.failed[replica] += 1
        return whole

    def _give_up(self, replica: LiveReplica, why: str) -> None:
        """Count a failure, and send nothing more there until the replica tells its state."""
        self._metrics.failed[replica] += 1
        replica.mark_down(why)
        replica.wake.set()

    def _shed_if_late(self, asked: Asked, able: Sequence[LiveReplica]) -> None:
        """Raise ApiError (429) if every replica says that the first token would be late."""
        promised_s = asked.request.slo.ttft_s
        if not asked.may_be_refused:
            return
        least_s = self._fleet.least_ttft_s(asked.request, able)
        if least_s <= promised_s:
            return
        alone_s = min(replica.alone_ttft_s(asked.request) for replica in able)
        if alone_s > promised_s:
            raise never_in_time(alone_s, promised_s)
        raise too_late(least_s, promised_s)

    def _in_time(self, able: list[LiveReplica], asked: Asked, waited_s: float) -> list[LiveReplica]:
        return [each for each in able if self._fleet.is_in_time(each, asked.request, waited_s)]
