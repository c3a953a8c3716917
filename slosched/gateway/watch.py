"""Asks a replica for its state again and again, and finds out when it is down and up again."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from slosched.core import SloschedError
from slosched.gateway.asked_promises import AskedPromises
from slosched.gateway.config import GatewayConfig
from slosched.gateway.forecast import Forecast
from slosched.gateway.questions import NoQuotesError, Questions
from slosched.gateway.replica import LiveReplica
from slosched.workload.http_slo import TTFT

log = logging.getLogger(__name__)

_HEALTH_EVERY_S = 1.0
_PAGE_EVERY_S = 1.0
"""Pages of metrics are long, so that they are not asked for more often."""
_BACKOFF_S = (0.2, 10.0)
"""The pause after a replica was found to be down, which doubles each time, and its limit."""


class RouterNeedsError(SloschedError, ValueError):
    """A replica does not tell what the router has to know."""


class Watch:
    """Keeps one replica's state fresh.

    The state comes from the first of these that the server has: quotes, /load, /metrics.  Without
    any of them, the router knows only what it sent there itself.
    """

    def __init__(
        self,
        replica: LiveReplica,
        questions: Questions,
        config: GatewayConfig,
        router_name: str,
        *,
        needs_forecasts: bool,
        asked: AskedPromises,
    ) -> None:
        self._replica = replica
        self._ask = questions
        self._config = config
        self._router_name = router_name
        self._needs_forecasts = needs_forecasts
        self._asked = asked
        self._poll: Callable[[], Awaitable[None]] | None = None
        """How the state is asked for; None until the replica has introduced itself."""
        self._every_s = config.poll_interval_s
        self._health_due_s = 0.0
        self._backoff_s = _BACKOFF_S[0]

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            try:
                await self.look()
                pause_s = self._every_s
            except SloschedError:
                pause_s = self._backoff_s
                self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S[1])
            self._replica.wake.clear()
            try:
                async with asyncio.timeout(pause_s):
                    await self._replica.wake.wait()
            except TimeoutError:
                pass

    async def look(self) -> None:
        """Ask once.  Raises, and marks the replica as down, if it cannot be used.

        Raises ReplicaDownError if it does not answer, and RouterNeedsError if it does, but does not
        tell what the router needs.
        """
        replica = self._replica
        try:
            if self._poll is None or time.monotonic() >= self._health_due_s:
                await self._look_closer()
            assert self._poll is not None
            await self._poll()
        except SloschedError as error:
            self._poll = None  # it may be another server when it is back
            if replica.is_up or replica.why_down != str(error):
                log.warning("%s is down: %s", replica, error)
            replica.mark_down(str(error))
            raise
        if not replica.is_up:
            log.info("%s is up", replica)
            replica.mark_up()
            self._backoff_s = _BACKOFF_S[0]

    async def _look_closer(self) -> None:
        """Ask whether the replica is well and what it serves, which is known for a second."""
        await self._ask.check_health()
        self._health_due_s = time.monotonic() + _HEALTH_EVERY_S
        if self._poll is None:
            await self._introduce()
        else:
            self._replica.serve(await self._ask.models())

    async def _introduce(self) -> None:
        """Learn what the server is, and choose how its state is asked for."""
        ask = self._ask
        said = await ask.introduce()
        self._replica.introduce(
            said.models, said.bytes_per_token, said.kv_tokens, caches_prefixes=said.caches_prefixes
        )
        self._every_s = self._config.poll_interval_s
        try:
            await self._poll_quotes()
            self._poll = self._poll_quotes
            return
        except NoQuotesError as error:
            if self._needs_forecasts:
                raise RouterNeedsError(
                    f"the router {self._router_name} needs quotes, and this server gives none "
                    f"({error}); take least_requests, or a server that gives "
                    "them: `slosched serve`, or vLLM with slosched's scheduler and middleware"
                ) from error
        if await ask.load() is not None:
            self._poll = self._poll_load
        else:
            self._every_s = max(self._every_s, _PAGE_EVERY_S)
            self._poll = self._poll_queue

    async def _poll_quotes(self) -> None:
        begin = self._replica.begin_poll()
        forecast = await self._ask.forecast(self._context_tokens)
        await self._learn_tiers()
        others_s = self._asked.ttfts_but(forecast.slo.ttft_s)
        others = await asyncio.gather(*map(self._forecast_for, others_s))
        known = [each for each in (forecast, *others) if each is not None]
        self._replica.learn(begin, forecast.num_requests, known)

    async def _forecast_for(self, ttft_s: float) -> Forecast | None:
        """Return the forecast for requests with a TTFT; None if the replica makes none."""
        found = await self._forecast_or_none(**{TTFT.field: 1000 * ttft_s})
        # A server that does not know the field answers for its default SLO.
        if found is None or not math.isclose(found.slo.ttft_s, ttft_s):
            return None
        return replace(found, slo=replace(found.slo, ttft_s=ttft_s))

    async def _learn_tiers(self) -> None:
        """Ask what the replica promises to the tiers that requests name; forget all others."""
        known, named = self._replica.tiers, self._asked.tiers
        for tier in named:
            if tier not in known:
                known[tier] = await self._forecast_or_none(**{tier.field: tier.name})
        for tier in known.keys() - set(named):
            del known[tier]

    async def _forecast_or_none(self, **promise: object) -> Forecast | None:
        """Return the forecast for a promise; None if the replica gives none.

        What clients ask for cannot put a replica down.
        """
        try:
            return await self._ask.forecast(self._context_tokens, **promise)
        except NoQuotesError:
            return None

    @property
    def _context_tokens(self) -> int:
        return self._replica.max_model_len or _SHORTEST_CONTEXT

    async def _poll_load(self) -> None:
        begin = self._replica.begin_poll()
        self._replica.learn(begin, await self._ask.load() or 0)

    async def _poll_queue(self) -> None:
        begin = self._replica.begin_poll()
        self._replica.learn(begin, await self._ask.queue() or 0)


_SHORTEST_CONTEXT = 2048
"""The context that a model is taken to have whose server does not tell."""
