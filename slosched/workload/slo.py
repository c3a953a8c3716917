"""Durations as people write them, and rules that give each request its SLO.

A rule sees prompt lengths only, which a client knows when it sends a request.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from slosched.core import SLO
from slosched.spelling import number

_SECONDS_PER_UNIT = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)")
_MULTIPLE = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)x")
_PLUS = re.compile(r"(?<!e)\+")
_LEAST_AMBIGUOUS_S = 10.0
"""Promises from which on a number without a unit may be meant in milliseconds."""
_LONGEST_S = 1e9
"""A promise of more than 30 years is one of so long: the square of 1e300 s is no number, over which
policies stumbled."""


def parse_duration(text: str | float, *, may_be_zero: bool = False) -> float:
    """Return the seconds of "500ms", "1.5 s", "2m" or "1h"; a bare number is in seconds.

    Raises ValueError for anything else, and for durations that are not finite, or not positive
    unless they `may_be_zero`.
    """
    match = _DURATION.fullmatch(str(text).strip().lower())
    unit = match[2] or "s" if match else ""
    if match is None or unit not in _SECONDS_PER_UNIT:
        raise ValueError(
            f"{text!r} is not a duration: write a number and one of "
            f"{', '.join(_SECONDS_PER_UNIT)}, for example 500ms or 1.5s (no unit means seconds)"
        )
    seconds = float(match[1]) * _SECONDS_PER_UNIT[unit]
    if not 0 <= seconds < math.inf or (seconds == 0 and not may_be_zero):
        raise ValueError(f"a duration must be positive and finite, not {text!r}")
    return seconds


def parse_promised(text: str | float) -> float:
    """Return the seconds of a TTFT or a TPOT to promise, as `parse_duration` does.

    Raises ValueError also for a text such as "50", which may be meant in milliseconds: a promise
    that is a thousand times too long is always kept, and nobody notices.
    """
    seconds = parse_duration(text)
    if isinstance(text, str) and seconds >= _LEAST_AMBIGUOUS_S and not text.rstrip()[-1].isalpha():
        raise ValueError(f"{text!r} has no unit: write {text.strip()}ms or {text.strip()}s")
    return seconds


def seconds_of_ms(name: str, milliseconds: object) -> float:
    """Return the seconds of `milliseconds`, the value of the field or header `name`, at most 1e9.

    Raises ValueError for anything but a positive, finite number of milliseconds, or its text.
    """
    try:
        if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float | str):
            raise ValueError
        seconds = float(milliseconds) / 1000
        if not 0 < seconds < math.inf:
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(
            f"{name} must be a positive, finite number of milliseconds, not {milliseconds!r:.100}"
        ) from None
    return min(seconds, _LONGEST_S)


@dataclass(frozen=True, slots=True)
class TTFTPromise:
    """A TTFT of `base_s` plus `prefill_factor` times the prefill time on an idle device."""

    base_s: float = 0.0
    prefill_factor: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.base_s:g}s"] if self.base_s else []
        return "+".join([*parts, f"{self.prefill_factor:g}x"] if self.prefill_factor else parts)


def parse_ttft(text: str | float) -> TTFTPromise:
    """Parse a duration, a multiple of the unloaded prefill time, or both: "1s", "3x", "0.5s+3x".

    Raises ValueError for anything else.
    """
    durations, factors = [], []
    for part in _PLUS.split(str(text).strip().lower()):
        if match := _MULTIPLE.fullmatch(part.strip()):
            factors.append(float(match[1]))
        else:
            durations.append(part)
    if len(durations) > 1 or len(factors) > 1 or any(not 0 < f < math.inf for f in factors):
        raise ValueError(
            f"{text!r} is no TTFT promise: write a duration (1s), a positive multiple of the "
            "unloaded prefill time (3x), or both (0.5s+3x)"
        )
    return TTFTPromise(parse_promised(durations[0]) if durations else 0.0, sum(factors))


def parse_tier(text: str) -> tuple[float, SLO, str | None]:
    """Return the weight, the SLO and the name of a tier such as "0.5:1s/50ms": weight:TTFT/TPOT.

    The name may stand in front, as in "gold=0.5:1s/50ms".  Raises ValueError for anything else.
    """
    name, _, rest = text.rpartition("=")
    weight, _, promise = rest.partition(":")
    ttft, _, tpot = promise.partition("/")
    try:
        slo = SLO(parse_promised(ttft), parse_promised(tpot))
        return number("the weight", weight), slo, name or None
    except ValueError as error:
        raise ValueError(
            f"{text!r} is no tier ({error}): write weight:TTFT/TPOT, as in 0.5:1s/50ms, "
            "or with a name, gold=0.5:1s/50ms"
        ) from None


class SLORule(Protocol):
    """Gives each request of a trace its SLO."""

    def assign(self, num_prompt_tokens: Sequence[int]) -> list[SLO]:
        """Return one SLO for each request, in the order of the given prompt lengths."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """Each request draws one of several SLOs at random, in proportion to `weights`."""

    slos: tuple[SLO, ...]
    weights: tuple[float, ...]
    seed: int = 0
    names: tuple[str | None, ...] = ()
    """The names of the tiers, if they have some: `TraceRequest.tier`."""

    def __post_init__(self) -> None:
        if self.names and len(self.names) != len(self.slos):
            raise ValueError(f"there are {len(self.slos)} SLOs but names {self.names}")
        if not self.slos or len(self.slos) != len(self.weights):
            raise ValueError(
                f"tiers need one weight each: got {len(self.slos)} SLOs "
                f"and {len(self.weights)} weights"
            )
        bad = [w for w in self.weights if not (math.isfinite(w) and w >= 0)]
        if bad or sum(self.weights) <= 0:
            raise ValueError(
                f"weights of tiers must be finite, not negative, and not all zero: {self.weights}"
            )

    def assign(self, num_prompt_tokens: Sequence[int]) -> list[SLO]:
        return [self.slos[i] for i in self._drawn(len(num_prompt_tokens))]

    def tiers_of(self, num_requests: int) -> list[str | None]:
        """Return the name of the tier of each request, in the order of `assign`."""
        names = self.names or (None,) * len(self.slos)
        return [names[i] for i in self._drawn(num_requests)]

    def _drawn(self, num_requests: int) -> list[int]:
        rng = np.random.default_rng(self.seed)
        shares = np.asarray(self.weights, dtype=float) / sum(self.weights)
        drawn: list[int] = rng.choice(len(self.slos), size=num_requests, p=shares).tolist()
        return drawn


@dataclass(frozen=True, slots=True)
class Proportional:
    """A TTFT that grows with the prompt: `base_s` + `factor` × seconds of its unloaded prefill.

    `prefill_s` maps prompt tokens to seconds on an idle device, for example
    `LatencyModel.predict_prefill`.
    """

    prefill_s: Callable[[int], float]
    factor: float
    tpot_s: float
    base_s: float = 0.0
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ValueError(f"factor must be positive and finite, not {self.factor!r}")
        if not 0 <= self.base_s < math.inf:
            raise ValueError(f"base_s must be finite and not negative, not {self.base_s!r}")

    def assign(self, num_prompt_tokens: Sequence[int]) -> list[SLO]:
        return [self._slo(n) for n in num_prompt_tokens]

    def _slo(self, num_prompt_tokens: int) -> SLO:
        prefill_s = self.prefill_s(num_prompt_tokens)
        if not 0 <= prefill_s < math.inf:
            raise ValueError(
                f"prefill_s({num_prompt_tokens}) returned {prefill_s!r}; "
                "expected finite seconds that are not negative"
            )
        return SLO(self.base_s + self.factor * prefill_s, self.tpot_s, self.e2e_s)
