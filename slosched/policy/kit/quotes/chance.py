"""The chance that a prompt is in time behind those before it and those that will overtake it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from slosched.policy.kit.quotes.backlog import Backlog
from slosched.policy.kit.quotes.lineup import Floats
from slosched.policy.kit.quotes.speed import RecentSpeed

_MEMORY_S = 4.0
"""Time after which an arrival or a step counts e times less."""
_LEAST_WATCH_S = 1.0
"""Least time over which the latest arrivals are averaged where older ones are no longer kept."""
_FOREVER_S = 1e100
"""A time from which on a first token surely comes; the square of a longer one may be no number."""
_SIZE = 512
"""Number of latest arrivals that are kept."""
_DISPERSION = 1.5
"""Variance of arrivals over that of Poisson arrivals: real ones come in bursts."""
_NOISE = 0.02
"""Standard deviation of what the device gets done, over what it gets done on average."""
_LEAST_SHARE = 0.02
"""Least share of the device that is left beside what overtakes."""
_LEAST_SPEED = 1e-9
"""Least speed, so that nothing takes infinitely long: after a device stood still for an hour with
prompts left over, what it had got done before counts for exactly nothing."""


_LEAST_VARIANCE = 1e-300
"""In place of a variance of nothing."""
_ROUNDING_S = 1e-6
"""Times that differ by less are the same."""


class Overtaking(NamedTuple):
    """The prompts that will arrive and go first, in seconds of prefills."""

    share: float
    """What they bring in a second."""
    variance: float
    """The variance of that if they are a Poisson process."""


_NOBODY = Overtaking(0.0, 0.0)


class Outlook(NamedTuple):
    """What has to be done before a prompt's first token, and how fast that goes."""

    needed_s: float
    """Seconds of prefills, each alone on the device: those that go first, and its own."""
    speed: float
    """Seconds of prefills that the device gets done in a second."""
    overtaking: Overtaking

    @property
    def expected_s(self) -> float:
        """Return the expected time until its first token."""
        left = max(self.speed - self.overtaking.share, _LEAST_SHARE * self.speed)
        return self.needed_s / left

    def chance(self, left_s: float) -> float:
        """Return the chance that the first token comes in `left_s`.

        What overtakes in that time is taken to be normally distributed.
        """
        if not 0 < left_s < _FOREVER_S:
            return float(left_s > 0)
        spare_s = (self.speed - self.overtaking.share) * left_s - self.needed_s
        variance = _DISPERSION * self.overtaking.variance * left_s + (_NOISE * left_s) ** 2
        if variance == 0:  # so short a time that its square is none
            return float(spare_s > 0)
        return 0.5 * math.erfc(-spare_s / math.sqrt(2 * variance))


class Arrivals:
    """The prompts that were let in lately, by which those to come are foreseen."""

    def __init__(self) -> None:
        self._times_s = np.full(_SIZE, -math.inf)
        self._works_s = np.zeros(_SIZE)
        self._lengths_tokens = np.zeros(_SIZE)
        self._ttfts_s = np.zeros(_SIZE)
        self._num = 0

    def add(self, now_s: float, work_s: float, num_tokens: int, ttft_s: float) -> None:
        """Note a prompt of `num_tokens`, which takes `work_s` alone on the device."""
        at = self._num % _SIZE
        self._times_s[at], self._works_s[at] = now_s, work_s
        self._lengths_tokens[at], self._ttfts_s[at] = num_tokens, ttft_s
        self._num += 1

    def shorter_than(self, num_tokens: int, now_s: float) -> Overtaking:
        """Return what prompts of less than `num_tokens` bring in a second.  O(arrivals kept)."""
        if not self._num:
            return _NOBODY
        works_s = np.where(self._lengths_tokens < num_tokens, self._works_s, 0.0)
        weighted = self._weights(now_s) * works_s
        watched_s = self._watched_s(now_s)
        return Overtaking(float(weighted.sum()) / watched_s, float(weighted @ works_s) / watched_s)

    def shorter_within(
        self, num_tokens: int, ttfts_s: Floats, now_s: float
    ) -> tuple[Floats, Floats]:
        """Return what shorter prompts with at most each of these TTFTs bring in a second.

        Two arrays of the length of `ttfts_s`: the share and the variance of `Overtaking`.
        """
        if not self._num:
            return np.zeros_like(ttfts_s), np.zeros_like(ttfts_s)
        by_ttft = np.argsort(self._ttfts_s)
        works_s = np.where(self._lengths_tokens < num_tokens, self._works_s, 0.0)[by_ttft]
        weighted = self._weights(now_s)[by_ttft] * works_s / self._watched_s(now_s)
        places = np.searchsorted(self._ttfts_s[by_ttft], ttfts_s, side="right")
        shares = np.concatenate(([0.0], np.cumsum(weighted)))
        variances = np.concatenate(([0.0], np.cumsum(weighted * works_s)))
        return shares[places], variances[places]

    def shorter_than_each(self, lengths_tokens: Sequence[int], now_s: float) -> list[Overtaking]:
        """Return for each of several prompts what shorter ones bring.  O(arrivals)."""
        if not self._num:
            return [_NOBODY] * len(lengths_tokens)
        by_length = np.argsort(self._lengths_tokens)
        works = self._works_s[by_length]
        weighted = self._weights(now_s)[by_length] * works / self._watched_s(now_s)
        places = np.searchsorted(self._lengths_tokens[by_length], lengths_tokens)
        shares = np.concatenate(([0.0], np.cumsum(weighted)))[places]
        variances = np.concatenate(([0.0], np.cumsum(weighted * works)))[places]
        return [Overtaking(*each) for each in zip(shares.tolist(), variances.tolist(), strict=True)]

    def _weights(self, now_s: float) -> Floats:
        weights: Floats
        # Where the clock was set back, some came later than now.
        weights = np.exp(np.minimum(self._times_s - now_s, 0.0) / _MEMORY_S)
        return weights

    def _watched_s(self, now_s: float) -> float:
        """Return the time over which arrivals are averaged, where older seconds count less.

        Before the first arrival nobody came, and that counts, too.
        """
        if self._num <= _SIZE:
            return _MEMORY_S
        seen_s = max(_LEAST_WATCH_S, now_s - float(self._times_s[self._num % _SIZE]))
        return _MEMORY_S * (1 - math.exp(-seen_s / _MEMORY_S))


