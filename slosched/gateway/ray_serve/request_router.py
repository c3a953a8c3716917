"""Ray Serve's request router that asks a router of the fleet."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from slosched.core import Request
from slosched.engine.server.errors import ApiError
from slosched.gateway.asked import read
from slosched.gateway.config import GatewayConfig
from slosched.gateway.fleet import LiveFleet
from slosched.gateway.ray_serve.call import Call
from slosched.gateway.ray_serve.replica import URL
from slosched.gateway.replica import LiveReplica, Sent

_NOTHING = Request("", 0.0, 1, max_tokens=1)
"""What is asked for by a request without a prompt: for the list of models, say."""


_Counted = dict[str, tuple[LiveReplica, Sent]]
"""Requests that count as their replicas', by Ray Serve's internal id."""


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
        self._config = GatewayConfig(api_key=api_key)
        self._fleet = LiveFleet((), router, self._config)
        self._session: aiohttp.ClientSession | None = None
        self._watched: dict[ReplicaID, _Watched] = {}
        self._chosen: _Counted = {}
        self._sent: _Counted = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replica that the fleet's router chooses.

        If none is up that has not been tried, return all: each says itself why it does not serve.
        """
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        await self._watch(candidate_replicas)
        found = ((self._watched.get(each.replica_id), each) for each in candidate_replicas)
        # One that is gone since is no longer watched.
        by_view = {known.view: each for known, each in found if known is not None}
        call: Call = pending_request.args[0]
        able = [view for view in by_view if view.is_up and view.url not in call.tried]
        if not able:
            return [candidate_replicas]
        request = self._read(call)
        name = pending_request.metadata.internal_request_id
        _end(self._chosen, name)  # Ray Serve asks again if the replica was full
        view = self._fleet.choose(request, able)
        # Counted now: requests that come before this one is sent would all go to the same replica.
        self._chosen[name] = view, view.send(request)
        weakref.finalize(pending_request, _end, self._chosen, name)  # if it is never sent
        return [[by_view[view]]]

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,  # noqa: ARG002  # Ray Serve's interface
        result: object,  # noqa: ARG002  # Ray Serve's interface
    ) -> None:
        """Count the request until it has ended, however long the pending request is kept."""
        name = pending_request.metadata.internal_request_id
        if (chosen := self._chosen.pop(name, None)) is not None:
            self._sent[name] = chosen

    def on_request_completed(
        self,
        replica_id: ReplicaID,  # noqa: ARG002  # Ray Serve's interface
        internal_request_id: str,
    ) -> None:
        """Count the request as ended, whatever became of it."""
        _end(self._chosen, internal_request_id)
        _end(self._sent, internal_request_id)

    async def _watch(self, replicas: Sequence[RunningReplica]) -> None:
        """Begin to ask new replicas for their state, and leave those alone that are gone."""
        present = {each.replica_id for each in self.curr_replicas.values()}
        for gone in [known for known in self._watched if known not in present]:
            watched = self._watched.pop(gone)
            watched.task.cancel()
            self._fleet.replicas.remove(watched.view)
        new = [each for each in replicas if each.replica_id not in self._watched]
        if not new:
            return
        if self._session is None:
            self._session = aiohttp.ClientSession()
        for each in new:
            self._watched[each.replica_id] = self._begin(each.replica_metadata[URL], self._session)
        await asyncio.gather(*(self._first_state(each) for each in new))

    def _begin(self, url: str, session: aiohttp.ClientSession) -> _Watched:
        view = self._fleet.add(url)
        return _Watched(view, asyncio.create_task(self._fleet.watch(view, session).run()))

    async def _first_state(self, replica: RunningReplica) -> None:
        """Wait until a replica has told its state for the first time, or could have done so."""
        view = self._watched[replica.replica_id].view
        until_s = asyncio.get_running_loop().time() + self._config.poll_timeout_s
        while not view.is_up and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(self._config.poll_interval_s / 10)

    def _read(self, call: Call) -> Request:
        """Return what the router has to know; for a body that cannot be read, what costs least.

        Its replica refuses such a body, with the reason.
        """
        if call.method != "POST":
            return _NOTHING
        fleet = self._fleet
        try:
            return read(
                call.content,
                dict(call.headers),  # their names are in lower case (ASGI)
                fleet.promised_to,
                fleet.bytes_per_token,
                with_prefixes=fleet.uses_prefixes,
            ).request
        except ApiError:
            return _NOTHING


def _end(counted: _Counted, name: str) -> None:
    """Count a request as ended if it is among those that count."""
    if (known := counted.pop(name, None)) is not None:
        view, sent = known
        view.end(sent)
