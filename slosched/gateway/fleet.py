"""The replicas of a gateway: who is up, who may serve a request, and who keeps its promise."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import aiohttp

from slosched.core import NO_SLO, OnInfeasible, Request
from slosched.fleet.spec import make_router
from slosched.gateway.asked import Asked, Promised
from slosched.gateway.asked_promises import AskedPromises, Tier
from slosched.gateway.config import GatewayConfig
from slosched.gateway.errors import no_replica, no_such_model
from slosched.gateway.forecast import Forecast
from slosched.gateway.questions import Questions, ReplicaDownError
from slosched.gateway.replica import LiveReplica
from slosched.gateway.watch import Watch

_FRESH_S = 1.0
"""Forecasts count as fresh for this time more than the time between two polls."""


class LiveFleet:
    """Real replicas behind one router."""

    def __init__(self, urls: Sequence[str], router: str, config: GatewayConfig) -> None:
        """Take base URLs, and the router's spec; raise RouterSpecError if it is wrong."""
        self.replicas: list[LiveReplica] = []
        self._num_added = 0
        for url in urls:
            self.add(url)
        self._router, self._router_name = make_router(router), router
        self._config = config
        self._fresh_s = config.poll_interval_s + _FRESH_S
        self._asked = AskedPromises()
        self._watching: list[asyncio.Task[None]] = []

    def add(self, url: str) -> LiveReplica:
        """Take one more replica, which is down until it has been asked."""
        replica = LiveReplica(self._num_added, url)
        self._num_added += 1
        self.replicas.append(replica)
        return replica

    def watch(self, replica: LiveReplica, session: aiohttp.ClientSession) -> Watch:
        """Return what asks a replica for its state, as far as the router needs it."""
        return Watch(
            replica,
            Questions(session, replica.url, self._config),
            self._config,
            self._router_name,
            needs_forecasts=self._router.needs_forecasts,
            asked=self._asked,
        )

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Ask each replica once, and go on asking in the background.

        Raises RouterNeedsError if one answers, but does not tell what the router needs.
        """
        watches = [self.watch(replica, session) for replica in self.replicas]
        found = await asyncio.gather(*(each.look() for each in watches), return_exceptions=True)
        for error in found:
            if error is not None and not isinstance(error, ReplicaDownError):
                raise error
        self._watching = [asyncio.create_task(watch.run()) for watch in watches]

    async def stop(self) -> None:
        """Stop asking."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    @property
    def uses_prefixes(self) -> bool:
        """Tell whether the router looks at the hashes of prompts."""
        return self._router.uses_prefixes

    @property
    def up(self) -> list[LiveReplica]:
        """Return the replicas that take requests."""
        return [replica for replica in self.replicas if replica.is_up]

    @property
    def models(self) -> Mapping[str, Mapping[str, object]]:
        """Return the entries of /v1/models of all replicas that are up; of equal ids the first."""
        found: dict[str, Mapping[str, object]] = {}
        for replica in self.up:
            for name, entry in replica.models.items():
                found.setdefault(name, entry)
        return found

    @property
    def max_model_len(self) -> int | None:
        """Return the longest context of all replicas; None if no replica tells its own."""
        lengths = [each.max_model_len for each in self.replicas if each.max_model_len is not None]
        return max(lengths, default=None)

    @property
    def bytes_per_token(self) -> float:
        """Return how many bytes of text make a token, as the first replica that is up has it."""
        return (self.up or self.replicas)[0].bytes_per_token

    def promised_to(self, tier: Tier | None) -> Promised:
        """Return what a tier, or a request without one, is promised if it does not say it itself.

        It is what the first replica that tells has.  Until one has told about a tier, it counts as
        what is promised without one.
        """
        told: Iterable[Forecast | None] = (each.forecast for each in self.replicas)
        default = next(filter(None, told), None)
        if tier is not None:
            self._asked.note_tier(tier)
            told = (each.tiers.get(tier) for each in self.replicas)
            if (of_tier := next(filter(None, told), None)) is not None:
                return Promised(of_tier.slo, of_tier.on_infeasible)
            return Promised(NO_SLO if default is None else default.slo, None)
        if default is None:
            return Promised(NO_SLO, OnInfeasible.REJECT)
        return Promised(default.slo, default.on_infeasible)

    def able(self, asked: Asked, without: Collection[LiveReplica]) -> list[LiveReplica]:
        """Return the replicas that are up, have the model and room for the prompt.

        `without` are those that have been tried.  Raises ApiError if none was tried and there is
        none: 503 if all are down, or all that had the model, 404 if nobody has it.
        """
        model = asked.model
        having = [each for each in self.replicas if model is None or model in each.models]
        up = [each for each in having if each.is_up]
        if not up and not without:
            if self.up and not having:
                raise no_such_model(str(model), self.models)
            down = having or self.replicas
            raise no_replica(
                (f"{each}: {each.why_down}" for each in down), self._config.retry_after_s
            )
        left = [each for each in up if each not in without]
        return [each for each in left if _has_room(each, asked.request)] or left

    def choose(self, request: Request, replicas: Sequence[LiveReplica]) -> LiveReplica:
        """Return the replica that the router chooses among at least one."""
        self._asked.note_ttft(request.slo.ttft_s)
        return self._router.route(request, replicas)

    def is_in_time(self, replica: LiveReplica, request: Request, waited_s: float) -> bool:
        """Tell whether a replica is expected to keep the TTFT of a request that has waited."""
        is_known = self._is_fresh(replica)
        return is_known and waited_s + replica.expected_ttft_s(request) <= request.slo.ttft_s

    def least_ttft_s(self, request: Request, replicas: Sequence[LiveReplica]) -> float:
        """Return the TTFT that one in ten requests stays below on the best replica.

        It is 0 if one of the replicas has not told lately.
        """
        self._asked.note_ttft(request.slo.ttft_s)
        if request.slo.ttft_s == math.inf or not all(map(self._is_fresh, replicas)):
            return 0.0
        return min(replica.least_ttft_s(request) for replica in replicas)

    def _is_fresh(self, replica: LiveReplica) -> bool:
        return replica.forecast is not None and replica.age_s <= self._fresh_s


def _has_room(replica: LiveReplica, request: Request) -> bool:
    most = replica.max_model_len
    return most is None or request.num_prompt_tokens < most
