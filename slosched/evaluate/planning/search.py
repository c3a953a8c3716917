"""The search for the cheapest fleet that has enough requests in time: few fleets are tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

Counts = tuple[int, ...]
"""The number of replicas of each kind in a fleet."""


@dataclass(frozen=True)
class Verdict:
    """What a search has found, cheapest first; each is None if there is no such fleet."""

    best: Counts | None
    second: Counts | None
    """The cheapest fleet that keeps the target and is not the best one with more replicas."""
    more: Counts | None
    """The best fleet with one more of its cheapest replicas."""
    grows: bool
    """Whether that one keeps the target, too, as the search takes for granted."""


@dataclass
class Search:
    """Finds the cheapest fleet of one kind, and then cheaper ones of two kinds.

    It takes for granted that a fleet serves no fewer requests in time if it gets more replicas.  So
    the smallest number of one kind is found by bisection.  Of two kinds it takes each number of the
    one, and bisects that of the other below the price of the second best fleet that it knows.  In
    the end it tries one more replica than the best fleet has, to see whether that holds.
    """

    prices: Sequence[float]
    """The price of a replica of each kind."""
    guesses: Sequence[int]
    """The number of replicas of each kind to try first."""
    target: float
    """The share of requests that must be in time."""
    most: int
    """The most replicas of one kind."""
    try_fleet: Callable[[Counts], float]
    """A function that returns the share of requests that a fleet has in time."""
    shares: dict[Counts, float] = field(default_factory=dict)
    """What was tried."""
    _least: list[Counts] = field(default_factory=list)
    """Fleets that keep the target, and would not with one replica fewer."""

    def run(self) -> Verdict:
        """Search, and return what was found."""
        for i in range(len(self.prices)):
            self._search_one(i)
        for i, k in combinations(range(len(self.prices)), 2):
            dear, cheap = (i, k) if self.prices[i] >= self.prices[k] else (k, i)
            self._search_two(dear, cheap)
        best, second = self._two_best()
        if best is None:
            return Verdict(None, None, None, grows=True)
        used = [i for i, count in enumerate(best) if count]
        cheapest = min(used, key=lambda i: self.prices[i])
        more = tuple(count + (i == cheapest) for i, count in enumerate(best))
        return Verdict(best, second, more, grows=self._share(more) >= self.target)

    def price(self, counts: Counts) -> float:
        """Return the price of a fleet for an hour."""
        return sum(count * price for count, price in zip(counts, self.prices, strict=True) if count)

    def _search_one(self, kind: int) -> None:
        """Find the smallest number of one kind, outwards from the guess and then by bisection."""
        low, high, stride = 0, self.most + 1, 1
        number = min(max(1, self.guesses[kind]), self.most)
        while high - low > 1:
            if self._keeps(self._counts({kind: number})):
                high = number
                number = high - stride if low == 0 else (low + high) // 2
            else:
                low = number
                number = low + stride if high > self.most else (low + high) // 2
            stride *= 2
            number = min(max(number, low + 1), high - 1)
        if high <= self.most:
            self._least.append(self._counts({kind: high}))

    def _search_two(self, dear: int, cheap: int) -> None:
        """Find fleets of both kinds that are cheaper than the second best one that is known."""
        for number in range(1, self._alone(dear)):
            affordable = (self._limit() - number * self.prices[dear]) / self.prices[cheap]
            high = self._alone(cheap) - 1
            if affordable <= high:
                high = math.ceil(affordable) - 1
            low = 0
            if high < 1 or not self._keeps(self._counts({dear: number, cheap: high})):
                continue
            while high - low > 1:
                middle = (low + high) // 2
                if self._keeps(self._counts({dear: number, cheap: middle})):
                    high = middle
                else:
                    low = middle
            self._least.append(self._counts({dear: number, cheap: high}))

    def least_of(self, kind: int) -> Counts | None:
        """Return the smallest fleet of one kind that keeps the target; None if none does."""
        return next((counts for counts in self._least if sum(counts) == counts[kind]), None)

    def _alone(self, kind: int) -> int:
        """Return how many of one kind suffice; one more than the most if no number does."""
        found = self.least_of(kind)
        return self.most + 1 if found is None else found[kind]

    def _limit(self) -> float:
        """Return the price of the second best fleet that is known."""
        _, second = self._two_best()
        return math.inf if second is None else self.price(second)

    def _two_best(self) -> tuple[Counts | None, Counts | None]:
        """Return the cheapest fleet that is known to suffice, and the next that is another one."""
        found = sorted(self._least, key=lambda counts: (self.price(counts), counts))
        if not found:
            return None, None
        others = (counts for counts in found if not _contains(counts, found[0]))
        return found[0], next(others, None)

    def _counts(self, numbers: dict[int, int]) -> Counts:
        return tuple(numbers.get(i, 0) for i in range(len(self.prices)))

    def _keeps(self, counts: Counts) -> bool:
        return self._share(counts) >= self.target

    def _share(self, counts: Counts) -> float:
        if counts not in self.shares:
            self.shares[counts] = self.try_fleet(counts)
        return self.shares[counts]


def _contains(counts: Counts, other: Counts) -> bool:
    """Tell whether a fleet is another one with more replicas."""
    return all(a >= b for a, b in zip(counts, other, strict=True))
