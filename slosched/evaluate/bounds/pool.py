"""What the requests of a trace need of several replicas, as if these were one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slosched.evaluate.bounds.demand import Demand
from slosched.evaluate.bounds.prices import FloatArray


def pooled(kinds: Sequence[tuple[Demand, int]]) -> Demand:
    """Return the demand of one trace on a fleet, from that on each kind of replica alone.

    Each kind comes with its number of replicas.  All demands have to be those of the same trace
    under the same deadline rule.

    Proof that a bound of the result holds for the fleet, whatever its router does.  Give the time
    of each kind of replica a value: a second of it counts as v seconds of the first kind's.  A good
    request that a replica serves takes at least its work there, so it takes at least the least over
    the kinds of v * work, in seconds of the first kind.  In any interval the replicas have the sum
    of v times its length.  So whatever a fleet does is a schedule of requests that need the least
    of v * work, on a device that has this sum of v seconds in each second, and all that L1 and L2
    say of one device they say of this one.  It may do more than the fleet: it may give all of its
    replicas to one request at once.  A request that failed on one replica and was sent to another
    one has taken time on both.

    The proof holds for any v >= 0.  Here v is what makes the work of those requests the same that
    every kind can serve, so that a device that is three times as slow counts a third.  Kinds that
    can serve no request of the trace in time are left out.
    """
    kinds = [kind for kind in kinds if len(kind[0].index)] or kinds[:1]
    demands = [demand for demand, _ in kinds]
    num_offered = demands[0].num_offered
    works_s = np.stack([_scattered(demand) for demand in demands])
    total_s = works_s.sum(axis=1)
    is_shared = np.isfinite(total_s).all(axis=0)
    shared_s = total_s[:, is_shared].sum(axis=1)
    values = shared_s[0] / shared_s if shared_s.all() else np.ones(len(kinds))
    work_s = (values[:, None, None] * works_s).min(axis=0)
    release_s, first_due_s, last_due_s = np.full((3, num_offered), np.nan)
    for demand in demands:
        release_s[demand.index] = demand.release_s
        first_due_s[demand.index] = demand.first_due_s
        last_due_s[demand.index] = demand.last_due_s
    index = np.flatnonzero(np.isfinite(work_s).all(axis=0))
    return replace(
        demands[0],
        release_s=release_s[index],
        first_due_s=first_due_s[index],
        last_due_s=last_due_s[index],
        first_work_s=work_s[0, index],
        rest_work_s=work_s[1, index],
        index=index,
        num_devices=float(values @ np.array([count for _, count in kinds])),
    )


def _scattered(demand: Demand) -> FloatArray:
    """Return the work of prompts and of later tokens, inf for requests that cannot be good."""
    work_s = np.full((2, demand.num_offered), np.inf)
    work_s[:, demand.index] = demand.first_work_s, demand.rest_work_s
    return work_s
