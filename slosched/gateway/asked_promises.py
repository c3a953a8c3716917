"""The TTFTs and tiers that requests lately asked for, so that replicas are asked about them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

_MOST_TTFTS = 3
"""With the default one, so many questions for quotes are asked in each poll."""
_MOST_TIERS = 16
_LONGEST_NAME = 100
"""Longest name of a tier that is remembered, in characters."""
_FORGOTTEN_AFTER_S = 10.0


class Tier(NamedTuple):
    """A tier as a request names it."""

    field: str
    """The field of the body or of `vllm_xargs`; a question for quotes names the tier by it, too."""
    name: str


T = TypeVar("T")


class Latest(Generic[T]):
    """The latest values, at most `most`, each until nobody has asked for it for 10 s."""

    def __init__(self, most: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._most, self._now_s = most, now_s
        self._asked_s: dict[T, float] = {}
        """When each was last asked for, the latest last."""

    def note(self, value: T) -> None:
        """Remember a value."""
        self._asked_s.pop(value, None)
        self._asked_s[value] = self._now_s()
        if len(self._asked_s) > self._most:
            del self._asked_s[next(iter(self._asked_s))]

    def all(self) -> Sequence[T]:
        """Return those that are remembered, the latest last."""
        since_s = self._now_s() - _FORGOTTEN_AFTER_S
        self._asked_s = {each: at_s for each, at_s in self._asked_s.items() if at_s >= since_s}
        return list(self._asked_s)


class AskedPromises:
    """Remembers what requests were to be promised."""

    def __init__(self) -> None:
        self._ttfts_s = Latest[float](_MOST_TTFTS)
        self._tiers = Latest[Tier](_MOST_TIERS)

    def note_ttft(self, ttft_s: float) -> None:
        """Remember a TTFT; one without a limit can only be a default one."""
        if ttft_s < math.inf:
            self._ttfts_s.note(ttft_s)

    def note_tier(self, tier: Tier) -> None:
        """Remember a tier, unless no server would have one of such a name."""
        if len(tier.name) <= _LONGEST_NAME:
            self._tiers.note(tier)

    def ttfts_but(self, default_s: float) -> Sequence[float]:
        """Return the TTFTs, without the one that is promised by default."""
        return [ttft_s for ttft_s in self._ttfts_s.all() if ttft_s != default_s]

    @property
    def tiers(self) -> Sequence[Tier]:
        return self._tiers.all()
