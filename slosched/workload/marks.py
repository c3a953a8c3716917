"""Priorities and LoRA adapters, drawn at random for traces that have none.

The two draws do not depend on each other, nor on the draw of SLO tiers with the same seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from slosched.spelling import number, whole_number

_PRIORITIES_STREAM, _ADAPTERS_STREAM = 1, 2
"""Numbers used with the seed, so that each draw has its own random stream."""


@dataclass(frozen=True, slots=True)
class PriorityShare:
    """A share of the requests, and the priority that they have."""

    share: float
    priority: int

    def __str__(self) -> str:
        return f"{self.share:g}:{self.priority}"


def parse_priority(text: str) -> PriorityShare:
    """Return the share and the priority of a text such as "0.2:-1", 20 % of requests at -1.

    Raises ValueError for anything else.
    """
    share_text, _, priority_text = text.partition(":")
    try:
        share = number("the share", share_text)
        priority = whole_number("the priority", priority_text)
        if not 0 < share <= 1:
            raise ValueError(f"the share {share:g} is not in (0, 1]")
    except ValueError as error:
        raise ValueError(
            f"{text!r} is no share of requests at a priority ({error}): write SHARE:PRIORITY, as "
            "in 0.2:-1 for 20 % at priority -1, served before the others, which have 0"
        ) from None
    return PriorityShare(share, priority)


@dataclass(frozen=True, slots=True)
class Priorities:
    """Gives shares of the requests their priorities at random; all others have priority 0."""

    shares: tuple[PriorityShare, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        total = sum(part.share for part in self.shares)
        if total > 1 + 1e-9:
            raise ValueError(
                f"the shares of the priorities {self} add up to {total:g}; at most 1 is there to "
                "share, and what is left has priority 0"
            )

    def __str__(self) -> str:
        return " ".join(map(str, self.shares))

    def assign(self, num_requests: int) -> list[int]:
        """Return one priority for each request."""
        ends = np.array([*accumulate(part.share for part in self.shares)])
        priorities = np.array([*(part.priority for part in self.shares), 0])
        drawn = np.random.default_rng([self.seed, _PRIORITIES_STREAM]).random(num_requests)
        found: list[int] = priorities[np.searchsorted(ends, drawn, side="right")].tolist()
        return found


@dataclass(frozen=True, slots=True)
class Adapters:
    """Gives every request one of `num` LoRA adapters at random.

    Requests ask for the k-th most popular adapter in proportion to k ** -`skew`. At 0 all adapters
    are equally popular; above it popularity is a power law (Zipf's law at 1).
    """

    num: int
    skew: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ValueError(f"there must be at least one adapter, not {self.num}")
        if not 0 <= self.skew < math.inf:
            raise ValueError(f"the skew must be finite and not negative, not {self.skew}")

    def __str__(self) -> str:
        return f"{self.num}:{self.skew:g}"

    def assign(self, num_requests: int) -> list[str]:
        """Return the name of one adapter for each request; `lora-1` is the most popular."""
        weights = np.arange(1, self.num + 1, dtype=np.float64) ** -self.skew
        rng = np.random.default_rng([self.seed, _ADAPTERS_STREAM])
        drawn = rng.choice(self.num, size=num_requests, p=weights / weights.sum())
        return [f"lora-{index + 1}" for index in drawn.tolist()]


def parse_adapters(text: str, seed: int = 0) -> Adapters:
    """Return the adapters of a text such as "8" or "32:1": their number, and the skew.

    Raises ValueError for anything else.
    """
    num, _, skew = text.partition(":")
    try:
        num_adapters = whole_number("the number of adapters", num)
        return Adapters(num_adapters, number("the skew", skew or "0"), seed)
    except ValueError as error:
        raise ValueError(
            f"{text!r} names no adapters ({error}): write NUM or NUM:SKEW, as in 8 for eight that "
            "are asked for alike, or 32:1 for 32 by Zipf's law"
        ) from None
