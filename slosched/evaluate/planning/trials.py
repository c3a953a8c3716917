"""Replays on fleets: each plays all windows of a trace, and is judged with an interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

import numpy as np

from slosched.evaluate.capacity.outcomes import Outcomes
from slosched.evaluate.capacity.point import Bench, Point, model_digest, trace_digest
from slosched.evaluate.capacity.pool import run_point
from slosched.evaluate.capacity.store import Store
from slosched.evaluate.capacity.windows import blocks_of
from slosched.evaluate.planning.offers import Offer
from slosched.evaluate.planning.search import Counts
from slosched.evaluate.statistics import NUM_REPLICATES, Interval, block_weights, interval
from slosched.fleet.setup import FleetSetup
from slosched.fleet.simulate import FleetConfig
from slosched.workload import Trace

_ROUTER_OF_EQUALS, _ROUTER_OF_UNEQUALS = "least_requests", "cheapest_in_time"


@dataclass(frozen=True)
class Judged:
    """The share of requests that a fleet has in time, over all windows."""

    attainment: float
    interval: Interval
    """The 95 % interval, by block bootstrap over the windows."""
    is_short: bool
    """Whether a window was too short to warm up."""


@dataclass
class Trials:
    """Fleets that are tried on the same windows at the same rate."""

    offers: Sequence[Offer]
    windows: Sequence[Trace]
    policy: str
    router: str | None
    """The router's spec; None for `least_requests`, or `cheapest_in_time` for unequal replicas."""
    rate: float | None
    """Requests/s; None for each window's own rate."""
    store: Store | None = None
    judged: dict[Counts, Judged] = field(default_factory=dict)

    @property
    def bench(self) -> Bench:
        """Return the traces and models that the workers of a pool are given."""
        return Bench.of(self.windows, [offer.kind.model for offer in self.offers])

    def setup(self, counts: Counts) -> FleetSetup:
        """Return the fleet that has these numbers of replicas."""
        pairs = list(zip(self.offers, counts, strict=True))
        kinds = tuple(offer.kind for offer, count in pairs for _ in range(count))
        names = tuple(offer.model_name for offer, count in pairs for _ in range(count))
        is_mixed = len(set(names)) > 1
        router = self.router or (_ROUTER_OF_UNEQUALS if is_mixed else _ROUTER_OF_EQUALS)
        return FleetSetup(kinds, names, router, FleetConfig())

    def play(self, counts: Counts, pool: Executor, on_replay: Callable[[], None]) -> float:
        """Play all windows on a fleet, judge it, and return the share of requests in time.

        `on_replay` is called after each window, perhaps in another thread.  Windows that the store
        has are not played again.
        """
        fleet = self.setup(counts)
        points = [self._point(fleet, index) for index in range(len(self.windows))]
        found: dict[int, Outcomes] = {}
        running: dict[int, Future[bytes]] = {}
        for index, point in enumerate(points):
            known = None if self.store is None else self.store.get(point)
            if known is None:
                running[index] = pool.submit(run_point, point)
                running[index].add_done_callback(lambda _: on_replay())
            else:
                found[index] = known
                on_replay()
        for index, future in running.items():
            found[index] = Outcomes.unpack(future.result())
            self._keep(points[index], found[index], fleet)
        self.judged[counts] = judge([found[i] for i in range(len(points))], self.windows)
        return self.judged[counts].attainment

    def _point(self, fleet: FleetSetup, index: int) -> Point:
        model, config = fleet.replicas[0]
        window = self.windows[index]
        return Point(
            policy=self.policy,
            model=model_digest(model),
            trace=trace_digest(window),
            rate=window.rate if self.rate is None else self.rate,
            config=replace(config, seed=config.seed + index),
            fleet=fleet,
        )

    def _keep(self, point: Point, outcomes: Outcomes, fleet: FleetSetup) -> None:
        if self.store is not None:
            names = {"trace": self.windows[0].name, "model": ", ".join(fleet.model_names)}
            self.store.put(point, outcomes, names)


def judge(outcomes: Sequence[Outcomes], windows: Sequence[Trace]) -> Judged:
    """Return the share of good requests after the warm-up of each window, over all windows."""
    good, counted, window_of = [], [], []
    for index, (one, window) in enumerate(zip(outcomes, windows, strict=True)):
        blocks = blocks_of(window)
        num_blocks = int(blocks.max()) + 1
        of_block = np.bincount(blocks[one.counted], minlength=num_blocks)
        good.append(np.bincount(blocks[one.counted & one.good], minlength=num_blocks)[of_block > 0])
        counted.append(of_block[of_block > 0])
        window_of.append(np.full(int((of_block > 0).sum()), index))
    all_good, all_counted = np.concatenate(good), np.concatenate(counted)
    weights = block_weights(np.concatenate(window_of), NUM_REPLICATES, seed=0)
    share = float(all_good.sum() / all_counted.sum())
    replicates = (weights @ all_good) / np.maximum(weights @ all_counted, 1)
    found = interval(replicates, share, len(windows))
    bounded = Interval(max(0.0, found.low), min(1.0, found.high))
    return Judged(share, bounded, any(one.is_short for one in outcomes))
