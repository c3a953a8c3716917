"""Arrival processes: independent gaps, or Poisson arrivals at a rate that changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from slosched.workload.statistics import FloatArray

_GRID_S = 0.25
"""Step of the clock's random rate: a quarter of the shortest correlation time that we fit."""
_BLOCK_STEPS = 4096
_DAY_STEPS = 10_000


class Arrivals(Protocol):
    """An arrival process with a rate of its own."""

    def times_s(self, num_requests: int, rng: np.random.Generator) -> FloatArray:
        """Draw sorted arrival times of shape (num_requests,); time zero may be anywhere."""


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Independent gamma gaps of mean 1 s: `cv` 1 is Poisson, above it bursty, below it regular."""

    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 1e-9 <= self.cv <= 1000:
            raise ValueError(f"cv of gamma gaps must be between 1e-9 and 1000, not {self.cv!r}")

    def times_s(self, num_requests: int, rng: np.random.Generator) -> FloatArray:
        shape = self.cv**-2
        return np.cumsum(rng.gamma(shape, 1 / shape, num_requests))


@dataclass(frozen=True, slots=True)
class WeibullArrivals:
    """Independent Weibull gaps of mean 1 s: `cv` 1 is Poisson, above it bursty, below it regular.

    At the same CV its long gaps are longer and its short ones not as short as a gamma's.
    """

    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 0.05 <= self.cv <= 50:
            raise ValueError(f"cv of Weibull gaps must be between 0.05 and 50, not {self.cv!r}")

    def times_s(self, num_requests: int, rng: np.random.Generator) -> FloatArray:
        shape = self._shape()
        return np.cumsum(rng.weibull(shape, num_requests)) / math.gamma(1 + 1 / shape)

    def _shape(self) -> float:
        """Find the k with 1 + cv^2 = Gamma(1 + 2/k) / Gamma(1 + 1/k)^2."""
        from scipy.optimize import brentq  # slow to import, which only these arrivals should pay

        def excess(shape: float) -> float:
            log_ratio = math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)
            return log_ratio - math.log1p(self.cv**2)

        return float(brentq(excess, 0.1, 100.0))


@dataclass(frozen=True, slots=True)
class DailyArrivals:
    """Poisson arrivals that follow the day: `rate` (1 + `swing` sin(2 pi t / `day_s`)).

    The day begins in the morning, at the mean rate. With the default swing four times as many
    requests arrive at the peak as at the trough.
    """

    rate: float = 1.0
    swing: float = 0.6
    day_s: float = 86_400.0

    def __post_init__(self) -> None:
        if not 0 <= self.swing <= 1:
            raise ValueError(f"swing must be between 0 and 1, not {self.swing!r}")
        if not 0 < self.day_s < math.inf:
            raise ValueError(f"day_s must be positive and finite, not {self.day_s!r}")

    def times_s(self, num_requests: int, rng: np.random.Generator) -> FloatArray:
        passed_s = np.cumsum(rng.exponential(1 / self.rate, num_requests))  # at a constant rate
        grid_s = np.linspace(0, 1, _DAY_STEPS + 1) * self.day_s
        turn = 2 * math.pi / self.day_s
        by_then_s = grid_s + self.swing / turn * (1 - np.cos(turn * grid_s))
        days, rest_s = np.divmod(passed_s, self.day_s)
        return days * self.day_s + np.interp(rest_s, by_then_s, grid_s)


@dataclass(frozen=True, slots=True)
class QuantileArrivals:
    """Independent gaps given by their quantiles `gaps_s` at `levels`, linear in between.

    They suit traces in which the gaps themselves make the bursts: most gaps last milliseconds, a
    few last minutes.
    """

    levels: tuple[float, ...]
    gaps_s: tuple[float, ...]

    def times_s(self, num_requests: int, rng: np.random.Generator) -> FloatArray:
        return np.cumsum(np.interp(rng.random(num_requests), self.levels, self.gaps_s))


@dataclass(frozen=True, slots=True)
class ModulatedPoisson:
    """Poisson arrivals on a clock whose speed is a product of lognormal processes of mean 1.

    Each (variance, tau_s) of `modulation` is one process: the variance of its speed, and the
    correlation time of the logarithm, exp(-lag / tau_s).  The index of dispersion of counts then
    grows with the window, as in traces where a busy minute follows a busy minute.
    """

    rate: float
    modulation: tuple[tuple[float, float], ...]

    def times_s(self, num_requests: int, rng: np.random.Generator) -> FloatArray:
        clock_times_s = np.cumsum(rng.exponential(1 / self.rate, num_requests))
        return _on_modulated_clock(clock_times_s, self.modulation, rng)


def _on_modulated_clock(
    clock_times_s: FloatArray, modulation: Sequence[tuple[float, float]], rng: np.random.Generator
) -> FloatArray:
    """Return the times at which a clock of random speed shows each of these times; same shape."""
    shown = [0.0]
    states = [rng.standard_normal() for _ in modulation]
    while shown[-1] <= clock_times_s[-1]:
        log_speed = np.zeros(_BLOCK_STEPS)
        for i, (variance, tau_s) in enumerate(modulation):
            noise = rng.standard_normal(_BLOCK_STEPS)
            path = _unit_process(noise, states[i], tau_s)
            states[i] = float(path[-1])
            # A lognormal of mean 1 and this variance.
            log_variance = math.log1p(variance)
            log_speed += math.sqrt(log_variance) * path - log_variance / 2
        shown.extend(shown[-1] + _GRID_S * np.cumsum(np.exp(log_speed)))
    real_times = _GRID_S * np.arange(len(shown))
    arrivals: FloatArray = np.interp(clock_times_s, shown, real_times)
    return arrivals


def _unit_process(noise: FloatArray, state: float, tau_s: float) -> FloatArray:
    """Draw an Ornstein-Uhlenbeck path of variance 1 on the grid, starting from `state`.

    `scipy.signal.lfilter` draws the same path, but takes two seconds to import.
    """
    keep = math.exp(-_GRID_S / tau_s)
    pushes = (math.sqrt(1 - keep**2) * noise).tolist()
    _, *path = accumulate(pushes, lambda at, push: keep * at + push, initial=state)
    return np.array(path)