class Queued(NamedTuple):
    """A prompt that was let in and waits behind others."""

    needed_s: float
    """Seconds of prefills until its first token: those that go first, and its own."""
    num_tokens: int
    """Tokens that are left of its prompt."""
    left_s: float
    """Time until its first token is due."""


class Prospects:
    """Learns how much the device gets done and what arrives, and foresees when a prompt is done."""

    def __init__(self) -> None:
        self._arrivals = Arrivals()
        self._speed = RecentSpeed(first=1.0, first_s=0.05, memory_s=_MEMORY_S)
        """Of all full steps."""
        self._top_speed = RecentSpeed(first=1.0, first_s=0.05, memory_s=_MEMORY_S)
        """Of those without a reserve."""
        self.backlog = Backlog()
        """Each step is noted in it."""

    def let_in(self, now_s: float, work_s: float, num_tokens: int, ttft_s: float) -> None:
        """Note a prompt that waits from now on, and takes `work_s` alone on the device."""
        self._arrivals.add(now_s, work_s, num_tokens, ttft_s)

    def observe_full_step(
        self, work_s: float, took_s: float, now_s: float, *, has_reserve: bool
    ) -> None:
        """Learn how many seconds of prefills were done in a step that left prompts over.

        The step took `took_s` and has ended at `now_s`.  One that `has_reserve` would have done
        more if prompts had been short of time: the device is at least as fast as it shows.
        """
        self._speed.observe(work_s, took_s, now_s)
        if not has_reserve:
            self._top_speed.observe(work_s, took_s, now_s)

    def outlook(
        self, needed_s: float, num_tokens: int, now_s: float, *, is_overtaken: bool
    ) -> Outlook:
        """Return what is to be done before the first token of a prompt that arrives at `now_s`.

        `needed_s` are seconds of prefills: those that go first, and its own.  With `is_overtaken`,
        prompts of less than its `num_tokens` that are still to arrive go first, and are foreseen.
        """
        overtaking = self._arrivals.shorter_than(num_tokens, now_s) if is_overtaken else _NOBODY
        return Outlook(needed_s, self._speed_at(now_s), overtaking)

    def hardest(
        self, needed_s: Floats, until_s: Floats, num_tokens: int, now_s: float, wait_s: float
    ) -> tuple[Outlook, int]:
        """Return the outlook for the one of several times that is hardest to keep, and its place.

        In each of `until_s`, seconds from now of which the first are the TTFT of a new prompt of
        `num_tokens`, `needed_s` of prefills have to be done, and none are in the first `wait_s`.
        Of the shorter prompts that are still to arrive, those count that arrive within that TTFT
        and are due by then.
        """
        speed = self._speed_at(now_s)
        shares, variances = self._arrivals.shorter_within(num_tokens, until_s + _ROUNDING_S, now_s)
        left_s = np.maximum(until_s - wait_s, 0.0)
        own_s = float(left_s[0])
        spare_s = speed * left_s - needed_s - shares * own_s
        variance = _DISPERSION * variances * own_s + (_NOISE * left_s) ** 2
        hardest = int(np.argmin(spare_s / np.sqrt(np.maximum(variance, _LEAST_VARIANCE))))
        at = hardest if own_s else 0
        needed, share, each = float(needed_s[at]), float(shares[at]), float(variances[at])
        if at == 0:
            return Outlook(needed, speed, Overtaking(share, each)), at
        overtaking = Overtaking(0.0, each * own_s / float(left_s[at]))
        return Outlook(needed + share * own_s, speed, overtaking), at

    def chance_lost(self, queued: Sequence[Queued], more_s: float, now_s: float) -> float:
        """Return how many fewer of the queued are in time if `more_s` of prefills go first, too.

        It is the sum of the chances that they lose.  Shorter prompts that are still to arrive go
        first, and are foreseen.
        """
        speed = self._speed_at(now_s)
        overtaking = self._arrivals.shorter_than_each([each.num_tokens for each in queued], now_s)
        lost = 0.0
        for each, others in zip(queued, overtaking, strict=True):
            before = Outlook(each.needed_s, speed, others).chance(each.left_s)
            lost += before - Outlook(each.needed_s + more_s, speed, others).chance(each.left_s)
        return lost

    def _speed_at(self, now_s: float) -> float:
        """Return the seconds of prefills that the device gets done in a second.

        In an overload that lasts, few wait only because others are refused, and a reserve is none.
        """
        usual = self._speed.at(now_s)
        reserve = max(0.0, self._top_speed.at(now_s) - usual)
        return max(_LEAST_SPEED, usual + (1 - self.backlog.pressure) * reserve)
