"""What a replica expected of prompts of several lengths when it was asked for quotes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slosched.core import NO_SLO, SLO, OnInfeasible

_GRID_BASE = 4
"""Each length of the grid is so many times the one before it."""
_GRID_START_TOKENS = 16


def grid_tokens(max_model_len: int) -> list[int]:
    """Return the prompt lengths to ask a replica about, up to the longest that it takes."""
    most = max(1, max_model_len - 1)
    lengths: list[int] = []
    length = _GRID_START_TOKENS
    while length < most and len(lengths) < 15:
        lengths.append(length)
        length *= _GRID_BASE
    return [*lengths, most]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Times by prompt length; between two lengths they are interpolated, in seconds."""

    lengths_tokens: Sequence[int]
    alone_s: Sequence[float]
    """TTFT if the device had nothing else to do."""
    likely_s: Sequence[float]
    """The median TTFT."""
    least_s: Sequence[float]
    """The TTFT that one request in ten stays below."""
    tpot_s: float
    """The median TPOT."""
    alone_tpot_s: float
    """TPOT if the device had nothing else to do."""
    slo: SLO
    """The SLO of the requests that it is for."""
    on_infeasible: OnInfeasible
    """What becomes of requests that do not say it, if their SLO cannot be kept."""
    num_requests: int
    """Requests that the replica had, from whomever."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Forecast:
        """Return the forecast of an answer to GET /v1/quote.

        Raises LookupError, TypeError, ValueError or ArithmeticError if it is none.
        """
        quotes = document["data"] if document["object"] == "list" else [document]
        first = quotes[0]
        lengths = [int(quote["prompt_tokens"]) for quote in quotes]
        if lengths[0] < 1 or lengths != sorted(set(lengths)):
            raise ValueError(f"quotes are for positive lengths that rise, not {lengths}")
        promised = first["promised_ms"]
        return cls(
            lengths,
            [_seconds(quote["alone_ms"]["ttft"]) for quote in quotes],
            [_seconds(quote["ttft_ms"]["p50"]) for quote in quotes],
            [_seconds(quote["ttft_ms"]["p10"]) for quote in quotes],
            _seconds(first["tpot_ms"]["p50"]),
            _seconds(first["alone_ms"]["tpot"]),
            SLO(
                NO_SLO.ttft_s if promised["ttft"] is None else promised["ttft"] / 1000,
                NO_SLO.tpot_s if promised["tpot"] is None else promised["tpot"] / 1000,
            ),
            OnInfeasible(document.get("on_infeasible", OnInfeasible.REJECT.value)),
            int(first["num_requests_running"]) + int(first["num_requests_waiting"]),
        )

    def at(self, times_s: Sequence[float], num_tokens: int) -> float:
        """Return one of its columns at a prompt length.

        Below the first length it is the value there; beyond the last one it grows in proportion.
        """
        lengths = self.lengths_tokens
        place = bisect_left(lengths, num_tokens)
        if place == 0:
            return times_s[0]
        if place == len(lengths):
            return times_s[-1] * num_tokens / lengths[-1]
        low, high = lengths[place - 1], lengths[place]
        share = (num_tokens - low) / (high - low)
        return times_s[place - 1] + share * (times_s[place] - times_s[place - 1])


def _seconds(time_ms: float) -> float:
    """Return a time that was told in milliseconds; raise ValueError for one that is none."""
    if not 0 <= time_ms < math.inf:
        raise ValueError(f"a time must be finite and not negative, not {time_ms!r} ms")
    return time_ms / 1000
