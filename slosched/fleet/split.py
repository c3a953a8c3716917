"""Replay a trace on a prefill pool and a decode pool, in virtual time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from slosched.core import Policy, Request
from slosched.fleet.decode_replica import DecodeReplica
from slosched.fleet.prefill_replica import PrefillReplica
from slosched.fleet.router import Router
from slosched.fleet.simulate import check_single_answers, seed_of
from slosched.fleet.timeline import Timeline
from slosched.fleet.transfer import KVTransfer, Links, Transfer
from slosched.fleet.view import ReplicaKind
from slosched.kv import NO_PREFIX_HOST, Eviction, PrefixCaching
from slosched.simulator.frames import with_room_for_frames
from slosched.simulator.grouped import OnRow
from slosched.simulator.simulate import SimulatedReplica, make_requests
from slosched.workload.trace import Trace


@dataclass(frozen=True)
class SplitConfig:
    """How a fleet is split into pools, and how they are joined."""

    num_prefill: int
    """The first replicas of the fleet prefill; the others decode."""
    transfer: KVTransfer
    decode_router: str = "least_requests"
    """The spec of the decode pool's router, as `make_router` reads it."""
    reserved_tokens: int = 512
    """KV tokens that a decode replica keeps free for each request that it serves (SGLang's
    `num_reserved_decode_tokens`)."""
    delay_s: float = 0.0
    """How old the state is that the routers see of a replica."""

    def __post_init__(self) -> None:
        if self.num_prefill < 1:
            raise ValueError(f"a split fleet needs prefill replicas, not {self.num_prefill}")
        if self.reserved_tokens < 0:
            raise ValueError(f"reserved tokens must be >= 0, not {self.reserved_tokens}")


