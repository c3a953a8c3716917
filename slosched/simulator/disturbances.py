"""Disturbances, which make steps of a simulated device take other times than its model says.

Everything is drawn from one seed.  Machines differ in the last bit of logarithms and exponentials,
so draws that use them are rounded, and all machines give the same results to the byte.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

DRIFT_PERIOD_S = 120.0
"""Time in which a drifting device becomes slower, then faster, and is itself again."""
SLOW_FACTOR = 2.0
"""Factor by which a slow step takes at least longer.

Half of the slow steps take more than 1.4 times that, and one in a hundred more than ten times that:
a Pareto law of exponent 2, which has a mean but no variance.
"""

_PARETO_MEAN = 2 * SLOW_FACTOR
_TAIL_STREAM, _STALL_STREAM = 1, 2
"""Random streams, one for each kind, so that adding one kind leaves the others as they were."""


@dataclass(frozen=True)
class Disturbances:
    """The differences between the device and its model; there are none by default.

    Noise, drift and slow steps leave the device as fast as it was on average, so what they cost is
    the price of not knowing.  Stalls are lost time.
    """

    noise: float = 0.0
    """Sigma of a lognormal factor of mean one on every step's time."""
    drift: float = 0.0
    """Largest share by which the device becomes slower and faster, in a sine over time."""
    tail: float = 0.0
    """Share of steps that are slow: at least `SLOW_FACTOR` times as long, without a limit."""
    stall_s: float = 0.0
    """Length of a stall, in which the device stands still, as in a garbage collection."""
    stall_every_s: float = 10.0
    """Mean time between two stalls; it is distributed exponentially."""
    slowness: tuple[tuple[float, float], ...] = ()
    """Times in seconds, rising, and the factor on every step that begins from then on."""

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
        times_s = [time_s for time_s, _ in self.slowness]
        if times_s != sorted(set(times_s)) or any(not 0 < f < math.inf for _, f in self.slowness):
            raise ValueError(
                f"slowness must be positive factors at rising times, not {self.slowness!r}"
            )

    @property
    def are_none(self) -> bool:
        """Tell whether every step takes what the model says."""
        return not (self.noise or self.drift or self.tail or self.stall_s or self.slowness)

    def __str__(self) -> str:
        """Describe the disturbances that there are: "noise 0.1, stall_s 0.2, stall_every_s 10"."""
        kinds = ["noise", "drift", "tail", "stall_s"]
        told = [kind for kind in kinds if getattr(self, kind)]
        told += ["stall_every_s"] if self.stall_s else []
        words = [f"{kind} {getattr(self, kind):.3g}" for kind in told]
        if self.slowness:
            factors = [factor for _, factor in self.slowness]
            words.append(f"slowness {min(factors):.2f} to {max(factors):.2f}")
        return ", ".join(words) or "none"


UNDISTURBED = Disturbances()


class DisturbedTimes:
    """The true times of one device's steps, one after the other."""

    def __init__(self, disturbances: Disturbances, seed: int) -> None:
        self._of = disturbances
        self._slower_from_s = [time_s for time_s, _ in disturbances.slowness]
        self._noise = np.random.default_rng(seed)
        self._tail = np.random.default_rng([seed, _TAIL_STREAM])
        self._stalls = np.random.default_rng([seed, _STALL_STREAM])
        self._stall_at_s = self._gap_s() if disturbances.stall_s else math.inf

    def seconds(self, expected_s: float, start_s: float) -> float:
        """Return the true seconds of a step; steps must be asked about in order of their start."""
        of, seconds = self._of, expected_s
        if at := bisect_right(self._slower_from_s, start_s):
            seconds *= of.slowness[at - 1][1]
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
        """Return the seconds that stalls add to a step.

        Of a stall that began while the device was idle, only the rest counts.
        """
        stall_s = self._of.stall_s
        end_s, stalled_s = start_s + work_s, 0.0
        while self._stall_at_s < end_s + stalled_s:
            stalled_s += max(0.0, min(stall_s, self._stall_at_s + stall_s - start_s))
            self._stall_at_s += stall_s + self._gap_s()
        return stalled_s

    def _gap_s(self) -> float:
        return round(float(self._stalls.exponential(self._of.stall_every_s)), 9)
