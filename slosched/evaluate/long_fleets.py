"""Hours of a large fleet, one replica after the other, in several processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from functools import partial

import numpy as np

from slosched.core import Policy
from slosched.evaluate.capacity.pool import MakePool, give, given, local_pool, stop_at_once
from slosched.fleet.apart import ApartFleet, places_of
from slosched.fleet.router import Router
from slosched.fleet.view import ReplicaKind
from slosched.metrics.rows import RequestRows
from slosched.workload.long_trace import LongTrace

_MOST_SENT = 64
"""Replicas whose requests wait in a worker's queue, or whose rows wait to be kept, at most."""


def play_long(
    trace: LongTrace,
    policy: Policy,
    replicas: tuple[ReplicaKind, ...],
    router: Router,
    *,
    seed: int = 0,
    make_pool: MakePool | None = None,
    on_replica: Callable[[int], None] = lambda _index: None,
) -> RequestRows:
    """Return a row for each request, in order of arrival, whatever pool plays the replicas.

    The requests fare as in `simulate_fleet`.  `on_replica` is called with each replica that is
    over.  Raises ValueError if what a replica is sent depends on the others.
    """
    places = places_of(router, replicas, len(trace))
    fleet = ApartFleet(policy, replicas, int(trace.num_output_tokens.max()), seed)
    rows = RequestRows.empty(len(trace))
    by_replica = np.split(
        np.argsort(places, kind="stable"),
        np.cumsum(np.bincount(places, minlength=len(replicas)))[:-1],
    )
    sent: dict[Future[RequestRows], int] = {}

    def take(future: Future[RequestRows]) -> None:
        index = sent.pop(future)
        rows.put(by_replica[index], future.result())
        on_replica(index)

    with (make_pool or local_pool(1))(partial(give, fleet)) as pool:
        try:
            for index, own in enumerate(by_replica):
                if len(own):
                    sent[pool.submit(_play, index, trace.at(own))] = index
                    patience_s = None if len(sent) >= _MOST_SENT else 0
                    for future in wait(sent, patience_s, FIRST_COMPLETED).done:
                        take(future)
            for future in as_completed(tuple(sent)):
                take(future)
        except BaseException:  # Ctrl-C, too: hours of the other replicas may still wait
            stop_at_once(pool)
            raise
    return rows


def _play(index: int, trace: LongTrace) -> RequestRows:
    return given(ApartFleet).play(index, trace)