class SplitFleet:
    """The two pools of one run, and the requests on their way through them.

    A request goes to a decode replica, chosen by the decode pool's router on arrival.  Once KV
    blocks are reserved for its prompt there, the prefill pool's router sends it to a prefill
    replica, which computes the prompt and the first token.  Its KV blocks stay there until the
    transfer has ended.  Then the client gets the first token, and the decode replica computes all
    others.  A request of one token ends where it was prefilled.  These are the bootstrap, prealloc
    and transfer queues of SGLang.

    A request that is preempted while it decodes is prefilled again on its decode replica.  Only the
    prefill pool has prefix caches.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        replicas: Sequence[ReplicaKind],
        routers: tuple[Router, Router],
        config: SplitConfig,
        *,
        seed: int = 0,
        on_row: OnRow | None = None,
        on_transfer: Callable[[Transfer], None] = lambda _transfer: None,
    ) -> None:
        """Prepare a run; `routers` are those of the prefill and of the decode pool.

        Each replica has its own copy of `policy`.  `on_row` is that of `simulate_fleet`, and
        `on_transfer` is called when a transfer has ended.  Raises ValueError for what cannot be
        simulated in pools.
        """
        check_single_answers(trace)
        if trace.is_closed_loop:
            raise ValueError(
                f"trace {trace.name!r} is a closed loop, which is not simulated for prefill and "
                "decode pools: replay it open loop, or on replicas that do both (--replicas)"
            )
        check_pools(replicas, config)
        self._trace, self._policy, self._config = trace, policy, config
        self._prefill_router, self._decode_router = routers
        self._seed, self._on_row, self._on_transfer = seed, on_row, on_transfer
        self._timeline = Timeline()
        self._links = Links(config.transfer)
        self._decode_of: dict[str, DecodeReplica] = {}
        """The decode replica of each request that has blocks there and does not run there yet."""
        self._lengths = {r.request_id: r.num_output_tokens for r in trace.requests}
        self._least_kv_tokens = min(replica.config.kv_tokens for replica in replicas)
        kinds, num_prefill = list(enumerate(replicas)), config.num_prefill
        self.prefill = [self._prefill_replica(i, kind) for i, kind in kinds[:num_prefill]]
        self.decode = [self._decode_replica(i, kind) for i, kind in kinds[num_prefill:]]
        for router in routers:
            router.reset()

    @with_room_for_frames
    def play(self) -> list[Request]:
        """Return the requests in order of arrival, all ended."""
        requests = make_requests(self._trace, self._least_kv_tokens)
        for request in requests:
            self._timeline.add(request.arrival_s, partial(self._arrive, request))
        self._timeline.run()
        self._timeline.clock.advance_to(max(request.end_s or 0.0 for request in requests))
        return requests

    def _arrive(self, request: Request) -> None:
        """Let a decode replica reserve KV blocks for a new request.

        What fits into no replica of a pool is rejected at once.
        """
        replicas = [replica for replica in self.decode if replica.fits(request)]
        if not replicas:
            self.decode[0].refuse(request)
        elif not any(replica.fits(request) for replica in self.prefill):
            self.prefill[0].refuse(request)
        else:
            self._decode_router.route(request, replicas).send(request)

    def _prefill(self, request: Request, decode: DecodeReplica) -> None:
        """Send a request that has its KV blocks in the decode pool to a prefill replica."""
        self._decode_of[request.request_id] = decode
        fitting = [replica for replica in self.prefill if replica.fits(request)]
        self._prefill_router.route(request, fitting).send(request)

    def _cancel(self, request: Request, _replica: PrefillReplica) -> None:
        """Give back what was reserved for a request that ended where it was prefilled.

        Nothing was if it was refused.
        """
        if (decode := self._decode_of.pop(request.request_id, None)) is not None:
            decode.cancel(request)

    def _transfer(self, request: Request, replica: PrefillReplica) -> None:
        decode, now_s = self._decode_of[request.request_id], self._timeline.clock.now_s()
        transfer = self._links.send(request, replica.index, decode.index, now_s)
        self._timeline.add(transfer.end_s, partial(self._take_over, transfer, replica))

    def _take_over(self, transfer: Transfer, prefill: PrefillReplica) -> None:
        request = transfer.request
        prefill.free(request)
        request.token_times_s[0] = transfer.end_s
        self._decode_of.pop(request.request_id).take_over(request)
        self._on_transfer(transfer)

    def _prefill_replica(self, index: int, kind: ReplicaKind) -> PrefillReplica:
        return PrefillReplica(
            index,
            kind,
            self._simulated(index, kind),
            self._timeline,
            self._config.delay_s,
            on_prefilled=self._transfer,
            on_ended=self._cancel,
        )

    def _decode_replica(self, index: int, kind: ReplicaKind) -> DecodeReplica:
        config = replace(
            kind.config,
            prefix_cache=PrefixCaching.OFF,
            eviction=Eviction.LRU,
            prefix_host=NO_PREFIX_HOST,
        )
        kind = ReplicaKind(kind.model, config)
        return DecodeReplica(
            index,
            kind,
            self._simulated(index, kind),
            self._timeline,
            self._config.delay_s,
            reserved_tokens=self._config.reserved_tokens,
            on_reserved=self._prefill,
        )

    def _simulated(self, index: int, kind: ReplicaKind) -> SimulatedReplica:
        return SimulatedReplica(
            copy.deepcopy(self._policy),
            kind.model,
            replace(kind.config, seed=seed_of(index, self._seed)),
            self._lengths,
            on_row=self._on_row,
        )


def check_pools(replicas: Sequence[ReplicaKind], config: SplitConfig) -> None:
    """Raise ValueError if the replicas cannot be simulated as two pools."""
    if len(replicas) <= config.num_prefill:
        raise ValueError(
            f"of {len(replicas)} replicas {config.num_prefill} prefill, so none is left to decode"
        )
    for _, one in replicas:
        if one.overlap:
            raise ValueError("prefill and decode pools are simulated without overlapped planning")
        if one.client_timeout_s is not None:
            raise ValueError(
                "clients that disconnect are not simulated for prefill and decode pools: leave out "
                "--client-timeout (client_timeout_s)"
            )
