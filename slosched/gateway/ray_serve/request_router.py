"""Ray Serve's request router that asks a router of the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import aiohttp
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.datastructures import Headers

from slosched.core import NO_SLO, Request
from slosched.engine.server.errors import ApiError
from slosched.fleet.spec import make_router
from slosched.gateway.asked import read
from slosched.gateway.config import GatewayConfig
from slosched.gateway.questions import Questions
from slosched.gateway.ray_serve.call import Call
from slosched.gateway.ray_serve.replica import URL
from slosched.gateway.replica import LiveReplica, Sent
from slosched.gateway.watch import Watch

_NOTHING = Request("", 0.0, 1, max_tokens=1)
"""What is asked for by a request without a prompt: for the list of models, say."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """A replica as the fleet's routers see it, and the task that asks for its state."""

    view: LiveReplica
    task: asyncio.Task[None]


class FleetRouter(RequestRouter):  # type: ignore[misc]  # Ray is not type-checked
    """Sends each request to the replica that one of `fleet/routers` chooses.

    It asks the servers for their state as `slosched route` does, and knows what it sent to them.
    A server that is down is left out until it answers again, or Ray Serve has replaced it.
    Source of the interface: ray.serve.request_router, Ray 2.60.
    """

    def initialize_state(self, router: str, api_key: str | None = None) -> None:
        """Take the router's spec, and the key with which servers are asked for quotes."""
        self._router, self._spec = make_router(router), router
        self._config = GatewayConfig(api_key=api_key)
        self._session: aiohttp.ClientSession | None = None
        self._watched: dict[ReplicaID, _Watched] = {}
        self._num_seen = 0
        self._asked: dict[str, Request] = {}
        """What was asked for, by internal request id, until the request is sent."""
        self._sent: dict[str, tuple[LiveReplica, Sent]] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return one replica, which the fleet's router chooses; none if there is none."""
        if not candidate_replicas:
            return []
        await self._watch(candidate_replicas)
        by_view = {self._watched[each.replica_id].view: each for each in candidate_replicas}
        call = None if pending_request is None else pending_request.args[0]
        if not isinstance(call, Call):
            return [candidate_replicas]
        request = self._read(call, list(by_view))
        assert pending_request is not None
        self._asked[pending_request.metadata.internal_request_id] = request
        chosen = self._router.route(request, _able(by_view, call.tried))
        return [[by_view[chosen]]]

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: object,  # noqa: ARG002  # Ray Serve's interface
    ) -> None:
        """Count the request as one that its replica has."""
        name = pending_request.metadata.internal_request_id
        request, watched = self._asked.pop(name, None), self._watched.get(replica_id)
        if request is not None and watched is not None:
            self._sent[name] = watched.view, watched.view.send(request)

    def on_request_completed(
        self,
        replica_id: ReplicaID,  # noqa: ARG002  # Ray Serve's interface
        internal_request_id: str,
    ) -> None:
        """Count the request as ended, whatever became of it."""
        if (known := self._sent.pop(internal_request_id, None)) is not None:
            view, sent = known
            view.end(sent)

    async def _watch(self, replicas: Sequence[RunningReplica]) -> None:
        """Begin to ask new replicas for their state, and leave those alone that are gone."""
        present = {each.replica_id for each in self.curr_replicas.values()}
        for gone in [known for known in self._watched if known not in present]:
            self._watched.pop(gone).task.cancel()
        new = [each for each in replicas if each.replica_id not in self._watched]
        if not new:
            return
        if self._session is None:
            self._session = aiohttp.ClientSession()
        for each in new:
            self._watched[each.replica_id] = self._begin(each.replica_metadata[URL], self._session)
        await asyncio.gather(*(self._first_state(each) for each in new))

    def _begin(self, url: str, session: aiohttp.ClientSession) -> _Watched:
        view = LiveReplica(self._num_seen, url)
        self._num_seen += 1
        watch = Watch(
            view,
            Questions(session, url, self._config),
            self._config,
            self._spec,
            needs_forecasts=self._router.needs_forecasts,
        )
        return _Watched(view, asyncio.create_task(watch.run()))

    async def _first_state(self, replica: RunningReplica) -> None:
        """Wait until a replica has told its state for the first time, or could have done so."""
        view = self._watched[replica.replica_id].view
        until_s = asyncio.get_running_loop().time() + self._config.poll_timeout_s
        while not view.is_up and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(self._config.poll_interval_s / 10)

    def _read(self, call: Call, views: Sequence[LiveReplica]) -> Request:
        """Return what the router has to know; for a body that cannot be read, what costs least.

        Its replica refuses such a body, with the reason.
        """
        if call.method != "POST":
            return _NOTHING
        told = [view.forecast for view in views if view.forecast is not None]
        try:
            return read(
                call.content,
                Headers(dict(call.headers)),
                told[0].default_slo if told else NO_SLO,
                views[0].bytes_per_token,
                with_prefixes=self._router.uses_prefixes,
            ).request
        except ApiError:
            return _NOTHING


def _able(views: Collection[LiveReplica], tried: Collection[str]) -> list[LiveReplica]:
    """Return the replicas that are up and have not been tried; all if there is none."""
    return [each for each in views if each.is_up and each.url not in tried] or list(views)
