"""Contenders, the plan of a measurement, and the state of one contender's searches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from slosched.evaluate.capacity.outcomes import Outcomes
from slosched.evaluate.capacity.rates import Lattice, Search
from slosched.fleet.split_setup import AnyFleet
from slosched.perfmodel import FittedModel
from slosched.simulator.simulate import SimulationConfig

TARGETS = (0.90, 0.99)
PRECISION = 0.02
_SCOUT_WIDTH = 4
"""The width, in places of the lattice, to which one seed alone first narrows the knee down.

After that all seeds search around it."""


@dataclass(frozen=True)
class Contender:
    """A policy on a replica whose capacity is wanted."""

    name: str
    policy: str
    """The policy's spec, as `make_policy` reads it."""
    model: FittedModel
    model_name: str
    config: SimulationConfig
    fleet: AnyFleet | None = None
    """The fleet that is simulated in place of the one replica."""


@dataclass(frozen=True)
class Plan:
    """The targets of a search, and the rates at which it may look."""

    targets: Sequence[float] = TARGETS
    """Shares of the offered requests that must be good, lowest first."""
    precision: float = PRECISION
    max_rate: float | None = None
    """Requests/s; by default 16 times the rate that about keeps the device busy."""
    min_rate: float | None = None
    """Requests/s; by default a 256th of the rate that about keeps the device busy."""
    num_shared_rates: int = 0
    """The number of rates that every contender is played at after the searches.

    They reach from the lowest rate of all searches to the highest, so that the curves can be
    compared beyond each contender's own knee."""
    at_rate: float | None = None
    """A rate to measure instead of a search; the nearest rate of the lattice is used."""

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError("a sweep needs at least one target, as 0.9")
        for target in self.targets:
            if not 0 < target < 1:
                raise ValueError(f"a target must be a share between 0 and 1, not {target!r}")
        for name in ("max_rate", "min_rate", "at_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ValueError(f"{name} must be a positive number of requests/s, not {rate!r}")


@dataclass
class Measured:
    """All replays of one contender so far, by place on the lattice and by window."""

    name: str
    """The contender's name."""
    plan: Plan
    lattice: Lattice
    guess: int
    num_windows: int
    outcomes: dict[int, dict[int, Outcomes]] = field(default_factory=dict)
    shared: list[int] = field(default_factory=list)
    """Places that are measured in any case, even if no search asks for them."""
    error: Exception | None = None
    """The reason why the contender was given up; earlier outcomes are kept."""

    @property
    def num_done(self) -> int:
        return sum(len(found) for found in self.outcomes.values())

    @property
    def complete(self) -> list[int]:
        """Return the places at which every window was replayed, lowest rate first."""
        return sorted(k for k, found in self.outcomes.items() if len(found) == self.num_windows)

    def pooled(self) -> dict[int, float]:
        """Return attainment over the counted requests of all windows, where all were replayed."""
        known = {}
        for k in self.complete:
            found = self.outcomes[k].values()
            good = sum(int(o.good[o.counted].sum()) for o in found)
            known[k] = good / sum(int(o.counted.sum()) for o in found)
        return known

    def wanted(self) -> list[tuple[int, int]]:
        """Return the places and windows that the searches need next; none if they are over."""
        if self.error is not None:
            return []
        asked = [task for target in self.plan.targets for task in self._next(target)]
        asked += [(k, i) for k in self.shared for i in range(self.num_windows)]
        return [(k, i) for k, i in dict.fromkeys(asked) if i not in self.outcomes.get(k, {})]

    def num_left(self) -> int:
        """Estimate how many replays are still to come."""
        if self.error is not None:
            return 0
        left = self.num_windows * (len(self.shared) or self.plan.num_shared_rates)
        left -= sum(len(self.outcomes.get(k, {})) for k in self.shared)
        for target in self.plan.targets:
            scout = self._scout(target).num_left(self._scouted())
            full = Search(self.lattice, target, self.guess).num_left(self.pooled())
            # After the scout, all windows look at about four more places.
            left += scout + (4 if scout else min(4, full)) * self.num_windows
        return left

    def _next(self, target: float) -> list[tuple[int, int]]:
        """Return the next replays: first of one window, coarsely, then of all near its result."""
        scout, known = self._scout(target), self._scouted()
        places = scout.next_places(known)
        if places and self.num_windows > 1:
            return [(k, 0) for k in places]
        low, high = scout.bracket(known)
        guess = next((k for k in (low, high) if k is not None), self.guess)
        search = Search(self.lattice, target, guess)
        return [(k, i) for k in search.next_places(self.pooled()) for i in range(self.num_windows)]

    def _scout(self, target: float) -> Search:
        return Search(self.lattice, target, self.guess, width=_SCOUT_WIDTH, margin=0)

    def _scouted(self) -> dict[int, float]:
        """Return the attainment of the first window alone, by place."""
        return {k: found[0].attainment for k, found in self.outcomes.items() if 0 in found}
