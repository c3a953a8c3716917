"""What makes the steps of a simulated device take other times than its model says.

Everything is drawn from one seed.  Where a draw goes through a logarithm or an exponential, in
whose last bit machines differ, it is rounded, so that all of them tell the same to the byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

DRIFT_PERIOD_S = 120.0
"""How long a drifting device takes to become slower, faster and itself again."""
SLOW_FACTOR = 2.0
"""A slow step takes at least so many times as long: half of them more than 1.4 times that, one in a
hundred more than ten times that (a Pareto law of exponent 2: it has a mean, but no variance)."""

_PARETO_MEAN = 2 * SLOW_FACTOR
_TAIL_STREAM, _STALL_STREAM = 1, 2
"""Each kind draws from its own stream, so that adding one leaves the others as they were."""


@dataclass(frozen=True)
class Disturbances:
    """By how much the device is unlike its model; by default not at all.

    Noise, drift and slow steps leave the device as fast as it was on average: what they cost is
    the price of not knowing.  Stalls are time lost.
    """

    noise: float = 0.0
    """Sigma of a lognormal factor of mean one on every step's time."""
    drift: float = 0.0
    """Share by which the device becomes slower and faster, in a sine over time."""
    tail: float = 0.0
    """Share of steps that are slow, at least `SLOW_FACTOR` times as long, without a limit."""
    stall_s: float = 0.0
    """How long the device stands still at a time, as a garbage collection makes it."""
    stall_every_s: float = 10.0
    """How long it runs between two stalls, on average; the times in between are exponential."""

    def __post_init__(self) -> None:
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise must be a finite number >= 0, not {self.noise!r}")
        if not 0 <= self.drift < 1:
            raise ValueError(f"drift must be a share in [0, 1), not {self.drift!r}")
        if not 0 <= self.tail < 1:
            raise ValueError(f"tail must be a share of the steps in [0, 1), not {self.tail!r}")
        if not 0 <= self.stall_s < math.inf:
            raise ValueError(f"stall_s must be finite seconds >= 0, not {self.stall_s!r}")
        if not 0 < self.stall_every_s < math.inf:
            raise ValueError(f"stall_every_s must be finite seconds > 0, not {self.stall_every_s}")

    @property
    def are_none(self) -> bool:
        """True if every step takes what the model says."""
        return not (self.noise or self.drift or self.tail or self.stall_s)

    def __str__(self) -> str:
        """Those that there are: "noise 0.1, stall_s 0.2, stall_every_s 10"."""
        kinds = ["noise", "drift", "tail", "stall_s"]
        told = [kind for kind in kinds if getattr(self, kind)]
        told += ["stall_every_s"] if self.stall_s else []
        return ", ".join(f"{kind} {getattr(self, kind):g}" for kind in told) or "none"


UNDISTURBED = Disturbances()


class DisturbedTimes:
    """How long one device's steps really take, one after the other."""

    def __init__(self, disturbances: Disturbances, seed: int) -> None:
        self._of = disturbances
        self._noise = np.random.default_rng(seed)
        self._tail = np.random.default_rng([seed, _TAIL_STREAM])
        self._stalls = np.random.default_rng([seed, _STALL_STREAM])
        self._stall_at_s = self._gap_s() if disturbances.stall_s else math.inf

    def seconds(self, expected_s: float, start_s: float) -> float:
        """Of a step that its model expects to take so long; steps are asked in order of time."""
        of, seconds = self._of, expected_s
        if of.noise > 0:
            factor = self._noise.lognormal(-0.5 * of.noise**2, of.noise)
            seconds *= round(float(factor), 9)
        if of.drift > 0:
            angle = 2 * math.pi * start_s / DRIFT_PERIOD_S
            seconds *= 1 + of.drift * round(math.sin(angle), 9)
        if of.tail > 0:
            seconds *= self._tail_factor()
        if self._stall_at_s < start_s + seconds:
            seconds += self._stalled_s(start_s, seconds)
        return seconds

    def _tail_factor(self) -> float:
        tail = self._of.tail
        drawn = 1.0 - float(self._tail.random())
        factor = SLOW_FACTOR / math.sqrt(drawn / tail) if drawn <= tail else 1.0
        return factor / (1 + tail * (_PARETO_MEAN - 1))

    def _stalled_s(self, start_s: float, work_s: float) -> float:
        """What stalls add to a step with so much work; one that found the device idle ends too."""
        stall_s = self._of.stall_s
        end_s, stalled_s = start_s + work_s, 0.0
        while self._stall_at_s < end_s + stalled_s:
            stalled_s += max(0.0, min(stall_s, self._stall_at_s + stall_s - start_s))
            self._stall_at_s += stall_s + self._gap_s()
        return stalled_s

    def _gap_s(self) -> float:
        return round(float(self._stalls.exponential(self._of.stall_every_s)), 9)
