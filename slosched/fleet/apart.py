"""Replicas behind a router that looks at nothing: each can be simulated by itself.

Such a router sends the same requests to a replica whatever the others do.  So the replicas are
played one after the other, and only a row for each request is kept.  Memory is bounded, and the
rows are those of `simulate_fleet`, to the bit.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import numpy as np

from slosched.core import Policy, Request
from slosched.fleet.router import IntArray, Router
from slosched.fleet.simulate import seed_of
from slosched.fleet.view import ReplicaKind
from slosched.metrics.rows import RequestRows
from slosched.simulator.frames import with_room_for_frames
from slosched.simulator.simulate import SimulatedReplica, output_limit
from slosched.workload.long_trace import LongTrace

_AT_ONCE = 512
"""Requests that are made, played and scored before the next ones are made."""


@dataclass(frozen=True)
class ApartFleet:
    """All that the simulation of any of its replicas depends on, except for its requests."""

    policy: Policy
    replicas: tuple[ReplicaKind, ...]
    longest: int
    """The most output tokens of a request of the whole trace."""
    seed: int = 0

    @with_room_for_frames
    def play(self, index: int, trace: LongTrace) -> RequestRows:
        """Return a row for each request of `trace`, all of which are sent to one replica."""
        kind = self.replicas[index]
        lengths: dict[str, int] = {}
        simulated = SimulatedReplica(
            copy.deepcopy(self.policy),
            kind.model,
            replace(kind.config, seed=seed_of(index, self.seed)),
            lengths,
        )
        rows = RequestRows.empty(len(trace))
        place_of = {}
        for first in range(0, len(trace), _AT_ONCE):
            part = trace.at(slice(first, first + _AT_ONCE))
            for place, request in enumerate(self._requests(part, lengths), first):
                place_of[request.request_id] = place
                simulated.add(request)
            is_last = first + _AT_ONCE >= len(trace)
            simulated.run(math.inf if is_last else float(trace.arrival_s[first + _AT_ONCE]))
            self._score(simulated, place_of, lengths, rows)
        return rows

    def _requests(self, part: LongTrace, lengths: dict[str, int]) -> list[Request]:
        """Return requests as their clients send them, and note how long their outputs will be."""
        capacity = min(kind.config.kv_tokens for kind in self.replicas)
        columns = (part.number, part.arrival_s, part.num_prompt_tokens, part.num_output_tokens)
        requests = []
        for number, arrival_s, num_prompt, num_output in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            limit = output_limit(num_prompt, num_output, self.longest, capacity)
            requests.append(Request(str(number), arrival_s, num_prompt, limit, part.slo))
            lengths[str(number)] = num_output
        return requests

    def _score(
        self,
        simulated: SimulatedReplica,
        place_of: dict[str, int],
        lengths: dict[str, int],
        rows: RequestRows,
    ) -> None:
        """Turn the requests that have ended into rows, and forget them."""
        ended = simulated.ended.copy()
        simulated.ended.clear()
        if not ended:
            return
        places = np.array([place_of.pop(request.request_id) for request in ended], dtype=np.int64)
        rows.put(places, RequestRows.of(ended, simulated.scheduler.limits.deadline_rule))
        for request in ended:
            del lengths[request.request_id]


def places_of(router: Router, replicas: tuple[ReplicaKind, ...], num_requests: int) -> IntArray:
    """Return the replica of each request; raise ValueError if only a run can tell."""
    places = router.places(num_requests, len(replicas))
    if places is None:
        raise ValueError(
            f"{router} looks at replicas or requests before it decides, so replicas cannot be "
            "simulated one by one: take round_robin, or simulate the whole fleet at once"
        )
    sizes = sorted({kind.config.kv_tokens for kind in replicas})
    if len(sizes) > 1:
        raise ValueError(
            f"replicas with KV caches of {' and '.join(map(str, sizes))} tokens cannot be "
            "simulated one by one, as a request may only fit into some: give all the same"
        )
    return places
